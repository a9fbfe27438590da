"""Real processes on emulated networks, as `benchmarks.wan` measured them, and what the simulator says of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.wan.plan import LINKS, Link, Work
from benchmarks.wan.work import Layers
from diloco.algorithm.codec import make_codec
from diloco.algorithm.schedule import SyncSchedule
from diloco.simulate.cluster import Cluster, Overheads
from diloco.simulate.measure import synchronisation_s
from diloco.simulate.traffic import outer_traffic
from diloco.simulate.utilization import simulate_cycles
from diloco.transport.links import Link as EmulatedLink

__all__ = ["compare", "costs_per_value", "fit"]

RESULTS = Path(__file__).parents[1] / "wan" / "results.json"

FITTED = "100 Mbit/s, 100 ms, 2 replicas"
"""The link whose rows the overheads are fitted to; the others were not looked at for that."""

CORES = 2
"""Of the machine that the rows are from; replicas in excess share them."""

MOST_BY_OTHERS = 0.2
"""Rows during which others used more than this share of the CPU are left out."""

Costs = Mapping[str, tuple[float, float]]


def rows() -> list[dict[str, Any]]:
    """What can be compared: runs of this package that ended, on links that lose nothing, undisturbed."""
    every = json.loads(RESULTS.read_text(encoding="utf-8"))
    return [row for row in every if _comparable(row)]


def _comparable(row: Mapping[str, Any]) -> bool:
    link = _link(row)
    ours = row["method"].startswith(("DiLoCo", "Streaming")) and row["outcome"] == "finished"
    plain = row["work"]["compute"] == "pause" and not link.loss_percent and not link.real_packets
    return ours and plain and row["cpu_busy"] - (row["cpu_workers"] or 0) <= MOST_BY_OTHERS


def _link(row: Mapping[str, Any]) -> Link:
    return next(link for link in LINKS if link.name == row["link"])


def bare_step_s() -> float:
    """An inner step without communication, measured in the same series."""
    every = json.loads(RESULTS.read_text(encoding="utf-8"))
    walls: list[float] = [
        max(replica["wall_s"] / replica["steps"] for replica in row["replicas"])
        for row in every
        if row["method"] == "no communication" and row["work"]["compute"] == "pause"
    ]
    return min(walls)


def costs_per_value(codecs: Sequence[str]) -> dict[str, tuple[float, float]]:
    """By codec, seconds per value of a send and of a merge of the benchmark's model, here, in one thread."""
    torch.set_num_threads(1)
    model, found = Layers(Work()), {}
    for codec in codecs:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        send_s, merge_s = synchronisation_s(model, optimizer, torch.device("cpu"), codec=codec)
        found[codec] = (send_s / Work().values, merge_s / Work().values)
    return found


def predict_step_s(row: Mapping[str, Any], step_s: float, overheads: Overheads, costs: Costs) -> float:
    """Wall time of an inner step."""
    link, work = _link(row), Work(**row["work"])
    name, *options = row["method"].split(", ")
    kind, codec = name.split()
    fragments = work.num_fragments if kind == "Streaming" else 1
    schedule = SyncSchedule(
        inner_steps=work.inner_steps,
        num_fragments=fragments,
        overlap_steps=work.overlap_steps if kind == "Streaming" else 0,
    )
    sizes = [work.values // fragments] * fragments
    traffic = outer_traffic(schedule, sizes, [make_codec(codec)], link.replicas)
    rate = link.rate_bits_per_s * (0.97 if "paced" in options else 1.0)
    send_s, merge_s = costs[codec]
    sharing = max(1.0, link.replicas / CORES)
    spending = replace(overheads, send_s_per_value=sharing * send_s, merge_s_per_value=sharing * merge_s)
    cluster = Cluster.of([EmulatedLink(rate, link.rtt_s / 2)] * link.replicas, step_s, overheads=spending)
    result = simulate_cycles(traffic, cluster, cycles=work.cycles)
    return float(result.wall_s) / result.steps


def compare(overheads: Overheads, costs: Costs) -> Iterator[dict[str, Any]]:
    """One row for each run that can be compared."""
    step_s = bare_step_s()
    for row in rows():
        measured_s = max(replica["wall_s"] / replica["steps"] for replica in row["replicas"])
        predicted_s = predict_step_s(row, step_s, overheads, costs)
        yield {
            "link": row["link"],
            "method": row["method"],
            "fitted": row["link"] == FITTED,
            "measured": {"step_s": measured_s, "compute_utilization": step_s / measured_s},
            "predicted": {"step_s": predicted_s, "compute_utilization": step_s / predicted_s},
        }


def fit(costs: Costs) -> Overheads:
    """Goodput and round trips that make the mean error of the fitted link's rows least; too fast counts twice."""

    def error(overheads: Overheads) -> float:
        errors: list[float] = [
            row["predicted"]["step_s"] / row["measured"]["step_s"] - 1
            for row in compare(overheads, costs)
            if row["fitted"]
        ]
        return mean(error if error > 0 else -2 * error for error in errors)

    grid = [
        Overheads(goodput=goodput / 100, round_trips=trips / 4)
        for goodput in range(70, 101, 2)
        for trips in range(0, 33, 2)
    ]
    return min(grid, key=error)
