"""Pictures in all formats: their texts, reproducible bytes, and errors for invalid input."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from diloco.errors import ConfigurationError
from diloco.simulate import SUFFIXES, Span, check_picture_path, draw_timeline, draw_utilization, pictures
from tests.lazy import Lazy
from tests.processes import Processes
from tests.simulate.svg import names, texts

matplotlib = Lazy("matplotlib")

GRID = np.logspace(-1, 3, 50)
CURVES = {
    "Data-Parallel": (GRID, GRID / (GRID + 100)),
    "vanilla DiLoCo": (GRID, GRID / (GRID + 1)),
    "+ overlapped, FP4": (GRID, np.minimum(1.0, GRID / 3)),
}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_same_input_is_the_same_file(spans: tuple[Span, ...], tmp_path: Path, suffix: str) -> None:
    drawn = []
    for name, size in (("a", 10.0), ("b", 25.0)):
        with matplotlib.rc_context({"font.size": size, "svg.hashsalt": name}):
            before = dict(matplotlib.rcParams)
            draw_timeline(spans, tmp_path / f"{name}{suffix}", title="same")
            draw_utilization(CURVES, tmp_path / f"{name}-curves{suffix}", title="same", targets=(0.8,))
            assert dict(matplotlib.rcParams) == before
        drawn.append([(tmp_path / f"{name}{end}{suffix}").read_bytes() for end in ("", "-curves")])
    assert drawn[0] == drawn[1]
    assert len(list(tmp_path.iterdir())) == 4  # no temporary files are left


def test_a_picture_replaces_the_one_that_was_there(spans: tuple[Span, ...], tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_text("old")
    draw_timeline(spans, path, title="new")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("draw", ["timeline", "utilization"])
def test_no_text_is_too_small_to_read(spans: tuple[Span, ...], tmp_path: Path, draw: str) -> None:
    path = tmp_path / "a.svg"
    if draw == "timeline":
        draw_timeline(spans, path, title="sizes")
    else:
        draw_utilization(CURVES, path, title="sizes", targets=(0.5,))
    sizes = [
        float(size) for size in re.findall(r"font(?:-size)?: [a-z0-9 ]*?([0-9.]+)px", path.read_text(encoding="utf-8"))
    ]
    assert len(sizes) == len(texts(path))
    assert min(sizes) >= 9


def test_curves_have_labels_targets_and_a_legend(tmp_path: Path) -> None:
    draw_utilization(CURVES, tmp_path / "a.svg", title="1B parameters", targets=(0.5, 0.995))
    written = texts(tmp_path / "a.svg")
    for label in ("1B parameters", "bandwidth (Gbit/s)", "compute utilisation (%)", "50 %", "99.5 %", *CURVES):
        assert written.count(label) == 1, label
    assert {"0.1", "1", "10", "100", "1000"} <= set(written)
    told = names(tmp_path / "a.svg")
    assert "Data-Parallel\n0.1 Gbit/s: 0.0999 %" in told
    for name in CURVES:
        assert 10 <= sum(line.startswith(f"{name}\n") for line in told) <= pictures.MARKERS_PER_LINE


def test_methods_differ_without_their_colours(tmp_path: Path) -> None:
    curves = {f"method {index}": (GRID[:3], np.full(3, 0.5)) for index in range(12)}
    draw_utilization(curves, tmp_path / "a.svg", title="")
    looks = {(index % len(pictures.METHOD_MARKERS), index % len(pictures.METHOD_DASHES)) for index in range(40)}
    assert len(looks) == 40
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    dashes = re.findall(r"stroke-dasharray: ([0-9., ]+)", text)
    assert len(set(dashes)) == len(pictures.METHOD_DASHES) - 1  # the solid line has no dashes


def test_a_single_point_and_less_than_a_decade_are_drawn(tmp_path: Path) -> None:
    draw_utilization({"one": ([2.0], [1.0]), "two": ([2.0, 3.0], [0.0, 0.5])}, tmp_path / "a.svg", title="")
    written = texts(tmp_path / "a.svg")
    assert {"2", "3"} <= set(written)
    assert len(names(tmp_path / "a.svg")) == 3


@pytest.mark.parametrize(
    "curve",
    [
        ([1.0, 2.0], [0.5]),
        ([], []),
        ([0.0, 1.0], [0.5, 0.5]),
        ([2.0, 1.0], [0.5, 0.5]),
        ([1.0, float("inf")], [0.5, 0.5]),
        ([1.0], [1.5]),
        ([1.0], [float("nan")]),
        ([[1.0]], [[0.5]]),
    ],
)
def test_curves_that_are_none_are_refused(tmp_path: Path, curve: tuple[list[float], list[float]]) -> None:
    with pytest.raises(ConfigurationError, match="the curve 'odd'"):
        draw_utilization({"odd": curve}, tmp_path / "a.svg", title="")
    assert list(tmp_path.iterdir()) == []


def test_no_curves_no_spans_and_odd_targets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="0 curves"):
        draw_utilization({}, tmp_path / "a.svg", title="")
    with pytest.raises(ConfigurationError, match=r"targets \(95,\)"):
        draw_utilization(CURVES, tmp_path / "a.svg", title="", targets=(95,))
    with pytest.raises(ConfigurationError, match="at least one span"):
        draw_timeline([], tmp_path / "a.svg", title="")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a.pdf", "a", "a.SVG", "a.svg.gz"])
def test_other_formats_are_refused_with_the_three_that_work(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"\.svg, \.png or \.html"):
        check_picture_path(tmp_path / name)


def test_a_folder_that_is_not_there_and_one_that_is_are_refused(spans: tuple[Span, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no folder"):
        draw_timeline(spans, tmp_path / "nowhere" / "a.svg", title="")
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(ConfigurationError, match="it is a folder"):
        check_picture_path(tmp_path / "folder.svg")
    check_picture_path(tmp_path / "a.svg")
    assert not (tmp_path / "a.svg").exists()


def test_a_missing_matplotlib_is_refused_with_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigurationError, match=re.escape("pip install 'diloco[plots]'")):
        check_picture_path(tmp_path / "a.svg")
    with pytest.raises(ConfigurationError, match="needs matplotlib"):
        draw_utilization(CURVES, tmp_path / "a.svg", title="")


def draw_one(rank: int, path: Path) -> list[str]:
    """Draw in a new process, and return the matplotlib modules that were imported before and after."""
    imported = [name for name in ("matplotlib", "matplotlib.pyplot") if name in sys.modules]
    draw_utilization({"a": (GRID[:1], GRID[:1])}, path, title="")
    return imported + [name for name in ("matplotlib", "matplotlib.pyplot") if name in sys.modules]


def test_matplotlib_is_imported_only_to_draw_and_pyplot_never(tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(1, draw_one, tmp_path / "a.png")
        assert processes.results() == {0: ["matplotlib"]}
