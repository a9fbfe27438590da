"""The simulator: the sends and merges of a schedule on links and clocks, for all replicas at once.

``CU = compute time / (compute time + time that is not compute)``. The simulator has no model of its own of what the
trainer decides: `SyncSchedule` says when to send, the codecs how much, and `round_times` how long a transfer takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diloco.algorithm import Send, SyncSchedule, steps_to_train, trains_at
from diloco.plan.exchange import Floats, Parcel
from diloco.plan.site import Site
from diloco.transport import LinkArrays, RoundTimes, round_times, streams_to_each


@dataclass(frozen=True)
class SimulatedRound:
    """One round, by replica, ``(M,)``."""

    fragment: int  # p
    took_s: Floats  # from having encoded the contribution to having the average
    waited_s: Floats  # the part of it for which the training loop stood still


@dataclass(frozen=True)
class Simulated:
    """The measured part of a run; arrays are by replica, ``(M,)``."""

    steps: int  # number of measured inner steps
    merged: tuple[SimulatedRound, ...]  # the rounds that were merged in them
    compute_s: Floats  # time spent computing
    waited_s: Floats  # time spent waiting for averages
    spent_s: Floats  # time spent on encoding, outer steps and merging (`Conditions`)
    sent_bytes: Floats  # payload

    @property
    def compute_utilization(self) -> float:
        """The mean over replicas, as a run reports it."""
        return float((self.compute_s / (self.compute_s + self.waited_s + self.spent_s)).mean())

    @property
    def wall_s(self) -> float:
        """The duration of the measured part for the slowest replica."""
        return float((self.compute_s + self.waited_s + self.spent_s).max())


def simulate(
    schedule: SyncSchedule,
    parcels: Sequence[Parcel],
    site: Site,
    *,
    steps: int,
    measure_from: int = 0,
    drain: bool = False,
    dynamic: bool = False,
) -> Simulated:
    """Simulate ``steps`` inner steps.

    Args:
        parcels: what the rounds of each fragment carry.
        measure_from: the measured part begins after this step.
        drain: whether to wait at the end for the rounds in flight, as a finished run does.
        dynamic: whether replicas slower than the fastest skip steps (DyLU).

    >>> from diloco.algorithm import make_codec
    >>> from diloco.plan import IDEAL, Exchange
    >>> from diloco.transport import Link
    >>> schedule = SyncSchedule(inner_steps=10)
    >>> diloco = Exchange(schedule=schedule, fragment_sizes=(1_000_000,), codec=make_codec("float32"))
    >>> two = Site(links=(Link(8e6),) * 2, step_time_s=(1.0, 1.0), conditions=IDEAL)
    >>> simulate(schedule, diloco.parcels(2), two, steps=20).compute_utilization  # two rounds of 4 s
    0.714...
    """
    computed_s = _computed_s(site.step_time_s, steps, schedule.inner_steps if dynamic else None)
    run, before = _Run(parcels, site, computed_s), None
    for step in schedule.busy_steps(steps):
        if before is None and step > measure_from:
            before = run.totals()
        for action in schedule.actions(step):
            if isinstance(action, Send):
                run.send(action.fragment, step)
            else:
                run.merge(action.fragment, step)
    before = run.totals() if before is None else before
    for fragment in tuple(run.in_flight) if drain else ():  # in the order of sending
        run.merge(fragment, steps)
    waited_s, spent_s, sent_bytes = (
        after - earlier for after, earlier in zip(run.totals()[1:], before[1:], strict=True)
    )
    return Simulated(
        steps=steps - measure_from,
        merged=tuple(run.merged[before[0] :]),
        compute_s=computed_s[steps] - computed_s[measure_from],
        waited_s=waited_s,
        spent_s=spent_s,
        sent_bytes=sent_bytes,
    )


def _computed_s(step_time_s: Sequence[float], steps: int, cycle: int | None) -> Floats:
    """Return the compute time of the first 0, 1, ..., ``steps`` steps, ``(steps + 1, M)``; ``cycle``: H, if dynamic."""
    times_s = np.array(step_time_s)
    if cycle is None:
        computed_s: Floats = np.arange(steps + 1)[:, None] * times_s
        return computed_s
    speeds = {replica: 1 / time_s for replica, time_s in enumerate(step_time_s)}
    numbers = [steps_to_train(replica, speeds, cycle) for replica in speeds]
    trained = [[trains_at(step % cycle, number, cycle) for number in numbers] for step in range(steps)]
    return np.concatenate([np.zeros((1, len(times_s))), np.cumsum(np.array(trained) * times_s, axis=0)])


class _Run:
    """The clocks and links of all replicas, ``(M,)``."""

    def __init__(self, parcels: Sequence[Parcel], site: Site, computed_s: Floats) -> None:
        self.parcels, self.conditions, self.computed_s = parcels, site.conditions, computed_s
        links, others = LinkArrays.of(site.links), len(site.links) - 1
        self.connections = max(1, others) * streams_to_each(others)
        rates = self.conditions.carried_bits_per_s(links.bandwidth_bits_per_s, 2 * links.latency_s, self.connections)
        self.links = LinkArrays(rates, links.latency_s)
        zero = np.zeros(len(site.links))
        self.waited_s = self.spent_s = self.sent_bytes = self.up_free_s = self.down_free_s = zero
        self.in_flight: dict[int, tuple[Floats, RoundTimes]] = {}  # fragment -> end of encoding, transfers
        self.merged: list[SimulatedRound] = []
        self.overhead_s = [self._overhead_s(parcel) if others else 0.0 for parcel in parcels]

    def _overhead_s(self, parcel: Parcel) -> float:
        """Return the time that a round takes in addition to the transfer of its payload and a vote."""
        conditions, rates, round_trip_s = (
            self.conditions,
            self.links.bandwidth_bits_per_s,
            2 * self.links.latency_s.max(),
        )
        # at most the transfer time of the payload: a payload that does not fill the link builds no queue
        filling_s = np.minimum(round_trip_s, 8 * parcel.sent_bytes / rates).max()
        overhead_s = conditions.queue_trips * filling_s + conditions.average_s_per_value * parcel.numel
        return float(overhead_s + conditions.start_s(parcel.sent_bytes, rates, round_trip_s, self.connections).max())

    def totals(self) -> tuple[int, Floats, Floats, Floats]:
        return len(self.merged), self.waited_s, self.spent_s, self.sent_bytes

    def now_s(self, step: int) -> Floats:
        """Return the clocks after ``step``, including the waits and the work recorded so far."""
        clocks_s: Floats = self.computed_s[step] + self.waited_s + self.spent_s
        return clocks_s

    def send(self, fragment: int, step: int) -> None:
        parcel = self.parcels[fragment]
        self.spent_s = self.spent_s + self.conditions.send_s_per_value * parcel.numel
        lasted_s = self.computed_s[step] - self.computed_s[step - 1]
        sent_at_s = _equivalent_send_s(parcel, self.now_s(step - 1), lasted_s, self.links.bandwidth_bits_per_s)
        times = round_times(
            self.links, sent_at_s, parcel.sent_bytes, parcel.received_bytes, self.up_free_s, self.down_free_s
        )
        self.up_free_s, self.down_free_s = times.up_end_s, np.maximum(self.down_free_s, times.down_end_s)
        self.in_flight[fragment] = self.now_s(step), times
        self.sent_bytes = self.sent_bytes + parcel.sent_bytes

    def merge(self, fragment: int, step: int) -> None:
        encoded_s, times = self.in_flight.pop(fragment)
        average_s = times.committed_s + self.overhead_s[fragment]
        waited_s = np.maximum(0.0, average_s - self.now_s(step))
        self.waited_s = self.waited_s + waited_s
        self.spent_s = self.spent_s + self.conditions.merge_s_per_value * self.parcels[fragment].numel
        self.merged.append(SimulatedRound(fragment, average_s - encoded_s, waited_s))


def _equivalent_send_s(parcel: Parcel, began_s: Floats, lasted_s: Floats, bandwidth_bits_per_s: Floats) -> Floats:
    """Return the time at which to send the parcel in one piece so that it ends when its parts would.

    The sending step began at ``began_s`` and lasted ``lasted_s``, ``(M,)``.
    """
    whole_s = 8 * parcel.sent_bytes / bandwidth_bits_per_s
    latest_s, gone = np.full_like(began_s, -np.inf), 0.0
    for fraction, share in parcel.releases:
        latest_s = np.maximum(latest_s, began_s + fraction * lasted_s - gone * whole_s)
        gone += share
    return latest_s
