"""The simulator: the sends and merges of a schedule on links and clocks, for many scenarios and replicas at once.

``CU = compute time / (compute time + time that is not compute)``. The simulator has no model of its own of what the
trainer decides: `SyncSchedule` says when to send, the codecs how much, and `round_times` how long a transfer takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diloco.algorithm import Send
from diloco.plan.cluster import Cluster, Floats, Parcel, Traffic
from diloco.transport import RoundTimes, round_times


@dataclass(frozen=True)
class SimulatedRound:
    """One round, by scenario and replica, ``(..., M)``."""

    fragment: int  # p
    took_s: Floats  # from having encoded the contribution to having the average
    waited_s: Floats  # the part of it for which the training loop stood still


@dataclass(frozen=True)
class Simulated:
    """The measured part of a run; arrays are by scenario and replica, ``(..., M)``."""

    steps: int  # number of measured inner steps
    parcels: tuple[Parcel, ...]  # what the rounds of each fragment carry
    merged: tuple[SimulatedRound, ...]  # the rounds that were merged in them
    compute_s: Floats  # time spent computing
    waited_s: Floats  # time spent waiting for averages
    spent_s: Floats  # time spent on encoding, outer steps and merging (`Overheads`)
    sent_bytes: Floats  # payload
    received_bytes: Floats

    @property
    def compute_utilization(self) -> Floats:
        """The compute utilisation by scenario, ``(...)``: the mean over replicas, as a run reports it."""
        mean: Floats = (self.compute_s / (self.compute_s + self.waited_s + self.spent_s)).mean(-1)
        return mean

    @property
    def wall_s(self) -> Floats:
        """The duration of the measured part for the slowest replica, ``(...)``."""
        slowest: Floats = (self.compute_s + self.waited_s + self.spent_s).max(-1)
        return slowest


def simulate(
    traffic: Traffic, cluster: Cluster, *, steps: int, measure_from: int = 0, drain: bool = False
) -> Simulated:
    """Simulate ``steps`` inner steps.

    Args:
        measure_from: the measured part begins after this step.
        drain: whether to wait at the end for the rounds in flight, as a finished run does.

    >>> from diloco.algorithm import SyncSchedule, make_codec
    >>> from diloco.plan import Cluster, Exchange
    >>> from diloco.transport import Link
    >>> schedule = SyncSchedule(inner_steps=10)
    >>> diloco = Exchange(schedule=schedule, fragment_sizes=(1_000_000,), codec=make_codec("float32"))
    >>> two = Cluster.of([Link(8e6)] * 2, 1.0)
    >>> simulate(diloco.traffic(2), two, steps=20).compute_utilization  # two rounds of 4 s
    np.float64(0.714...)
    """
    run, before = _Run(traffic, cluster, steps), None
    for step in traffic.schedule.busy_steps(steps):
        if before is None and step > measure_from:
            before = run.totals()
        for action in traffic.schedule.actions(step):
            if isinstance(action, Send):
                run.send(action.fragment, step)
            else:
                run.merge(action.fragment, step)
    before = run.totals() if before is None else before
    for fragment in tuple(run.in_flight) if drain else ():  # in the order of sending
        run.merge(fragment, steps)
    waited_s, spent_s, sent_bytes, received_bytes = (
        after - earlier for after, earlier in zip(run.totals()[1:], before[1:], strict=True)
    )
    return Simulated(
        steps=steps - measure_from,
        parcels=traffic.parcels,
        merged=tuple(run.merged[before[0] :]),
        compute_s=np.broadcast_to(run.computed_s[steps] - run.computed_s[measure_from], run.shape),
        waited_s=waited_s,
        spent_s=spent_s,
        sent_bytes=sent_bytes,
        received_bytes=received_bytes,
    )


def simulate_cycles(traffic: Traffic, cluster: Cluster, *, cycles: int = 2) -> Simulated:
    """Simulate the steady state: ``cycles`` times H steps, after every fragment has had two rounds."""
    period = traffic.schedule.inner_steps
    begin = 3 * period
    return simulate(traffic, cluster, steps=begin + cycles * period, measure_from=begin)


class _Run:
    """The clocks and links of all scenarios and replicas, ``(..., M)``."""

    def __init__(self, traffic: Traffic, cluster: Cluster, steps: int) -> None:
        self.traffic, self.cluster, self.links = traffic, cluster, cluster.used_links
        self.computed_s = cluster.computed_s(steps)
        sizes = [array.shape for parcel in traffic.parcels for array in (parcel.sent_bytes, parcel.received_bytes)]
        ways = (self.links.bandwidth_bits_per_s.shape, self.links.latency_s.shape, cluster.step_time_s.shape)
        self.shape = np.broadcast_shapes(*sizes, *ways)
        self.waited_s, self.spent_s = np.zeros(self.shape), np.zeros(self.shape)
        self.up_free_s, self.down_free_s = np.zeros(self.shape), np.zeros(self.shape)
        self.sent_bytes, self.received_bytes = np.zeros(self.shape), np.zeros(self.shape)
        self.in_flight: dict[int, tuple[Floats, RoundTimes]] = {}  # fragment -> end of encoding, transfers
        self.merged: list[SimulatedRound] = []
        self.overhead_s = [cluster.overhead_s(parcel, self.links) for parcel in traffic.parcels]

    def totals(self) -> tuple[int, Floats, Floats, Floats, Floats]:
        return len(self.merged), self.waited_s, self.spent_s, self.sent_bytes, self.received_bytes

    def now_s(self, step: int) -> Floats:
        """Return the clocks after ``step``, including the waits and the work recorded so far."""
        clocks_s: Floats = self.computed_s[step] + self.waited_s + self.spent_s
        return clocks_s

    def send(self, fragment: int, step: int) -> None:
        parcel = self.traffic.parcels[fragment]
        self.spent_s = self.spent_s + self.cluster.overheads.send_s_per_value * parcel.numel
        lasted_s = self.computed_s[step] - self.computed_s[step - 1]
        sent_at_s = _equivalent_send_s(parcel, self.now_s(step - 1), lasted_s, self.links.bandwidth_bits_per_s)
        times = round_times(
            self.links, sent_at_s, parcel.sent_bytes, parcel.received_bytes, self.up_free_s, self.down_free_s
        )
        self.up_free_s, self.down_free_s = times.up_end_s, np.maximum(self.down_free_s, times.down_end_s)
        self.in_flight[fragment] = self.now_s(step), times
        self.sent_bytes = self.sent_bytes + parcel.sent_bytes
        self.received_bytes = self.received_bytes + parcel.received_bytes

    def merge(self, fragment: int, step: int) -> None:
        encoded_s, times = self.in_flight.pop(fragment)
        average_s = times.committed_s + self.overhead_s[fragment]
        waited_s = np.maximum(0.0, average_s - self.now_s(step))
        self.waited_s = self.waited_s + waited_s
        self.spent_s = self.spent_s + self.cluster.overheads.merge_s_per_value * self.traffic.parcels[fragment].numel
        self.merged.append(SimulatedRound(fragment, average_s - encoded_s, waited_s))


def _equivalent_send_s(parcel: Parcel, began_s: Floats, lasted_s: Floats, bandwidth_bits_per_s: Floats) -> Floats:
    """Return the time at which to send the parcel in one piece so that it ends when its parts would, ``(..., M)``.

    Args:
        began_s: the start of the sending step, ``(..., M)``.
        lasted_s: the compute time of that step, broadcastable to ``(..., M)``, as is the bandwidth.
    """
    whole_s = 8 * parcel.sent_bytes / bandwidth_bits_per_s
    latest_s, gone = np.full_like(began_s, -np.inf), 0.0
    for fraction, share in parcel.releases:
        latest_s = np.maximum(latest_s, began_s + fraction * lasted_s - gone * whole_s)
        gone += share
    return latest_s
