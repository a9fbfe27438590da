"""README's figures are those of the tables that it cites."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
METHODS = ("Streaming fp4", "torchft Streaming", "hivemind float16", "data-parallel (torch DDP)")
"""The rows of benchmarks/wan that README's columns show, in order."""


def cells(row: str) -> list[str]:
    return [cell.strip(" *") for cell in row.strip("|\n").split("|")]


def measured(link: str, column: str) -> list[str]:
    """Return the values of a column for README's methods, from the page's table of a link."""
    page = (ROOT / "benchmarks/wan/README.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", page.partition(f"## {link}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    head, _, *rows = [cells(line) for line in section.splitlines() if line.startswith("|")]
    by_method = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    return [by_method[method][column] for method in METHODS]


def shown(label: str) -> list[str]:
    """Return the cells of README's row that begins with ``label``."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return next(cells(line)[1:] for line in readme.splitlines() if line.startswith(f"| {label}"))


@pytest.mark.parametrize(
    ("label", "link"),
    [
        ("compute utilisation, 2 replicas", "100 Mbit/s, 100 ms, 2 replicas"),
        ("the same, 4 replicas", "100 Mbit/s, 100 ms, 4 replicas"),
    ],
)
def test_the_readme_has_the_measured_compute_utilisation(label: str, link: str) -> None:
    assert [share.replace(" ", "") for share in shown(label)] == measured(link, "CU")


def test_the_readme_has_the_measured_bytes() -> None:
    sent = measured("100 Mbit/s, 100 ms, 2 replicas", "sent per H steps: wire, payload (MB)")
    payloads = [float(cell.rpartition(", ")[2].replace(",", "")) for cell in sent]
    assert [float(cell.removesuffix(" MB").replace(",", "")) for cell in shown("sent per replica")] == [
        pytest.approx(payload, abs=0.5) for payload in payloads
    ]


SEEDS = re.compile(r"([+-][\d.]+) % / ([+-][\d.]+) % / ([+-][\d.]+) %")


def relative_losses(run: str) -> list[float]:
    """Return by how many per cent a run's loss is above that of data-parallel training, for each seed."""
    page = (ROOT / "benchmarks/parity/README.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith(f"| {run} | 1."))
    return [float(value) for value in SEEDS.findall(row)[0]]


def seeds_of_muon(preset: str) -> list[float]:
    """Return by how many per cent Streaming with Muon is above data-parallel Muon, for each seed."""
    page = (ROOT / "benchmarks/parity/README.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^Streaming fp4 relative to data-parallel, both with {re.escape(preset)}: (.*)$", page, re.M)
    return [float(value) for value in re.findall(r"([+-][\d.]+) %", row)]


TINY_MUON = "Muon, AdamW betas .97/.99, momentum .85"


@pytest.mark.parametrize(
    ("words", "losses"),
    [
        ("at four bits ends {} % above data-parallel training", relative_losses("Streaming fp4")),
        ("isotropic means (IsoLoCo, an option) {} % below it", relative_losses("Streaming fp4, isotropic means")),
        ("With Muon it ends {} % below data-parallel AdamW", relative_losses(f"Streaming fp4, {TINY_MUON}")),
        ("and {} % above data-parallel Muon", seeds_of_muon(TINY_MUON)),
    ],
)
def test_the_readme_has_the_measured_losses(words: str, losses: list[float]) -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    sizes = sorted(abs(loss) for loss in losses)
    assert words.format(f"{sizes[0]:.1f} to {sizes[-1]:.1f}") in readme
    assert all((loss < 0) == ("below" in words) for loss in losses)


def test_the_readme_says_how_long_the_algorithm_in_one_file_is() -> None:
    lines = len((ROOT / "examples/from_scratch.py").read_text(encoding="utf-8").splitlines())
    assert f"all of it in {round(lines, -1)} lines" in (ROOT / "README.md").read_text(encoding="utf-8")
