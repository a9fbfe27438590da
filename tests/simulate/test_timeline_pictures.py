"""Drawn timelines: labels, positions, and notes about what is left out."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import numpy as np
import pytest

from diloco.simulate import Lane, Span, draw_timeline, pictures
from tests.simulate.svg import SVG, boxes, names, texts


def test_a_timeline_names_its_rows_units_and_colours(spans: tuple[Span, ...], tmp_path: Path) -> None:
    draw_timeline(spans, tmp_path / "a.svg", title="Streaming DiLoCo, tau=2")
    written = texts(tmp_path / "a.svg")
    for label in ("Streaming DiLoCo, tau=2", "replica 0", "replica 1", "time (s)"):
        assert written.count(label) == 1, label
    assert (written.count("send"), written.count("receive")) == (2, 2)
    assert written.count("compute") == 3  # one row per replica, and the legend
    for entry in ("wait for a merge", "encode, outer step, merge", *(f"fragment {p}" for p in range(4))):
        assert written.count(entry) == 1, entry
    assert "Only the first" not in " ".join(written)


def test_each_span_tells_what_it_is(spans: tuple[Span, ...], tmp_path: Path) -> None:
    draw_timeline(spans, tmp_path / "a.svg", title="")
    told = names(tmp_path / "a.svg")
    assert len(told) == len(spans)
    assert told.count("replica 0, compute: steps 1 to 20\n0 to 20 s (20 s)") == 1
    assert told.count("replica 0, send: fragment 0, round 0, 4.0 MB\n20.15 to 23.35 s (3.2 s)") == 1
    assert told.count("replica 1, wait: waits for fragment 0, round 0\n26.55 to 27.45 s (0.9 s)") == 1


def test_spans_stand_where_their_times_are(spans: tuple[Span, ...], tmp_path: Path) -> None:
    draw_timeline(spans, tmp_path / "a.svg", title="")
    drawn = boxes(tmp_path / "a.svg")
    ordered = sorted(spans, key=lambda span: span.start_s)
    told = names(tmp_path / "a.svg")
    left = np.array([drawn[name][0] for name in told])
    right = np.array([drawn[name][1] for name in told])
    scale, origin = np.polyfit([span.start_s for span in ordered], left, 1)
    assert scale > 0
    assert left == pytest.approx(origin + scale * np.array([span.start_s for span in ordered]), abs=0.01)
    assert right == pytest.approx(origin + scale * np.array([span.stop_s for span in ordered]), abs=0.01)
    rows = {(span.replica, pictures.ROWS[span.lane]): drawn[name][2] for span, name in zip(ordered, told, strict=True)}
    assert len(set(rows.values())) == 6
    assert sorted(rows, key=rows.__getitem__) == [(replica, row) for replica in (0, 1) for row in (0, 1, 2)]


def test_waits_have_a_pattern_and_not_only_a_colour(spans: tuple[Span, ...], tmp_path: Path) -> None:
    draw_timeline(spans, tmp_path / "a.svg", title="")
    filled = {
        (node.find(f"{SVG}title").text or "").split(":")[0].split()[-1]  # type: ignore[union-attr]
        for node in ElementTree.parse(tmp_path / "a.svg").iter(f"{SVG}g")
        if node.get("id", "").startswith("part-") and "url(#" in node.find(f"{SVG}path").get("style", "")  # type: ignore[union-attr]
    }
    assert filled == {"wait"}


def test_a_page_needs_nothing_else_and_tells_each_span_once(spans: tuple[Span, ...], tmp_path: Path) -> None:
    draw_timeline(spans, tmp_path / "a.html", title="1 < 2 & $3$")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    body = page[page.index("<body>") :]
    assert body.count("<title>") == len(spans)
    assert page.count("<title>1 &lt; 2 &amp; $3$</title>") == 1
    assert page.startswith("<!doctype html>")
    assert page.count("<svg") == page.count("</svg>") == 1
    assert "<?xml" not in page
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)|@import|url\((?!#)""", page)
    assert "@media print" in page


def test_too_many_spans_are_cut_in_time_and_the_picture_says_so(
    spans: tuple[Span, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "MOST_SPANS", 12)
    draw_timeline(spans, tmp_path / "a.svg", title="")
    ordered = sorted(spans, key=lambda span: span.start_s)
    end_s, whole_s = ordered[12].start_s, max(span.stop_s for span in spans)
    assert f"Only the first {end_s:.4g} s of {whole_s:.4g} s." in texts(tmp_path / "a.svg")
    assert len(names(tmp_path / "a.svg")) == 12
    drawn = boxes(tmp_path / "a.svg")
    edge = max(right for _, right, _ in drawn.values())
    cut = sum(right == edge for _, right, _ in drawn.values())
    assert cut == sum(span.stop_s >= end_s for span in ordered[:12]) > 0


def test_as_many_spans_as_fit_are_not_cut(
    spans: tuple[Span, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "MOST_SPANS", len(spans))
    draw_timeline(spans, tmp_path / "a.svg", title="")
    assert "Only the first" not in " ".join(texts(tmp_path / "a.svg"))


def test_of_many_replicas_and_fragments_the_first_are_drawn_and_the_colours_come_again(tmp_path: Path) -> None:
    many = [Span(replica, "send", 1.0, 2.0, "sent", replica) for replica in range(pictures.MOST_REPLICAS + 3)]
    draw_timeline(many, tmp_path / "a.svg", title="")
    written = texts(tmp_path / "a.svg")
    assert "Only the first 16 of 19 replicas." in written
    assert {"replica 0", "replica 15"} <= set(written)
    assert "replica 16" not in written
    assert [label for label in written if label.startswith("fragment")] == [f"fragment {p}, {p + 8}" for p in range(8)]
    assert len(names(tmp_path / "a.svg")) == 16


def test_the_longest_legend_and_row_names_fit_on_the_page(tmp_path: Path) -> None:
    many = [Span(15, lane, 1.0, 2.0, "", fragment) for fragment in range(40) for lane in get_args(Lane)]
    draw_timeline(many, tmp_path / "a.svg", title="")
    tree = ElementTree.parse(tmp_path / "a.svg").getroot()
    _, _, width, height = (float(number) for number in tree.get("viewBox", "").split())
    ends = {}
    for node in tree.iter(f"{SVG}text"):
        moved = re.search(r"translate\(([\d.]+) ([\d.]+)\)", node.get("transform", ""))
        x, y = (float(part) for part in (moved.groups() if moved else (node.get("x", ""), node.get("y", ""))))
        label = "".join(node.itertext())
        middle = "text-anchor: middle" in node.get("style", "")
        # a letter is about 5.5 points wide
        ends[label] = x if middle else x + 5.5 * len(label)
        assert 0 <= x <= width, label
        assert ends[label] <= width or "text-anchor: end" in node.get("style", ""), label
        assert 0 <= y <= height, label
    assert {"fragment 7, 15, 23, ...", "encode, outer step, merge"} <= set(ends)


@pytest.mark.parametrize(("stop_s", "unit"), [(0.0, "s"), (0.5, "ms"), (90.0, "s"), (3600.0, "min"), (1e6, "h")])
def test_a_timeline_of_any_length_has_a_unit(tmp_path: Path, stop_s: float, unit: str) -> None:
    """A timeline of 0 s has only payload on unlimited links. Its spans are drawn with no width."""
    draw_timeline([Span(0, "send", 0.0, stop_s, "sent", 0)], tmp_path / "a.svg", title="")
    assert f"time ({unit})" in texts(tmp_path / "a.svg")
    assert len(names(tmp_path / "a.svg")) == 1


def test_every_lane_has_its_row_and_look() -> None:
    assert set(pictures.ROWS) == set(get_args(Lane))
    inks = itertools.starmap(_contrast, zip(pictures.FRAGMENT_COLOURS, pictures.FRAGMENT_INKS, strict=True))
    assert min(inks) >= 4.5  # the minimum that WCAG requires for text


def _contrast(colour: str, ink: str) -> float:
    """Return WCAG's contrast ratio of two colours."""

    def luminance(red: float, green: float, blue: float) -> float:
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (red, green, blue)]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    from matplotlib.colors import to_rgb

    dark, light = sorted(luminance(*to_rgb(each)) for each in (colour, ink))
    return (light + 0.05) / (dark + 0.05)
