"""The rounds and runs that `benchmarks.wan` measured with real processes, and what `diloco plan` predicts for them."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.wan.plan import GRID, LINKS, METHODS, Link, Work
from benchmarks.wan.planned import congestion_control, planner_links
from benchmarks.wan.report import baseline_s, round_times
from benchmarks.wan.report import step_s as measured_step_s
from diloco.algorithm import MeanEncoding, SyncSchedule, make_codec
from diloco.plan import (
    MERGE_S_PER_VALUE,
    SEND_S_PER_VALUE,
    Cluster,
    Conditions,
    Constants,
    Wire,
    Workload,
    outer_traffic,
    simulate,
    simulate_cycles,
)

__all__ = ["Rounds", "compare", "fit", "measured_rounds", "missed", "predict_step_s"]

RESULTS = Path(__file__).parents[1] / "wan" / "results.json"

CORES = 2
"""The cores of the machine on which the rows were measured; more replicas share them."""

MOST_BY_OTHERS = 0.2
"""Rows during which other programs used more of the CPU are skipped. Plans are always compared, and so are rounds
alone, which need little of the CPU."""

MISSED_BY = 0.03
"""A plan whose run falls short of its target by more has failed."""

TESTED_FROM_S = 0.4
"""Links with at least this round trip are not used for the fit."""


def _read() -> list[dict[str, Any]]:
    every: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return [row for row in every if row["outcome"] == "finished" and row.get("planned", {}).get("codec") != "int2"]


def _runs() -> list[dict[str, Any]]:
    """Return the runs of this package that were not disturbed."""
    rows = [row for row in _read() if row["method"].startswith(("DiLoCo", "Streaming", "planned"))]
    rows = [row for row in rows if row["work"]["compute"] == "pause" and not _link(row).real_packets]
    return [row for row in rows if "planned" in row or row["cpu_busy"] - (row["cpu_workers"] or 0) <= MOST_BY_OTHERS]


def _link(row: Mapping[str, Any]) -> Link:
    return next(link for link in (*LINKS, *GRID) if link.name == row["link"])


def _options(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(method.options for method in METHODS if method.name == row["method"])


def _conditions(link: Link, options: Mapping[str, Any], **work: float) -> Conditions:
    return Conditions(
        wire="hivemind" if options.get("swarm") else "torch",
        congestion_control=congestion_control(link),
        loss=link.loss_percent / 100,
        streams=options.get("streams"),
        **work,
    )


@dataclass(frozen=True)
class Rounds:
    """Rounds of one size on one link, over one transport."""

    link: Link
    method: str  # of `benchmarks.wan`
    options: Mapping[str, Any]
    values: int  # number of values in a round
    times_s: Sequence[float]  # of each round, from submitting to having the average

    @property
    def wire(self) -> Wire:
        return "hivemind" if self.options.get("swarm") else "torch"

    @property
    def fitted(self) -> bool:
        """Whether the constants are fitted to these rounds.

        They are not if the link has the longest round trip, random loss or another rate for the uplink, or if the
        number of streams is not the default.
        """
        plain = not self.link.loss_percent and not self.link.up_bits_per_s and "streams" not in self.options
        return plain and self.link.rtt_s < TESTED_FROM_S

    def predicted_s(self, *, p90: bool = False, constants: Constants | None = None) -> float:
        """Predict the time of a round, with the package's constants or with others."""
        conditions = _conditions(self.link, self.options, send_s_per_value=0.0, merge_s_per_value=0.0)
        overheads = conditions.overheads(self.link.replicas - 1, p90=p90)
        if constants is not None:
            goodput, round_trips, queue_trips = constants
            overheads = replace(overheads, goodput=goodput, round_trips=round_trips, queue_trips=queue_trips)
        codec, means = make_codec(self.options["codec"]), MeanEncoding.of(self.options.get("mean_codec", "auto"))
        traffic = outer_traffic(SyncSchedule(inner_steps=1), [self.values], codec, self.link.replicas, mean=means)
        cluster = Cluster.of(planner_links(self.link), 1.0, overheads=overheads)
        (merged,) = simulate(traffic, cluster, steps=2, measure_from=1).merged
        return float(merged.waited_s.max())


def measured_rounds() -> Iterator[Rounds]:
    """Yield the measured rounds: rounds alone, and those of whole runs."""
    for row in _read():
        if row["method"].startswith("rounds"):
            for values, times_s in round_times(row).items():
                yield Rounds(_link(row), row["method"], _options(row), values, times_s)
    for row in _runs():
        if "planned" not in row and "paced" not in row["method"]:
            work = Work(**row["work"])
            values = work.values // (work.num_fragments if row["method"].startswith("Streaming") else 1)
            every_s = zip(*(replica["transfers_s"] for replica in row["replicas"]), strict=True)
            yield Rounds(_link(row), row["method"], _options(row), values, [mean(each) for each in every_s])


def fit(measured: Sequence[Rounds]) -> tuple[Constants, Constants]:
    """Return the constants at the median and at p90: the same goodput, a mean over a run, and more round trips."""
    goodputs, trips = [step / 20 for step in range(6, 20)], [0.25 * n for n in range(9)]
    queue_trips = [0.5 * n for n in range(13)]
    typical = _least(measured, itertools.product(goodputs, trips[:5], queue_trips[:5]), 0.5)
    more = itertools.product(typical[:1], [n for n in trips if n >= typical[1]], queue_trips)
    return typical, _least(measured, more, 0.9)


def _least(measured: Sequence[Rounds], grid: Iterable[Constants], share: float) -> Constants:
    """Return the constants with which about ``share`` of the rounds take no longer than predicted.

    They minimise the quantile loss of the logarithms; every size on every link has the same weight.
    """

    def loss(constants: Constants) -> float:
        total = 0.0
        for each in measured:
            predicted_s = each.predicted_s(constants=constants)
            errors = [math.log(time_s / predicted_s) for time_s in each.times_s]
            total += sum(share * error if error > 0 else (share - 1) * error for error in errors) / len(errors)
        return total

    return min(grid, key=loss)


def predict_step_s(row: Mapping[str, Any], step_s: float) -> float:
    """Return the wall time of an inner step as `diloco plan` predicts it."""
    link, work, planned = _link(row), Work(**row["work"]), row.get("planned", {})
    options = _options(row)
    streaming = options.get("streaming") or bool(planned)
    schedule = SyncSchedule(
        inner_steps=work.inner_steps,
        num_fragments=work.num_fragments if streaming else 1,
        overlap_steps=work.overlap_steps if streaming else 0,
    )
    workload = Workload(parameters=work.values, layers=work.layers, step_time_s=step_s)
    codec, means = (
        make_codec(planned.get("codec") or options["codec"]),
        MeanEncoding.of(options.get("mean_codec", "auto")),
    )
    sharing = max(1.0, link.replicas / CORES)
    conditions = _conditions(
        link,
        options,
        send_s_per_value=sharing * SEND_S_PER_VALUE,
        merge_s_per_value=sharing * MERGE_S_PER_VALUE,
    )
    pace = options.get("pace", 1.0)
    links = [replace(each, bandwidth_bits_per_s=pace * each.bandwidth_bits_per_s) for each in planner_links(link)]
    cluster = Cluster.of(links, step_s, overheads=conditions.overheads(link.replicas - 1))
    traffic = workload.traffic(schedule, codec, link.replicas, mean=means)
    result = simulate_cycles(traffic, cluster, cycles=work.cycles)
    return float(result.wall_s) / result.steps


def compare() -> Iterator[dict[str, Any]]:
    """Yield one row for each run."""
    step_s = baseline_s(json.loads(RESULTS.read_text(encoding="utf-8")))
    for row in _runs():
        measured_s, predicted_s = measured_step_s(row), predict_step_s(row, step_s)
        yield {
            "kind": "run",
            "link": row["link"],
            "method": row["method"],
            "planned": row.get("planned"),
            "measured": {"step_s": measured_s, "compute_utilization": step_s / measured_s},
            "predicted": {"step_s": predicted_s, "compute_utilization": step_s / predicted_s},
        }


def missed(compared: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the plans whose runs fell short of their targets by more than `MISSED_BY`."""
    planned = [row for row in compared if row["planned"]]
    return [row for row in planned if row["measured"]["compute_utilization"] < row["planned"]["target"] - MISSED_BY]
