"""The simulator: what replicas send each other, the links and machines that carry it, and the clocks of all replicas.

``CU = compute time / (compute time + time that is not compute)``. The simulator has no model of its own of what the
trainer decides: `SyncSchedule` says when to send, the codecs how much, and `Links` how long a transfer takes.
What real runs spend besides (TCP, queues and work), and the errors of predictions with it, are results of
benchmarks/simulator.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from diloco.algorithm import (
    PLAIN_MEAN,
    Codec,
    MeanCodec,
    Send,
    SyncSchedule,
    Uplink,
    make_codec,
    plan_exchange,
    steps_to_train,
    trains_at,
)
from diloco.errors import ConfigurationError
from diloco.train import RunSettings, make_schedule, outer_components
from diloco.transport import Link, Links, streams_to_each, uplinks_of

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Parcel:
    """What one round of one fragment sends."""

    sent_bytes: Floats  # by replica, ``(M,)``
    received_bytes: Floats
    numel: int = 0  # number of values in the fragment, which determines the work of encoding and merging

    def send_s(self, began_s: Floats, ended_s: Floats, bandwidth_bits_per_s: Floats) -> Floats:
        """Return when it is sent, for a sending step from ``began_s`` to ``ended_s``; all ``(M,)``.

        The trainer sends when the inner optimizer has updated the parameters.
        """
        return ended_s


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What replicas send each other, and when."""

    schedule: SyncSchedule
    fragment_sizes: tuple[int, ...]  # number of values of each fragment
    codec: Codec
    mean: MeanCodec = PLAIN_MEAN
    whole: bool = False  # whether every replica needs whole contributions
    dynamic_steps: bool = False  # whether slow replicas skip steps
    gradients: bool = False  # whether these are the gradients of data-parallel steps, whose work is not counted

    @classmethod
    def of(cls, settings: RunSettings, fragment_sizes: Sequence[int]) -> Traffic:
        """Return the traffic of resolved ``settings`` for a model with these fragments."""
        if settings.algorithm == "data-parallel":
            return cls.of_gradients(sum(fragment_sizes), settings.sync.codec or "float32")
        components = outer_components(settings.sync)
        return cls(
            schedule=make_schedule(settings),
            fragment_sizes=tuple(fragment_sizes),
            codec=components["codec"],
            mean=components["mean_codec"],
            whole=settings.sync.whole_contributions,
            dynamic_steps=settings.network.straggler == "dynamic",
        )

    @classmethod
    def of_gradients(cls, parameters: int, codec: str = "float32") -> Traffic:
        """Return the traffic of data-parallel steps, as the trainer takes them: all gradients after the step."""
        schedule = SyncSchedule(inner_steps=1)
        return cls(schedule=schedule, fragment_sizes=(parameters,), codec=make_codec(codec), gradients=True)

    def parcels(self, num_replicas: int, uplinks: Sequence[Uplink] = ()) -> tuple[Parcel, ...]:
        """Return what ``num_replicas`` replicas send, by the exchange that transports choose for their ``uplinks``.

        >>> traffic = Traffic(schedule=SyncSchedule(inner_steps=9), fragment_sizes=(1000,), codec=make_codec("fp4"))
        >>> traffic.parcels(2)[0].sent_bytes
        array([504., 504.])
        """
        how: Any = {"mean": self.mean, "whole": self.whole, "uplinks": uplinks}
        plans = {numel: plan_exchange(self.codec, numel, num_replicas, **how) for numel in {*self.fragment_sizes}}
        of_each = ((plans[numel], numel) for numel in self.fragment_sizes)
        return tuple(Parcel(np.array(plan.sent, float), np.array(plan.received, float), n) for plan, n in of_each)


def fragment_sizes(parameters: int, layers: int, num_fragments: int) -> tuple[int, ...]:
    """Return the number of values in each strided fragment (Streaming DiLoCo, Fig. 2) of a model of equal layers.

    Raises:
        ConfigurationError: there are not as many layers, or not as many parameters.

    >>> fragment_sizes(10, 4, 2)
    (4, 6)
    """
    if not 1 <= num_fragments <= layers <= parameters:
        raise ConfigurationError(
            f"{parameters} parameters in {layers} layers cannot be split into {num_fragments} fragments."
        )
    edges = [layer * parameters // layers for layer in range(layers + 1)]
    sizes = [end - begin for begin, end in itertools.pairwise(edges)]
    return tuple(sum(sizes[first::num_fragments]) for first in range(num_fragments))


CongestionControl = Literal["bbr", "cubic", "reno"]

SEGMENT_BYTES, SEGMENT_HEADERS_BYTES = 1448, 66
FIRST_WINDOW_BYTES = 10 * SEGMENT_BYTES
"""The congestion window of a connection that is new or was idle for longer than a round trip or two (RFC 6928, and
section 4.1 of RFC 5681)."""

LARGEST_WINDOW_BYTES = 1 << 22  # the most in flight over one connection: Linux's default limit on the send buffer
P90_QUEUE_TRIPS = 4.0  # about one round in ten loses more round trips in queues
P90_WORK = 1.25  # factor for the work at p90
TAIL_S = 0.2  # besides two round trips, until the kernel sends a last segment again (RFC 8985, 7.2)

ACCURACY = (
    "median error 8% of the time of a round (largest 35%) and 0.2% of the whole time (largest 13%), in 27 runs on a CPU"
)
"""The errors of predictions, in words."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions under which replicas exchange contributions. The defaults are measured on a CPU."""

    # TCP congestion control of the senders: bbr keeps its rate across pauses and losses; cubic and reno restart slowly
    # after a pause, and treat a loss as congestion; None: payload has the full rate from the start
    congestion_control: CongestionControl | None = "cubic"
    loss: float = 0.0  # fraction of packets lost for other reasons than a full queue
    # time per value that a round takes for decoding, summing and hashing, while training continues
    average_s_per_value: float = 1.5e-9
    # time per value that a send blocks the training loop: pseudo-gradient and encoding
    send_s_per_value: float = 2.5e-9
    # time per value that a merge blocks the training loop: outer step and merge
    merge_s_per_value: float = 1.9e-9
    # round trips lost in queues while the payload fills the link; a smaller payload loses a part of them
    queue_trips: float = 0.0
    header_trips: float = 0.5  # round trips before the payload, which is sent once the headers of all have arrived
    quantile: float = 0.5  # share of the rounds that take no longer

    def scaled(self, work: float) -> Conditions:
        """Return the conditions with ``work`` times the work."""
        names = ("average_s_per_value", "send_s_per_value", "merge_s_per_value")
        return replace(self, **{name: work * getattr(self, name) for name in names})

    def at_p90(self) -> Conditions:
        """Return conditions that one round in ten exceeds, instead of every other round."""
        return replace(self.scaled(P90_WORK), queue_trips=P90_QUEUE_TRIPS, quantile=0.9)

    def carried_bits_per_s(self, bandwidth_bits_per_s: Floats, round_trip_s: Floats, connections: int) -> Floats:
        """Return the throughput on a link of the connections to all other replicas together, ``(M,)``.

        It is the share of the bandwidth that loss leaves, but at most one window per connection and round trip. Where
        loss counts as congestion, a window is ``sqrt(1.5 / loss)`` segments (Mathis et al., 1997).

        >>> Conditions(loss=0.005).carried_bits_per_s(np.array(3e8), np.array(0.08), 2)
        np.float64(5016019.1...)
        """
        if self.congestion_control is None:
            return bandwidth_bits_per_s
        window_bytes = float(LARGEST_WINDOW_BYTES)
        if self.congestion_control != "bbr" and self.loss > 0:
            window_bytes = min(window_bytes, SEGMENT_BYTES * math.sqrt(1.5 / self.loss))
        with np.errstate(divide="ignore"):
            most_bits_per_s = 8 * connections * window_bytes / round_trip_s
        carried: Floats = np.minimum((1 - self.loss) * bandwidth_bits_per_s, most_bits_per_s)
        return carried

    def start_s(self, sent_bytes: Floats, carried_bits_per_s: Floats, round_trip_s: float, connections: int) -> Floats:
        """Return how many seconds slow start adds to a transfer at full speed, ``(M,)``.

        Connections in slow start double what they send with every round trip.

        >>> Conditions().start_s(np.array([1e4, 1e7]), np.array(2e8), 0.5, 4).round(2)
        array([0.08, 3.06])
        """
        if self.congestion_control in ("bbr", None):
            return np.zeros_like(sent_bytes)
        window = connections * FIRST_WINDOW_BYTES
        full = np.maximum(window, carried_bits_per_s * round_trip_s / 8)  # in flight at full speed
        # sent at window / rtt * 2 ** (t / rtt): this much until t, or until the speed of the link is reached
        trips = np.log2(np.minimum(full, sent_bytes * math.log(2) + window) / window)
        slow_bytes = window * (2**trips - 1) / math.log(2)
        lost: Floats = trips * round_trip_s - 8 * slow_bytes / carried_bits_per_s
        return np.maximum(0.0, lost)

    def tail_s(self, round_trip_s: float, connections: int) -> float:
        """Return how late a round is because a connection has lost the last segment that it sent; 0 if few rounds are.

        Nothing that follows shows the loss, so the kernel notices it late.

        >>> [round(Conditions(loss=loss).tail_s(0.05, 96), 2) for loss in (0.0, 0.005, 0.01)]
        [0.0, 0.0, 0.3]
        """
        return 2 * round_trip_s + TAIL_S if (1 - self.loss) ** connections < self.quantile else 0.0


IDEAL = Conditions(congestion_control=None, header_trips=0.0).scaled(0.0)
"""No overhead: the ideal of the papers and of the virtual clock."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The replicas and links of a run."""

    links: tuple[Link, ...]  # one for each replica
    step_time_s: tuple[float, ...]  # compute time of an inner step, one for each replica
    conditions: Conditions = Conditions()

    def uplinks(self, transfer_steps: float) -> tuple[Uplink, ...]:
        """Return what the replicas learn of their uplinks; see `SyncSchedule.transfer_steps`.

        Slow ones sum less where losses don't slow them all. What TCP measures is without headers.
        """
        control = self.conditions.congestion_control
        share = 1.0 if control is None else SEGMENT_BYTES / (SEGMENT_BYTES + SEGMENT_HEADERS_BYTES)
        return tuple(
            replace(uplink, full=control in ("bbr", None), bits_per_s=int(share * uplink.bits_per_s))
            for uplink in uplinks_of(self.links, [transfer_steps * step_s for step_s in self.step_time_s])
        )


@dataclass(frozen=True)
class SimulatedRound:
    """One round, by replica, ``(M,)``."""

    fragment: int  # p
    took_s: Floats  # from having encoded the contribution to having the average
    waited_s: Floats  # the part of it for which the training loop stood still


@dataclass(frozen=True)
class Simulated:
    """The measured part of a run; arrays are by replica, ``(M,)``."""

    steps: int  # the number of measured inner steps
    compute_s: Floats  # the time spent computing
    waited_s: Floats  # waiting for averages
    spent_s: Floats  # on encoding, outer steps and merging (`Conditions`)
    sent_bytes: Floats  # of payload
    merged: list[SimulatedRound]  # the rounds that were merged in these steps

    @property
    def compute_utilization(self) -> float:
        """The mean over replicas, as a run reports it."""
        return float((self.compute_s / (self.compute_s + self.waited_s + self.spent_s)).mean())

    @property
    def wall_s(self) -> float:
        """The duration of the measured part for the slowest replica."""
        return float((self.compute_s + self.waited_s + self.spent_s).max())


class _Clocks:
    """The clocks and links of all replicas, and what they have waited and sent since the first step."""

    def __init__(self, parcels: Sequence[Parcel], deployment: Deployment, computed_s: Floats) -> None:
        self._parcels, self._conditions, self._computed_s = parcels, deployment.conditions, computed_s
        others, latency_s = len(deployment.links) - 1, np.array([link.latency_s for link in deployment.links])
        self._connections = max(1, others) * streams_to_each(others)
        bandwidth = np.array([link.bandwidth_bits_per_s for link in deployment.links])
        rates = self._conditions.carried_bits_per_s(bandwidth, 2 * latency_s, self._connections)
        self._links = Links(rates, latency_s)
        self._overhead_s = [self._overhead(parcel) if others else 0.0 for parcel in parcels]
        self._waited_s = self._spent_s = self._sent_bytes = np.zeros(len(deployment.links))
        self._merged: list[SimulatedRound] = []
        # fragment -> end of encoding, commit; in the order of sending
        self._in_flight: dict[int, tuple[Floats, Floats]] = {}

    def act(self, schedule: SyncSchedule, *, after: int, until: int) -> None:
        """Send and merge the fragments that are due after each step between these two, the last one included."""
        for step in schedule.busy_steps(until):
            if step <= after:
                continue
            for action in schedule.actions(step):
                if isinstance(action, Send):
                    self._send(action.fragment, step)
                else:
                    self._merge(action.fragment, step)

    def measured(self, step: int) -> Simulated:
        """Return what has been measured since the first step, once all actions up to ``step`` have been taken."""
        return Simulated(step, self._computed_s[step], self._waited_s, self._spent_s, self._sent_bytes, [*self._merged])

    def _overhead(self, parcel: Parcel) -> float:
        """Return the time that a round takes in addition to the transfer of its payload and a vote."""
        conditions, rates = self._conditions, self._links.bandwidth_bits_per_s
        round_trip_s = 2 * self._links.latency_s.max()
        # at most the transfer time of the payload: a payload that does not fill the link builds no queue
        filling_s = np.minimum(round_trip_s, 8 * parcel.sent_bytes / rates).max()
        overhead_s = conditions.queue_trips * filling_s + conditions.average_s_per_value * parcel.numel
        overhead_s += conditions.header_trips * round_trip_s
        overhead_s += conditions.tail_s(round_trip_s, len(rates) * self._connections)
        return float(overhead_s + conditions.start_s(parcel.sent_bytes, rates, round_trip_s, self._connections).max())

    def _now_s(self, step: int) -> Floats:
        """Return the clocks after ``step``, including the waits and the work recorded so far."""
        clocks_s: Floats = self._computed_s[step] + self._waited_s + self._spent_s
        return clocks_s

    def _send(self, fragment: int, step: int) -> None:
        """Send a fragment after ``step``."""
        parcel = self._parcels[fragment]
        self._spent_s = self._spent_s + self._conditions.send_s_per_value * parcel.numel
        sent_at_s = parcel.send_s(self._now_s(step - 1), self._now_s(step), self._links.bandwidth_bits_per_s)
        committed_s = self._links.commit_s(sent_at_s, parcel.sent_bytes, parcel.received_bytes)
        self._in_flight[fragment] = self._now_s(step), committed_s
        self._sent_bytes = self._sent_bytes + parcel.sent_bytes

    def _merge(self, fragment: int, step: int) -> None:
        """Merge the average of a fragment after ``step``, as soon as it is there."""
        encoded_s, committed_s = self._in_flight.pop(fragment)
        average_s = committed_s + self._overhead_s[fragment]
        waited_s = np.maximum(0.0, average_s - self._now_s(step))
        self._waited_s = self._waited_s + waited_s
        self._spent_s = self._spent_s + self._conditions.merge_s_per_value * self._parcels[fragment].numel
        self._merged.append(SimulatedRound(fragment, average_s - encoded_s, waited_s))


def simulate(
    schedule: SyncSchedule,
    parcels: Sequence[Parcel],
    deployment: Deployment,
    *,
    steps: int,
    measure_from: int = 0,
    dynamic: bool = False,
) -> Simulated:
    """Simulate ``steps`` inner steps.

    Args:
        parcels: what the rounds of each fragment carry.
        measure_from: the measured part begins after this step.
        dynamic: whether replicas slower than the fastest skip steps (DyLU).

    >>> from diloco.algorithm import make_codec
    >>> from diloco.plan import IDEAL, Traffic
    >>> from diloco.transport import Link
    >>> schedule = SyncSchedule(inner_steps=10)
    >>> diloco = Traffic(schedule=schedule, fragment_sizes=(1_000_000,), codec=make_codec("float32"))
    >>> two = Deployment(links=(Link(8e6),) * 2, step_time_s=(1.0, 1.0), conditions=IDEAL)
    >>> simulate(schedule, diloco.parcels(2), two, steps=20).compute_utilization  # two rounds of 4 s
    0.714...
    """
    run = _Clocks(
        parcels, deployment, _computed_s(deployment.step_time_s, steps, schedule.inner_steps if dynamic else None)
    )
    run.act(schedule, after=0, until=measure_from)
    warm_up = run.measured(measure_from)
    run.act(schedule, after=measure_from, until=steps)
    return _without(warm_up, run.measured(steps))


def _without(warm_up: Simulated, whole: Simulated) -> Simulated:
    """Return what was measured after the warm-up, in the rest of the ``whole`` run."""
    return Simulated(
        steps=whole.steps - warm_up.steps,
        compute_s=whole.compute_s - warm_up.compute_s,
        waited_s=whole.waited_s - warm_up.waited_s,
        spent_s=whole.spent_s - warm_up.spent_s,
        sent_bytes=whole.sent_bytes - warm_up.sent_bytes,
        merged=whole.merged[len(warm_up.merged) :],
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
