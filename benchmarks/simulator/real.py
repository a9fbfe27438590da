"""The measurements of `benchmarks.wan` with real processes on emulated networks, and their predictions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.simulator.rounds import Rounds, link_named, rounds
from benchmarks.wan.plan import METHODS, Work
from benchmarks.wan.planned import congestion_control, planner_links
from benchmarks.wan.report import baseline_s
from benchmarks.wan.report import step_s as measured_step_s
from benchmarks.wan.work import Layers
from diloco.algorithm import MeanEncoding, SyncSchedule, make_codec
from diloco.simulate import (
    MERGE_S_PER_VALUE,
    SEND_S_PER_VALUE,
    Cluster,
    Conditions,
    Wire,
    Workload,
    simulate_cycles,
    synchronisation_s,
)

__all__ = ["bare_step_s", "compare", "costs_per_value", "measured_rounds", "missed"]

RESULTS = Path(__file__).parents[1] / "wan" / "results.json"

CORES = 2
"""The cores of the machine on which the rows were measured; more replicas share them."""

MOST_BY_OTHERS = 0.2
"""Rows during which other programs used more of the CPU are skipped. Plans are always compared, and so are rounds
alone, which need little of the CPU."""

MISSED_BY = 0.03
"""A plan whose run falls short of its target by more has failed."""


def rows() -> list[dict[str, Any]]:
    """Return the runs of this package to compare: those that finished and were not disturbed."""
    return [row for row in _every() if _comparable(row)]


def measured_rounds(wire: Wire) -> list[Rounds]:
    """Return the rounds alone, and those of the runs to compare, over one transport."""
    alone = [row for row in _every() if row["method"].startswith("rounds") and row["outcome"] == "finished"]
    whole = [
        row for row in rows() if row["method"].startswith(("DiLoCo", "Streaming")) and "paced" not in row["method"]
    ]
    return [each for each in rounds([*alone, *whole]) if each.wire == wire]


def _every() -> list[dict[str, Any]]:
    every: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return every


def _comparable(row: Mapping[str, Any]) -> bool:
    link = link_named(row["link"])
    ours = row["method"].startswith(("DiLoCo", "Streaming", "planned")) and row["outcome"] == "finished"
    plain = row["work"]["compute"] == "pause" and not link.real_packets
    if not ours or not plain:
        return False
    return "planned" in row or row["cpu_busy"] - (row["cpu_workers"] or 0) <= MOST_BY_OTHERS


def bare_step_s() -> float:
    """Return the seconds of an inner step without communication, measured in the same series."""
    return baseline_s(_every())


def costs_per_value(codecs: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Measure, by codec, the seconds per value of a send and of a merge of the benchmark's model in one thread."""
    torch.set_num_threads(1)
    model, found = Layers(Work()), {}
    for codec in codecs:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        send_s, merge_s = synchronisation_s(model, optimizer, torch.device("cpu"), codec=codec)
        found[codec] = (send_s / Work().values, merge_s / Work().values)
    return found


def predict_step_s(row: Mapping[str, Any], step_s: float) -> float:
    """Return the wall time of an inner step as `diloco plan` predicts it."""
    link, work = link_named(row["link"]), Work(**row["work"])
    method = next(method for method in METHODS if method.name == row["method"])
    planned = row.get("planned", {})
    streaming = method.options.get("streaming") or bool(planned)
    schedule = SyncSchedule(
        inner_steps=work.inner_steps,
        num_fragments=work.num_fragments if streaming else 1,
        overlap_steps=work.overlap_steps if streaming else 0,
    )
    workload = Workload(parameters=work.values, layers=work.layers, step_time_s=step_s)
    codec = make_codec(planned.get("codec") or method.options["codec"])
    means = MeanEncoding.of(method.options.get("mean_codec", "auto"))
    traffic = workload.traffic(schedule, [codec], link.replicas, mean=means)
    sharing = max(1.0, link.replicas / CORES)
    conditions = Conditions(
        congestion_control=congestion_control(link),
        loss=link.loss_percent / 100,
        streams=method.options.get("streams"),
        send_s_per_value=sharing * SEND_S_PER_VALUE,
        merge_s_per_value=sharing * MERGE_S_PER_VALUE,
    )
    pace = method.options.get("pace", 1.0)
    links = [replace(each, bandwidth_bits_per_s=pace * each.bandwidth_bits_per_s) for each in planner_links(link)]
    cluster = Cluster.of(links, step_s, overheads=conditions.overheads(link.replicas - 1))
    result = simulate_cycles(traffic, cluster, cycles=work.cycles)
    return float(result.wall_s) / result.steps


def compare() -> Iterator[dict[str, Any]]:
    """Yield one row for each run to compare."""
    step_s = bare_step_s()
    for row in rows():
        measured_s = measured_step_s(row)
        predicted_s = predict_step_s(row, step_s)
        yield {
            "link": row["link"],
            "method": row["method"],
            "work": {name: row["work"][name] for name in ("inner_steps", "num_fragments", "overlap_steps")},
            "planned": row.get("planned"),
            "measured": {"step_s": measured_s, "compute_utilization": step_s / measured_s},
            "predicted": {"step_s": predicted_s, "compute_utilization": step_s / predicted_s},
        }


def missed(compared: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the plans whose runs fell short of their targets by more than `MISSED_BY`."""
    return [
        row
        for row in compared
        if row["planned"] and row["measured"]["compute_utilization"] < row["planned"]["target"] - MISSED_BY
    ]
