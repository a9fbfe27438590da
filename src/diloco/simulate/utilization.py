"""The simulator: the sends and merges of a schedule on links and clocks, for many scenarios and replicas at once.

``CU = compute time / (compute time + time that is not compute)``. The simulator shares code with the trainer for the
time of sends (`SyncSchedule`), the size of payloads (`diloco.simulate.traffic`, from the codecs) and the duration of
transfers (`diloco.transport.links.round_times`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from diloco.algorithm import Send
from diloco.errors import ConfigurationError
from diloco.simulate.cluster import Cluster
from diloco.simulate.traffic import Parcel, Traffic
from diloco.transport import RoundTimes, round_times

__all__ = ["Simulated", "SimulatedRound", "equivalent_send_s", "simulate", "simulate_cycles"]

Floats = NDArray[np.float64]

NEVER_S = np.array(math.inf)


@dataclass(frozen=True)
class SimulatedRound:
    """One round, for drawing; times are in seconds, ``(..., M)``."""

    fragment: int  # p
    outer_step: int  # counted from 0
    sent_bytes: Floats  # by replica
    received_bytes: Floats
    times: RoundTimes  # times of the transfers on the links
    send_step: int  # inner step after which the fragment was sent
    send_start_s: Floats  # start of encoding
    send_stop_s: Floats  # end of encoding
    merge_step: int | None  # inner step after which the fragment was merged; None if the run ended before
    merge_start_s: Floats  # start of the wait for the average; like the next two, infinite if the run ended before
    merge_stop_s: Floats  # end of the wait
    merged_s: Floats  # end of the merge


@dataclass(frozen=True)
class Simulated:
    """The measured part of a run; arrays are by scenario and replica, ``(..., M)``."""

    steps: int  # number of measured inner steps
    rounds: int  # number of merges in them
    compute_s: Floats  # time spent computing
    waited_s: Floats  # time spent waiting for averages
    spent_s: Floats  # time spent on encoding, outer steps and merging (`Overheads`)
    longest_wait_s: Floats  # longest wait for a single average
    sent_bytes: Floats  # payload
    received_bytes: Floats
    # all rounds of the run, with ``history=True``; rounds in flight at its end come last
    history: tuple[SimulatedRound, ...] = ()

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

    @property
    def stall_per_round_s(self) -> Floats:
        """The mean wait per merge over replicas, ``(...)``."""
        mean: Floats = self.waited_s.mean(-1) / max(1, self.rounds)
        return mean

    @property
    def sent_bytes_per_s(self) -> Floats:
        """The mean rate of payload of the replica that sends most, ``(...)``."""
        rate: Floats = self.sent_bytes.max(-1) / self.wall_s
        return rate


def simulate(
    traffic: Traffic,
    cluster: Cluster,
    *,
    steps: int,
    measure_from: int = 0,
    drain: bool = False,
    history: bool = False,
) -> Simulated:
    """Simulate ``steps`` inner steps.

    Args:
        measure_from: the measured part begins after this step.
        drain: whether to wait at the end for the rounds in flight, as a finished run does.
        history: whether to keep every round.

    Raises:
        ConfigurationError: if no step is left to measure.

    >>> from diloco.algorithm import make_codec
    >>> from diloco.algorithm.schedule import SyncSchedule
    >>> from diloco.simulate.traffic import outer_traffic
    >>> from diloco.transport.links import Link
    >>> diloco = outer_traffic(SyncSchedule(inner_steps=10), [1_000_000], [make_codec("float32")], 2)
    >>> simulate(diloco, Cluster.of([Link(8e6)] * 2, 1.0), steps=20).compute_utilization   # two rounds of 4 s
    np.float64(0.714...)
    """
    if not 0 <= measure_from < steps:
        raise ConfigurationError(
            f"measure_from must be at least 0 and less than steps, got measure_from={measure_from} and steps={steps}."
        )
    run = _Run(traffic, cluster, steps, keep=history)
    before = run.totals()
    for step in traffic.schedule.busy_steps(steps):
        if step > measure_from and run.measured_from is None:
            run.measured_from, before = step, run.totals()
            run.longest_wait_s = np.zeros(run.shape)
        for action in traffic.schedule.actions(step):
            if isinstance(action, Send):
                run.send(action.fragment, action.outer_step, step)
            else:
                run.merge(action.fragment, step)
    if run.measured_from is None:
        before = run.totals()
    if drain:
        for fragment in tuple(run.in_flight):  # in the order of sending
            run.merge(fragment, steps)
    counted = {name: after - before[name] for name, after in run.totals().items()}
    computed_s = run.computed_s[steps] - run.computed_s[measure_from]
    return Simulated(
        steps=steps - measure_from,
        rounds=int(counted.pop("rounds")),
        compute_s=np.broadcast_to(computed_s, run.shape),
        longest_wait_s=run.longest_wait_s,
        history=(*run.history, *run.in_flight.values()) if history else (),
        **counted,
    )


def simulate_cycles(traffic: Traffic, cluster: Cluster, *, cycles: int = 2) -> Simulated:
    """Simulate the steady state: ``cycles`` times H steps, after every fragment has had two rounds."""
    period = traffic.schedule.inner_steps
    begin = 3 * period
    return simulate(traffic, cluster, steps=begin + cycles * period, measure_from=begin)


class _Run:
    """The clocks and links of all scenarios and replicas, ``(..., M)``."""

    def __init__(self, traffic: Traffic, cluster: Cluster, steps: int, *, keep: bool) -> None:
        self.traffic, self.cluster, self.keep = traffic, cluster, keep
        self.links = cluster.links
        self.computed_s = cluster.computed_s(steps)
        sizes = [array.shape for parcel in traffic.parcels for array in (parcel.sent_bytes, parcel.received_bytes)]
        ways = (cluster.bandwidth_bits_per_s.shape, cluster.latency_s.shape, cluster.step_time_s.shape)
        self.shape = np.broadcast_shapes(*sizes, *ways)
        self.waited_s, self.spent_s, self.longest_wait_s = (np.zeros(self.shape) for _ in range(3))
        self.up_free_s, self.down_free_s = np.zeros(self.shape), np.zeros(self.shape)
        self.sent_bytes, self.received_bytes = np.zeros(self.shape), np.zeros(self.shape)
        self.rounds = 0
        self.measured_from: int | None = None
        self.in_flight: dict[int, SimulatedRound] = {}
        self.history: list[SimulatedRound] = []
        self.overhead_s = [cluster.overhead_s(parcel, self.links) for parcel in traffic.parcels]

    def totals(self) -> dict[str, Floats]:
        return {
            "waited_s": self.waited_s.copy(),
            "spent_s": self.spent_s.copy(),
            "sent_bytes": self.sent_bytes.copy(),
            "received_bytes": self.received_bytes.copy(),
            "rounds": np.array(self.rounds),
        }

    def now_s(self, step: int) -> Floats:
        """Return the clocks after ``step``, including the waits and the work recorded so far."""
        clocks_s: Floats = self.computed_s[step] + self.waited_s + self.spent_s
        return clocks_s

    def send(self, fragment: int, outer_step: int, step: int) -> None:
        parcel, overheads = self.traffic.parcels[fragment], self.cluster.overheads
        began_s = self.now_s(step)
        self.spent_s = self.spent_s + overheads.send_s_per_value * parcel.numel
        last_began_s, lasted_s = self.now_s(step - 1), self.computed_s[step] - self.computed_s[step - 1]
        sent_at_s = equivalent_send_s(parcel, last_began_s, lasted_s, self.links.bandwidth_bits_per_s)
        times = round_times(
            self.links,
            sent_at_s,
            parcel.sent_bytes,
            parcel.received_bytes,
            self.up_free_s,
            self.down_free_s,
        )
        self.up_free_s, self.down_free_s = times.up_end_s, np.maximum(self.down_free_s, times.down_end_s)
        self.in_flight[fragment] = SimulatedRound(
            fragment=fragment,
            outer_step=outer_step,
            sent_bytes=parcel.sent_bytes,
            received_bytes=parcel.received_bytes,
            times=times,
            send_step=step,
            send_start_s=began_s,
            send_stop_s=self.now_s(step),
            merge_step=None,
            merge_start_s=NEVER_S,
            merge_stop_s=NEVER_S,
            merged_s=NEVER_S,
        )
        self.sent_bytes = self.sent_bytes + parcel.sent_bytes
        self.received_bytes = self.received_bytes + parcel.received_bytes

    def merge(self, fragment: int, step: int) -> None:
        parcel, overheads = self.traffic.parcels[fragment], self.cluster.overheads
        sent = self.in_flight.pop(fragment)
        now_s = self.now_s(step)
        waits_s = np.maximum(0.0, sent.times.committed_s + self.overhead_s[fragment] - now_s)
        self.waited_s = self.waited_s + waits_s
        self.longest_wait_s = np.maximum(self.longest_wait_s, waits_s)
        merges_s = overheads.merge_s_per_value * parcel.numel
        self.spent_s = self.spent_s + merges_s
        self.rounds += 1
        if self.keep:
            had_s = now_s + waits_s
            self.history.append(
                replace(sent, merge_step=step, merge_start_s=now_s, merge_stop_s=had_s, merged_s=had_s + merges_s)
            )


def equivalent_send_s(parcel: Parcel, began_s: Floats, lasted_s: Floats, bandwidth_bits_per_s: Floats) -> Floats:
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
