"""The figures of README's comparison are those of the tables that it cites."""

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
def test_compute_utilisation(label: str, link: str) -> None:
    assert [share.replace(" ", "") for share in shown(label)] == measured(link, "CU")


def test_bytes_sent() -> None:
    sent = measured("100 Mbit/s, 100 ms, 2 replicas", "sent per H steps: wire, payload (MB)")
    payloads = [float(cell.rpartition(", ")[2].replace(",", "")) for cell in sent]
    assert [float(cell.removesuffix(" MB").replace(",", "")) for cell in shown("sent per replica")] == [
        pytest.approx(payload, abs=0.5) for payload in payloads
    ]
