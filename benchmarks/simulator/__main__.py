"""``python -m benchmarks.simulator``: predicted against measured compute utilisation and wall-clock time.

Trains in one process on emulated links (a minute), reads what `benchmarks.wan` measured with real processes, and writes
results.json and the tables of the README. ``--fit`` looks anew for the overheads that fit one of the links best and
prints them, for `diloco.simulate.overheads`; without it those that stand there are used.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.simulator import real, virtual
from diloco.cli.tables import columns
from diloco.simulate.overheads import MEASURED
from diloco.simulate.planner import Site, candidates
from diloco.simulate.workload import Workload
from diloco.transport.links import Link

HERE = Path(__file__).parent
MARK = "<!-- what follows is written by python -m benchmarks.simulator -->"
CODECS = ("float32", "float16", "fp4")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator", description=__doc__)
    parser.add_argument("--fit", action="store_true", help="look for the overheads first")
    given = parser.parse_args(arguments)
    costs = real.costs_per_value(CODECS)
    overheads = real.fit(costs) if given.fit else MEASURED
    print(overheads)
    with tempfile.TemporaryDirectory() as folder:
        in_process = list(virtual.compare(Path(folder)))
    processes = list(real.compare(overheads, costs))
    results = {
        "overheads": asdict(overheads),
        "costs_per_value_s": costs,
        "bare_step_s": real.bare_step_s(),
        "search": search_speed(),
        "in_process": in_process,
        "processes": processes,
    }
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    readme = HERE / "README.md"
    text = readme.read_text(encoding="utf-8").partition(MARK)[0]
    readme.write_text(f"{text}{MARK}\n\n{report(results)}", encoding="utf-8")
    print(report(results))


def search_speed() -> dict[str, float]:
    """How fast the planner looks at settings, and how long one of a 100B model takes."""
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
    """The tables."""
    in_process, processes = results["in_process"], results["processes"]
    worst = max(abs(error) for name in ("compute_utilization", "wall_s") for error in errors(in_process, name))
    low, high = (bound(row["measured"]["compute_utilization"] for row in in_process) for bound in (min, max))
    lines = [
        "## In one process, on the virtual clock",
        "",
        f"{len(in_process)} training runs with compute utilisations from {low:.1%} to {high:.1%}. Largest error of "
        f"utilisation and of wall-clock time: {worst:.0e}. It is the same arithmetic.",
        "",
        "## Real processes",
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
        "## Speed",
        "",
        f"One set of settings of a 100B model (108 layers, 36 fragments): {results['search']['one_100b_s']:.3f} s. The "
        f"planner's search: {results['search']['settings_per_minute']:,.0f} settings a minute, in one thread.",
        "",
    ]
    return "\n".join(lines)


def _summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    found = []
    for words, chosen in (
        ("all", rows),
        ("on the link that the overheads are fitted to", [row for row in rows if row["fitted"]]),
        ("on the others", [row for row in rows if not row["fitted"]]),
    ):
        of = errors(chosen, "step_s")
        found.append(
            f"- {words}: {len(of)} runs, median error of the wall-clock time {median(map(abs, of)):.1%}, largest "
            f"{max(map(abs, of)):.1%}; mean {sum(of) / len(of):+.1%} (above 0: predicted too slow)"
        )
    return found


def _cells(row: dict[str, Any]) -> list[str]:
    predicted, measured = row["predicted"], row["measured"]
    return [
        row["link"] + ("*" if row["fitted"] else ""),
        row["method"],
        f"{predicted['step_s']:.3f}",
        f"{measured['step_s']:.3f}",
        f"{predicted['step_s'] / measured['step_s'] - 1:+.1%}",
        f"{predicted['compute_utilization']:.1%}",
        f"{measured['compute_utilization']:.1%}",
    ]


if __name__ == "__main__":
    main()
