"""``python -m benchmarks.simulator``: compare predicted and measured compute utilisation and wall-clock time.

The command trains in one process on emulated links (a minute), reads what `benchmarks.wan` measured with processes, and
writes results.json and the tables of the README. ``--fit`` first searches for the constants that best fit rounds on
links of up to 300 ms, and prints them for `diloco.simulate.overheads`; the predictions use the constants already there.

The exit code is 1 if a run of the planner's own choice fell short of its target by more than 3 points.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.markdown import write_below
from benchmarks.simulator import real, virtual
from benchmarks.simulator.rounds import Rounds, fit
from diloco.cli.tables import columns
from diloco.simulate import FITTED, Site, Workload, candidates
from diloco.transport import Link

HERE = Path(__file__).parent
MARK = "<!-- what follows is written by python -m benchmarks.simulator -->"
CODECS = ("float32", "float16", "fp4")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator", description=__doc__)
    parser.add_argument("--fit", action="store_true", help="search for the constants first, and print them")
    given = parser.parse_args(arguments)
    for wire in FITTED:
        if given.fit:
            found = fit([each for each in real.measured_rounds(wire) if each.fitted])
            print(f"{wire}: typical={found.typical}, careful={found.careful}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        in_process = list(virtual.compare(Path(folder)))
    processes = list(real.compare())
    results = {
        "fitted": {wire: asdict(fitted) for wire, fitted in FITTED.items()},
        "costs_per_value_s": real.costs_per_value(CODECS),
        "bare_step_s": real.bare_step_s(),
        "search": search_speed(),
        "in_process": in_process,
        "rounds": [described for wire in FITTED for described in map(_described, real.measured_rounds(wire))],
        "processes": processes,
    }
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    write_below(MARK, report(results), HERE / "README.md")
    print(report(results))
    missed = real.missed(processes)
    for row in missed:
        print(
            f"The planner's choice for {row['link']} reached a compute utilisation of "
            f"{row['measured']['compute_utilization']:.1%}; its target was {row['planned']['target']:.0%}.",
            file=sys.stderr,
        )
    return 1 if missed else 0


def _described(each: Rounds) -> dict[str, Any]:
    return {
        "link": each.link.name,
        "method": each.method,
        "wire": each.wire,
        "values": each.values,
        "fitted": each.fitted,
        "times_s": [round(time_s, 4) for time_s in each.times_s],
        "typical_s": each.predicted_s(),
        "careful_s": each.predicted_s(careful=True),
    }


def search_speed() -> dict[str, float]:
    """Return how many settings the planner evaluates per minute, and how long one of a 100B model takes."""
    model = Workload(parameters=10**11, layers=108, step_time_s=4.9)
    site = Site(workload=model, links=(Link(1e9, 0.05),) * 8, step_time_s=(4.9,) * 8)
    started_s = time.perf_counter()
    one = candidates(site, inner_steps=(100,), overlaps=(5,), codecs=("fp4",))
    one_s = (time.perf_counter() - started_s) / len(one)
    small = Workload(parameters=10**9, layers=24, outside=10**8, step_time_s=1.0)
    site = Site(workload=small, links=(Link(1e9, 0.05),) * 8, step_time_s=(1.0,) * 8)
    started_s = time.perf_counter()
    found = candidates(site)
    return {"one_100b_s": one_s, "settings_per_minute": 60 * len(found) / (time.perf_counter() - started_s)}


def errors(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [row["predicted"][name] / row["measured"][name] - 1 for row in rows]


def report(results: dict[str, Any]) -> str:
    """Return the tables."""
    in_process, processes = results["in_process"], results["processes"]
    worst = max(abs(error) for name in ("compute_utilization", "wall_s") for error in errors(in_process, name))
    low, high = (bound(row["measured"]["compute_utilization"] for row in in_process) for bound in (min, max))
    lines = [
        "## In one process, on the virtual clock",
        "",
        f"{len(in_process)} training runs with compute utilisations from {low:.1%} to {high:.1%}. Largest error of "
        f"utilisation and of wall-clock time: {worst:.0e}. Both do the same arithmetic.",
        "",
        "## Rounds of real processes",
        "",
        *(_rounds_summary(wire, [row for row in results["rounds"] if row["wire"] == wire]) for wire in FITTED),
        "",
        "```",
        columns(
            ["link", "rounds", "values", "typical, s", "measured: median", "max", "careful, s"],
            [_round_cells(row) for row in results["rounds"]],
        ),
        "```",
        "",
        "## Runs of real processes",
        "",
        *_summary(processes),
        "",
        "```",
        columns(
            ["link", "method", "step: predicted, s", "measured, s", "error", "utilisation: predicted", "measured"],
            [_cells(row) for row in processes],
        ),
        "```",
        "",
        "## Plans, run as chosen",
        "",
        "```",
        columns(
            ["link", "the planner's choice", "target", "predicted", "at least", "measured"],
            [_plan_cells(row) for row in processes if row["planned"]],
        ),
        "```",
        "",
        "## Speed",
        "",
        f"One set of settings for a 100B model (108 layers, 36 fragments): {results['search']['one_100b_s']:.3f} s. "
        f"The planner's search: {results['search']['settings_per_minute']:,.0f} settings per minute, in one thread.",
        "",
    ]
    return "\n".join(lines)


def _summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    of = errors(rows, "step_s")
    return [
        f"{len(of)} runs over torch, median error of the wall-clock time {median(map(abs, of)):.1%}, largest "
        f"{max(map(abs, of)):.1%}; mean {sum(of) / len(of):+.1%} (above 0: predicted too slow)."
    ]


def _rounds_summary(wire: str, rows: Sequence[dict[str, Any]]) -> str:
    parts = []
    for name, chosen in (
        ("fitted (*)", [row for row in rows if row["fitted"]]),
        ("on a link of 500 ms", [row for row in rows if "500 ms" in row["link"]]),
        ("all others", [row for row in rows if not row["fitted"] and "500 ms" not in row["link"]]),
    ):
        of = [abs(row["typical_s"] / median(row["times_s"]) - 1) for row in chosen]
        every = [time_s <= row["careful_s"] for row in chosen for time_s in row["times_s"]]
        if of:
            parts.append(
                f"{name}: {len(every)} rounds, median error {median(of):.0%}, largest {max(of):.0%}, "
                f"{sum(every) / len(every):.0%} within the careful prediction"
            )
    return f"- {wire}: {'; '.join(parts)}."


def _round_cells(row: dict[str, Any]) -> list[str]:
    return [
        row["link"] + ("*" if row["fitted"] else ""),
        row["method"],
        f"{row['values'] / 1e6:.1f}M",
        f"{row['typical_s']:.2f}",
        f"{median(row['times_s']):.2f}",
        f"{max(row['times_s']):.2f}",
        f"{row['careful_s']:.2f}",
    ]


def _plan_cells(row: dict[str, Any]) -> list[str]:
    work, planned = row["work"], row["planned"]
    return [
        row["link"],
        f"H = {work['inner_steps']}, P = {work['num_fragments']}, tau = {work['overlap_steps']}, {planned['codec']}",
        f"{planned['target']:.0%}",
        f"{planned['compute_utilization']:.1%}",
        f"{planned['sure_utilization']:.1%}",
        f"{row['measured']['compute_utilization']:.1%}",
    ]


def _cells(row: dict[str, Any]) -> list[str]:
    predicted, measured = row["predicted"], row["measured"]
    return [
        row["link"],
        row["method"],
        f"{predicted['step_s']:.3f}",
        f"{measured['step_s']:.3f}",
        f"{predicted['step_s'] / measured['step_s'] - 1:+.1%}",
        f"{predicted['compute_utilization']:.1%}",
        f"{measured['compute_utilization']:.1%}",
    ]


if __name__ == "__main__":
    sys.exit(main())
