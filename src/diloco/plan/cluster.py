"""The links and speeds of the replicas in a simulation, and what real runs spend besides: TCP, queues and work.

The constants and the errors of predictions with them are results of benchmarks/simulator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.algorithm import steps_to_train, trains_at
from diloco.errors import ConfigurationError
from diloco.plan.tcp import KEEPING_THEIR_RATE, CongestionControl, Tcp
from diloco.plan.traffic import Parcel
from diloco.transport import Link, LinkArrays, streams_to_each

Floats = NDArray[np.float64]

P90_QUEUE_TRIPS = 4.0  # about one round in ten loses more round trips in queues
P90_WORK = 1.25  # factor for the work at p90

ACCURACY = (
    "median error 4% of the time of a round (largest 94%) and 0.1% of the whole time (largest 14%), in 26 runs on a CPU"
)
"""The errors of predictions, in words."""


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """The time that a run spends apart from computing and transferring bits at the link's rate.

    The defaults are the ideal of the papers and of the virtual clock: no overhead.
    """

    tcp: Tcp | None = None  # TCP of the connections; None: payload has the full rate from the start
    # round trips lost in queues while the payload fills the link; a smaller payload loses a part of them
    queue_trips: float = 0.0
    # time per value that a round takes for decoding, summing and hashing, while training continues
    average_s_per_value: float = 0.0
    # time per value that a send blocks the training loop: pseudo-gradient and encoding
    send_s_per_value: float = 0.0
    # time per value that a merge blocks the training loop: outer step and merge
    merge_s_per_value: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions under which replicas exchange contributions. The defaults are measured on a CPU."""

    congestion_control: CongestionControl = "cubic"  # TCP congestion control of the senders
    loss: float = 0.0  # share of packets that are lost
    average_s_per_value: float = 1.5e-9  # these three as in `Overheads`
    send_s_per_value: float = 2.5e-9
    merge_s_per_value: float = 1.9e-9

    @property
    def measures_uplinks(self) -> bool:
        """Whether replicas learn how fast they can send, so that slow ones sum less."""
        return self.congestion_control in KEEPING_THEIR_RATE

    def overheads(self, others: int, *, p90: bool = False) -> Overheads:
        """Return the overheads of a run under these conditions.

        Args:
            others: number of replicas to which a replica sends.
            p90: return values that one round in ten exceeds, instead of every other round.
        """
        slower = P90_WORK if p90 else 1.0
        connections = max(1, others) * streams_to_each(others)
        return Overheads(
            tcp=Tcp(congestion_control=self.congestion_control, loss=self.loss, connections=connections),
            queue_trips=P90_QUEUE_TRIPS if p90 else 0.0,
            average_s_per_value=slower * self.average_s_per_value,
            send_s_per_value=slower * self.send_s_per_value,
            merge_s_per_value=slower * self.merge_s_per_value,
        )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Replicas, their links and their speeds. Arrays may have leading scenario dimensions: ``(..., M)``."""

    bandwidth_bits_per_s: Floats  # in each direction
    latency_s: Floats  # one-way latency
    step_time_s: Floats  # compute time of one inner step, ``(M,)``
    # H, if replicas slower than the fastest skip steps (DyLU); None: every replica trains every step
    dynamic_of: int | None = None
    overheads: Overheads = Overheads()

    @classmethod
    def of(cls, links: Sequence[Link], step_time_s: float | Sequence[float], **more: Any) -> Cluster:
        """Return a cluster with one link per replica, and one step time per replica or one for all.

        Args:
            more: the other fields.

        Raises:
            ConfigurationError: unless each replica has a link and a step time above 0.
        """
        times = [step_time_s] * len(links) if isinstance(step_time_s, int | float) else list(step_time_s)
        if len(times) != len(links) or not links or not all(0 < each < math.inf for each in times):
            raise ConfigurationError(
                f"a cluster needs one link and one step time above 0 s per replica, got {len(links)} links and the "
                f"step times {times}."
            )
        rates, latencies = zip(*((link.bandwidth_bits_per_s, link.latency_s) for link in links), strict=True)
        return cls(
            bandwidth_bits_per_s=np.array(rates), latency_s=np.array(latencies), step_time_s=np.array(times), **more
        )

    @property
    def links(self) -> LinkArrays:
        """The links with the bandwidth that TCP uses of them."""
        rates, tcp = self.bandwidth_bits_per_s, self.overheads.tcp
        if tcp is not None:
            rates = tcp.carried_bits_per_s(rates, 2 * self.latency_s)
        return LinkArrays(rates, self.latency_s)

    def overhead_s(self, parcel: Parcel, links: LinkArrays) -> Floats:
        """Return the time that a round takes in addition to the transfer of its payload and a vote, ``(..., 1)``.

        Args:
            parcel: the payload of the round.
            links: the links of the participants, as returned by `links`. A lone replica has no overhead.
        """
        if links.latency_s.shape[-1] == 1:
            return np.zeros(1)
        round_trip_s, tcp = 2 * links.latency_s.max(-1, keepdims=True), self.overheads.tcp
        rates = links.bandwidth_bits_per_s
        # at most the transfer time of the payload: a payload that does not fill the link builds no queue
        filling_s = np.minimum(round_trip_s, 8 * parcel.sent_bytes / rates).max(-1, keepdims=True)
        overhead_s: Floats = self.overheads.queue_trips * filling_s
        overhead_s = overhead_s + self.overheads.average_s_per_value * parcel.numel
        if tcp is not None:
            overhead_s = overhead_s + tcp.start_s(parcel.sent_bytes, rates, round_trip_s).max(-1, keepdims=True)
        return overhead_s

    def computed_s(self, steps: int) -> Floats:
        """Return the compute time of the first 0, 1, ..., ``steps`` steps of each replica, ``(steps + 1, M)``."""
        times_s, cycle = self.step_time_s, self.dynamic_of
        if cycle is None:
            computed_s: Floats = np.arange(steps + 1)[:, None] * times_s
            return computed_s
        speeds = {replica: 1 / float(time_s) for replica, time_s in enumerate(times_s)}
        numbers = [steps_to_train(replica, speeds, cycle) for replica in speeds]
        trained = [[trains_at(step % cycle, number, cycle) for number in numbers] for step in range(steps)]
        return np.concatenate([np.zeros((1, len(times_s))), np.cumsum(np.array(trained) * times_s, axis=0)])
