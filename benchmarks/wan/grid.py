"""The tables of the grid: measurements, the simulator's predictions for them, and larger models, simulated."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.simulator.real import predict_step_s
from benchmarks.wan.plan import GRID, METHODS, Link
from benchmarks.wan.planned import planner_links
from benchmarks.wan.report import HEAD, describe, step_s
from diloco.algorithm import MeanEncoding, SyncSchedule, make_codec
from diloco.simulate import Cluster, Conditions, Workload, simulate_cycles

__all__ = ["grid_tables"]

ENOUGH = 0.95
"""Links with a lower compute utilisation are listed."""

LARGE = {
    "7B": Workload(parameters=7 * 10**9, layers=32, step_time_s=0.6),
    "70B": Workload(parameters=7 * 10**10, layers=80, step_time_s=3.7),
}
"""The step times are assumptions, between those of 1B, 10B and 100B in benchmarks/scale."""


def grid_tables(rows: Sequence[dict[str, Any]], bare_s: float) -> str:
    """Return one table for each method that was run on the grid, then one of simulated large models.

    Args:
        bare_s: seconds of an inner step without communication.
    """
    lines: list[str] = []
    for method in METHODS[1:]:
        measured = {row["link"]: row for row in rows if row["method"] == method.name}
        if measured:
            lines += [f"## Grid: {method.name}", "", *_measured(measured, bare_s), ""]
    return "\n".join([*lines, *_large()])


def _measured(rows: dict[str, dict[str, Any]], bare_s: float) -> Iterator[str]:
    predicted_s = {name: predict_step_s(row, bare_s) for name, row in rows.items()}
    finished = {name: step_s(row) for name, row in rows.items() if row["outcome"] == "finished"}
    errors = [predicted_s[name] / measured_s - 1 for name, measured_s in finished.items()]
    below = sorted((bare_s / each_s, name) for name, each_s in finished.items() if bare_s / each_s < ENOUGH)
    void = sum(rows[name]["replicas"][0]["failures"] for name in finished)
    listed = "; ".join(f"{name}: {reached:.1%}" for reached, name in below) or "none"
    yield f"{len(rows)} of {len(GRID)} links. {len(rows) - len(finished)} runs did not finish, {void} rounds were void."
    yield f"Below {100 * ENOUGH:.0f} %, lowest first: {listed}."
    if errors:
        largest = max(errors, key=abs)
        yield f"The simulator's error in the wall-clock time: median {statistics.median(map(abs, errors)):.1%},"
        yield f"largest {largest:+.1%}, mean {statistics.mean(errors):+.1%} (above 0: predicted too slow)."
    yield from ("", f"| link | CU predicted {HEAD}", "|---" * (HEAD.count("|") + 1) + "|")
    for link in GRID:
        if link.name in rows:
            yield describe(f"{link.name} | {bare_s / predicted_s[link.name]:.1%}", rows[link.name], link, bare_s)


def _large() -> Iterator[str]:
    links = [link for link in GRID if link.rtt_s == max(each.rtt_s for each in GRID) and link.replicas == 2]
    yield from ("## Larger models, simulated", "")
    yield "Compute utilisation. In brackets: the longest round from sending to merging, in seconds; it is void if it"
    yield "takes longer than `network.round_timeout`. fp4, means in fp4, three layers per fragment, tau = H / 10."
    names = " | ".join(link.name.removesuffix(", 2 replicas") for link in links)
    yield from ("", f"| model, H | replicas | {names} |", "|---" * (2 + len(links)) + "|")
    for name, workload in LARGE.items():
        for inner_steps in (100, 500):
            for replicas in (16, 32, 64):
                cells = [_simulated(workload, inner_steps, replace(link, replicas=replicas)) for link in links]
                yield f"| {name}, {inner_steps} | {replicas} | {' | '.join(cells)} |"
    yield ""


def _simulated(workload: Workload, inner_steps: int, link: Link) -> str:
    fp4 = make_codec("fp4")
    schedule = SyncSchedule(
        inner_steps=inner_steps, num_fragments=workload.default_fragments, overlap_steps=inner_steps // 10
    )
    traffic = workload.traffic(schedule, [fp4], link.replicas, positions=(0, 1), mean=MeanEncoding(fp4))
    # these models train on accelerators; the compute time of their rounds was not measured
    conditions = Conditions(
        congestion_control="bbr", average_s_per_value=0.0, send_s_per_value=0.0, merge_s_per_value=0.0
    )
    cluster = Cluster.of(
        planner_links(link)[:2], workload.step_time_s, overheads=conditions.overheads(link.replicas - 1)
    )
    result = simulate_cycles(traffic, cluster, cycles=1)
    longest_s = schedule.overlap_steps * workload.step_time_s + float(result.longest_wait_s.max())
    return f"{float(result.compute_utilization):.1%} ({longest_s:.0f})"
