"""The rounds that `benchmarks.wan` measured, their predictions, and the constants that fit them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from benchmarks.wan.plan import GRID, LINKS, METHODS, Link, Work
from benchmarks.wan.planned import congestion_control, planner_links
from benchmarks.wan.report import round_times
from diloco.algorithm import MeanEncoding, SyncSchedule, make_codec
from diloco.simulate import Cluster, Conditions, Constants, Fitted, Wire, outer_traffic, simulate

__all__ = ["Rounds", "fit", "link_named", "rounds"]

TESTED_FROM_S = 0.4
"""Links with at least this round trip are not used for the fit."""


def link_named(name: str) -> Link:
    return next(link for link in (*LINKS, *GRID) if link.name == name)


CAREFUL = 0.9
"""The share of the rounds that should take no longer than a careful prediction."""


@dataclass(frozen=True)
class Rounds:
    """Rounds of one size on one link.

    Attributes:
        link, method: those of `benchmarks.wan`.
        values: the number of values in a round.
        times_s: the time of each round, from submitting to having the average.
    """

    link: Link
    method: str
    values: int
    times_s: Sequence[float]

    @property
    def options(self) -> Mapping[str, Any]:
        return next(method for method in METHODS if method.name == self.method).options

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

    def predicted_s(self, *, careful: bool = False, constants: Constants | None = None) -> float:
        """Predict the time of a round, with the package's constants or with others."""
        conditions = Conditions(
            wire=self.wire,
            congestion_control=congestion_control(self.link),
            loss=self.link.loss_percent / 100,
            streams=self.options.get("streams"),
            send_s_per_value=0.0,
            merge_s_per_value=0.0,
        )
        overheads = conditions.overheads(self.link.replicas - 1, careful=careful)
        if constants is not None:
            goodput, round_trips, queue_trips = constants
            overheads = replace(overheads, goodput=goodput, round_trips=round_trips, queue_trips=queue_trips)
        schedule = SyncSchedule(inner_steps=1)
        codec, means = make_codec(self.options["codec"]), MeanEncoding.of(self.options.get("mean_codec", "auto"))
        traffic = outer_traffic(schedule, [self.values], [codec], self.link.replicas, mean=means)
        cluster = Cluster.of(planner_links(self.link), 1.0, overheads=overheads)
        result = simulate(traffic, cluster, steps=2, measure_from=1)
        return float(result.longest_wait_s.max())


def rounds(rows: Sequence[Mapping[str, Any]]) -> Iterator[Rounds]:
    """Yield the measured rounds: rounds alone, and those of whole runs of this package."""
    for row in rows:
        link = link_named(row["link"])
        if row["method"].startswith("rounds"):
            for values, times_s in round_times(row).items():
                yield Rounds(link, row["method"], values, times_s)
        else:
            work = Work(**row["work"])
            values = work.values // (work.num_fragments if row["method"].startswith("Streaming") else 1)
            every_s = zip(*(replica["transfers_s"] for replica in row["replicas"]), strict=True)
            yield Rounds(link, row["method"], values, [mean(each) for each in every_s])


def fit(measured: Sequence[Rounds]) -> Fitted:
    """Return typical constants, and careful ones: the same goodput, a mean over a run, and more round trips."""
    goodputs, trips, queue_trips = (
        [step / 20 for step in range(6, 20)],
        [0.25 * n for n in range(9)],
        [0.5 * n for n in range(13)],
    )
    typical = _least(measured, itertools.product(goodputs, trips[:5], queue_trips[:5]), 0.5)
    return Fitted(
        typical=typical,
        careful=_least(
            measured, itertools.product(typical[:1], [n for n in trips if n >= typical[1]], queue_trips), CAREFUL
        ),
    )


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
