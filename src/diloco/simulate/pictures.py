"""Pictures of a simulation in SVG, PNG or HTML: the timeline of each replica, and compute utilisation by bandwidth.

With the same version of matplotlib, the same input gives the same bytes. matplotlib is imported only for drawing. In
SVG and HTML, each part has a tooltip that describes it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from diloco.errors import ConfigurationError
from diloco.simulate.picture_files import check_picture_path, picture_style, write_picture
from diloco.simulate.timeline import Lane, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["MOST_REPLICAS", "MOST_SPANS", "draw_timeline", "draw_utilization"]

MOST_SPANS = 5000  # the maximum number of spans in a timeline; later spans are cut off
MOST_REPLICAS = 16  # the maximum number of replicas in a timeline; the first ones are shown

WAIT = "#d55e00"
LOOP_LOOKS: dict[Lane, tuple[str, dict[str, Any]]] = {
    "compute": ("compute", {"facecolor": "#dbe2ea", "edgecolor": "#8796a5"}),
    "wait": ("wait for a merge", {"facecolor": "#ffffff", "edgecolor": WAIT, "hatch": "//////"}),
    "spent": ("encode, outer step, merge", {"facecolor": "#4d4d4d", "edgecolor": "#4d4d4d"}),
}
ROWS: dict[Lane, int] = {"compute": 0, "wait": 0, "spent": 0, "send": 1, "receive": 2}
ROW_NAMES = ("compute", "send", "receive")
# The colour-blind-safe colours of Okabe and Ito plus Tol's wine, each with a text colour that is legible on it.
# Vermilion is reserved for waits.
FRAGMENT_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#56b4e9", "#882255", "#999999")
FRAGMENT_INKS = ("white", "black", "black", "black", "black", "black", "white", "black")

METHOD_COLOURS = ("#0072b2", WAIT, "#009e73", "#cc79a7", "#000000", "#e69f00", "#56b4e9", "#882255")
METHOD_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
METHOD_DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)))
MARKERS_PER_LINE = 14

ROW_IN, BETWEEN_IN, LEFT_IN, RIGHT_IN, AXIS_IN, LINE_IN = 0.27, 0.14, 1.65, 0.3, 0.6, 0.22
"""Sizes in a timeline, in inches: a row, the space between replicas, margins, the time axis, a line of text."""
PAPER_IN, WIDEST_IN = 11.0, 60.0


def draw_timeline(spans: Sequence[Span], path: Path, *, title: str) -> None:
    """Draw three rows for each replica: its training loop, its uplink and its downlink. Transfers show their fragment.

    Args:
        spans: the result of `timeline`. Only the first `MOST_REPLICAS` replicas and the first `MOST_SPANS` spans are
            drawn; a note in the picture says what is left out.
        path: .svg, .png or .html; an existing file is replaced.

    Raises:
        ConfigurationError: as in `check_picture_path`, and if there are no spans.
    """
    check_picture_path(path)
    if not spans:
        raise ConfigurationError("a timeline needs at least one span.")
    shown = _drawn_part(spans)
    with picture_style():
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        # an HTML page may be as wide as needed; the other formats have to fit on paper
        fullest = len(shown.spans) / (len(ROW_NAMES) * len(shown.replicas))
        width_in = min(max(PAPER_IN, 0.12 * fullest), WIDEST_IN) if path.suffix == ".html" else PAPER_IN
        heading = textwrap.wrap(title, 95) or [""]
        legend = [Patch(label=label, linewidth=0.5, **look) for label, look in _legend(shown.spans)]
        columns = min(5, len(legend))
        top_in = LINE_IN * (len(heading) + bool(shown.note)) + 0.2
        rows_in = len(shown.replicas) * (len(ROW_NAMES) * ROW_IN + BETWEEN_IN) + BETWEEN_IN
        bottom_in = AXIS_IN + LINE_IN * -(-len(legend) // columns)
        height_in = top_in + rows_in + bottom_in
        figure = Figure(figsize=(width_in, height_in), facecolor="white")
        across_in = width_in - LEFT_IN - RIGHT_IN
        axes = figure.add_axes(
            (LEFT_IN / width_in, bottom_in / height_in, across_in / width_in, rows_in / height_in), facecolor="white"
        )
        axes.set_ylim(rows_in, 0)
        names = _fill_rows(axes, shown, across_in)
        figure.legend(handles=legend, loc="lower left", ncols=columns, frameon=False)
        left, line = 0.12 / width_in, LINE_IN / height_in
        top = 1 - 0.1 / height_in
        figure.text(left, top, "\n".join(heading), va="top", fontsize=12, fontweight="bold")
        figure.text(left, top - line * len(heading), shown.note, va="top", color="#a04000")
        write_picture(figure, path, names, title)


@dataclass(frozen=True)
class _Shown:
    """The part of a timeline that is drawn, its end in seconds, and a note about what is left out."""

    spans: tuple[Span, ...]
    replicas: tuple[int, ...]
    end_s: float
    note: str


def _drawn_part(spans: Sequence[Span]) -> _Shown:
    everyone = sorted({span.replica for span in spans})
    replicas = everyone[:MOST_REPLICAS]
    ordered = sorted((span for span in spans if span.replica in replicas), key=lambda span: span.start_s)
    whole_s = end_s = max(span.stop_s for span in ordered) or 1.0
    notes = []
    if len(replicas) < len(everyone):
        notes.append(f"Only the first {len(replicas)} of {len(everyone)} replicas.")
    if len(ordered) > MOST_SPANS:
        end_s = ordered[MOST_SPANS].start_s or whole_s
        unit, unit_s = _time_unit(whole_s)
        notes.append(f"Only the first {end_s / unit_s:.4g} {unit} of {whole_s / unit_s:.4g} {unit}.")
    return _Shown(tuple(ordered[:MOST_SPANS]), tuple(replicas), end_s, " ".join(notes))


def _fill_rows(axes: Axes, shown: _Shown, across_in: float) -> dict[str, str]:
    """Draw the spans; return a description of each, by ``gid``."""
    from matplotlib.patches import Rectangle

    unit, unit_s = _time_unit(shown.end_s)
    axes.set_xlim(0, shown.end_s / unit_s)
    axes.set_xlabel(f"time ({unit})")
    axes.grid(axis="y", visible=False)
    tops_in = {m: BETWEEN_IN + at * (3 * ROW_IN + BETWEEN_IN) for at, m in enumerate(shown.replicas)}
    middles_in = {m: [top + (row + 0.5) * ROW_IN for row in range(3)] for m, top in tops_in.items()}
    axes.set_yticks([y for middles in middles_in.values() for y in middles], ROW_NAMES * len(tops_in))
    axes.tick_params(axis="y", length=0)
    names: dict[str, str] = {}
    for replica, middles in middles_in.items():
        axes.annotate(
            f"replica {replica}",
            (-(LEFT_IN - 0.12) / across_in, middles[0]),
            xycoords=axes.get_yaxis_transform(),
            va="center_baseline",
            fontweight="bold",
            annotation_clip=False,
        )
        axes.axhline(middles[-1] + 0.5 * (ROW_IN + BETWEEN_IN), color="#bdbdbd", linewidth=0.6)
    for index, span in enumerate(shown.spans):
        start_s, stop_s = span.start_s, min(span.stop_s, shown.end_s)
        middle_in = middles_in[span.replica][ROWS[span.lane]]
        colour = (span.fragment or 0) % len(FRAGMENT_COLOURS)
        look = LOOP_LOOKS[span.lane][1] if span.lane in LOOP_LOOKS else _fragment_look(colour)
        corner = (start_s / unit_s, middle_in - 0.44 * ROW_IN)
        box = Rectangle(corner, (stop_s - start_s) / unit_s, 0.88 * ROW_IN, linewidth=0.5, gid=f"part-{index}", **look)
        axes.add_patch(box)
        names[f"part-{index}"] = (
            f"replica {span.replica}, {span.lane}: {span.label}\n{span.start_s / unit_s:.6g} to "
            f"{span.stop_s / unit_s:.6g} {unit} ({(span.stop_s - span.start_s) / unit_s:.4g} {unit})"
        )
        number = str(span.fragment)
        if span.lane not in LOOP_LOOKS and (stop_s - start_s) / shown.end_s * across_in > 0.06 + 0.09 * len(number):
            centre = ((start_s + stop_s) / 2 / unit_s, middle_in)
            ink = FRAGMENT_INKS[colour]
            axes.text(*centre, number, ha="center", va="center_baseline", fontsize=9, color=ink)
    return names


def _fragment_look(colour: int) -> dict[str, Any]:
    return {"facecolor": FRAGMENT_COLOURS[colour], "edgecolor": FRAGMENT_COLOURS[colour]}


def _legend(spans: Sequence[Span]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from (LOOP_LOOKS[lane] for lane in LOOP_LOOKS if any(span.lane == lane for span in spans))
    fragments = sorted({span.fragment or 0 for span in spans if span.lane not in LOOP_LOOKS})
    for colour in range(len(FRAGMENT_COLOURS)):
        same = [str(fragment) for fragment in fragments if fragment % len(FRAGMENT_COLOURS) == colour]
        if same:
            yield f"fragment {', '.join(same[:3])}{', ...' if len(same) > 3 else ''}", _fragment_look(colour)


def _time_unit(end_s: float) -> tuple[str, float]:
    """Return the unit of a time axis up to ``end_s``, and its length in seconds."""
    for unit, unit_s, upto_s in (("ms", 1e-3, 1.0), ("s", 1.0, 600.0), ("min", 60.0, 36_000.0)):
        if end_s < upto_s:
            return unit, unit_s
    return "h", 3600.0


def draw_utilization(
    curves: Mapping[str, tuple[ArrayLike, ArrayLike]], path: Path, *, title: str, targets: Sequence[float] = ()
) -> None:
    """Plot compute utilisation by bandwidth with a line for each method, as in Streaming DiLoCo (2501.18512).

    Args:
        curves: for each method, bandwidths in Gbit/s, ``(n,)``, above 0 and ascending, and their compute utilisations
            from 0 to 1, ``(n,)``.
        path: .svg, .png or .html; an existing file is replaced.
        targets: utilisations from 0 to 1, drawn as horizontal lines.

    Raises:
        ConfigurationError: as in `check_picture_path`, and for invalid curves or targets.
    """
    check_picture_path(path)
    lines = {name: (np.asarray(x, np.float64), np.asarray(y, np.float64)) for name, (x, y) in curves.items()}
    for name, (x, y) in lines.items():
        fits = x.ndim == 1 and x.shape == y.shape and x.size > 0
        if not (fits and np.isfinite(x).all() and (x > 0).all() and (np.diff(x) >= 0).all() and _shares(y)):
            raise ConfigurationError(
                f"the curve {name!r} of shapes {x.shape} and {y.shape} cannot be drawn: it needs ascending bandwidths "
                "above 0, and one utilisation from 0 to 1 for each."
            )
    if not lines or not _shares(np.asarray(targets, np.float64)):
        raise ConfigurationError(
            f"{len(lines)} curves with targets {tuple(targets)} cannot be drawn: give at least one curve, and targets "
            "from 0 to 1."
        )
    with picture_style():
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, LogFormatter

        figure = Figure(figsize=(8.5, 5.6), facecolor="white", layout="constrained")
        axes = figure.add_subplot(facecolor="white", xscale="log", ylim=(0, 102))
        axes.set_xlabel("bandwidth (Gbit/s)")
        axes.set_ylabel("compute utilisation (%)")
        axes.set_title("\n".join(textwrap.wrap(title, 72)), loc="left", fontsize=12, fontweight="bold")
        for target in targets:
            axes.axhline(100 * target, color="#555555", linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
            axes.annotate(f" {100 * target:.4g} %", (1, 100 * target), xycoords=axes.get_yaxis_transform(), va="center")
        names: dict[str, str] = {}
        for index, (name, (x, y)) in enumerate(lines.items()):
            look: dict[str, Any] = {
                "color": METHOD_COLOURS[index % len(METHOD_COLOURS)],
                "marker": METHOD_MARKERS[index % len(METHOD_MARKERS)],
                "linestyle": METHOD_DASHES[index % len(METHOD_DASHES)],
                "markersize": 6.5,
                "markeredgecolor": "white",
                "markeredgewidth": 0.6,
            }
            axes.plot(x, 100 * y, label=name, markevery=[], linewidth=1.8, **look)
            every = -(-x.size // MARKERS_PER_LINE)
            # shift the markers of each line, so that lines on top of each other can be told apart
            for at in range(index % every, x.size, every):
                names[f"part-{len(names)}"] = f"{name}\n{x[at]:.4g} Gbit/s: {100 * y[at]:.4g} %"
                axes.plot(x[at], 100 * y[at], gid=f"part-{len(names) - 1}", zorder=3, **look | {"linestyle": "none"})
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, handlelength=3.6)
        write_picture(figure, path, names, title)


def _shares(values: np.ndarray[Any, np.dtype[np.float64]]) -> bool:
    return bool(((values >= 0) & (values <= 1)).all())
