"""Where a run takes place: links, speeds, and what real machines spend beside computing and sending."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from diloco.algorithm.pace import steps_to_train, trains_at
from diloco.errors import ConfigurationError
from diloco.simulate.tcp import Tcp
from diloco.simulate.traffic import Parcel
from diloco.transport.links import Link, LinkArrays

__all__ = ["IDEAL", "Cluster", "Overheads"]


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """What a run spends that is neither computing nor bits at the link's rate; all neutral: the ideal of the papers.

    Attributes:
        goodput: share of what connections get of a link that is payload; the rest are headers and what is sent again.
        round_trips: trips there and back that a round takes beside its payload's way and one vote, such as for the word
            that there is room for it.
        queue_trips: and those it takes for what is lost in queues, where its payload fills the way; of them the part
            that it fills.
        tcp: what its connections make of a link; None: payload has it from the first moment on.
        average_s_per_value: time that a round takes for decoding, summing and hashing, per value; training goes on.
        send_s_per_value: time that the training loop stands still at a send, per value: pseudo-gradient, encoding.
        merge_s_per_value: and at a merge: outer step, merge.
        pause_s: and at each of them whatever the size.
    """

    goodput: float = 1.0
    round_trips: float = 0.0
    queue_trips: float = 0.0
    tcp: Tcp | None = None
    average_s_per_value: float = 0.0
    send_s_per_value: float = 0.0
    merge_s_per_value: float = 0.0
    pause_s: float = 0.0

    def __post_init__(self) -> None:
        work = (self.average_s_per_value, self.send_s_per_value, self.merge_s_per_value)
        others = (self.round_trips, self.queue_trips, *work, self.pause_s)
        if not 0 < self.goodput <= 1 or not all(0 <= value < math.inf for value in others):
            raise ConfigurationError(
                f"{self} was given; a goodput above 0 and up to 1, and all else 0 or more, would work. "
                "Nothing was computed."
            )


IDEAL = Overheads()


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Replicas, their links and their speeds. Arrays may have scenarios in front: ``(..., M)``.

    Attributes:
        bandwidth_bits_per_s: each way.
        latency_s: one way.
        step_time_s: compute time of one inner step, ``(M,)``.
        half_duplex: ``(M,)``: sending and receiving take turns.
        jitter: standard deviation of a step's time as a part of it; steps are drawn from a gamma distribution with the
            mean ``step_time_s``, independently, by ``seed``.
        seed: of the jitter.
        dynamic_of: H, where a replica slower than the fastest leaves out steps (DyLU); None: all take every step.
        overheads: beside that.
    """

    bandwidth_bits_per_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    step_time_s: NDArray[np.float64]
    half_duplex: NDArray[np.bool_]
    jitter: float = 0.0
    seed: int = 0
    dynamic_of: int | None = None
    overheads: Overheads = field(default_factory=Overheads)

    @classmethod
    def of(
        cls,
        links: Sequence[Link],
        step_time_s: float | Sequence[float],
        *,
        jitter: float = 0.0,
        seed: int = 0,
        dynamic_of: int | None = None,
        overheads: Overheads = IDEAL,
    ) -> Cluster:
        """One link and one step time per replica; one step time for all is enough.

        Raises:
            ConfigurationError: for numbers that are none, or not one per replica.
        """
        times = [step_time_s] * len(links) if isinstance(step_time_s, int | float) else list(step_time_s)
        if len(times) != len(links) or not links or not all(0 < each < math.inf for each in times):
            raise ConfigurationError(
                f"{len(links)} links and step times {times} were given; one of each per replica, and times above 0 s, "
                "would work. Nothing was computed."
            )
        if not 0 <= jitter < math.inf:
            raise ConfigurationError(f"a jitter of {jitter} was given; 0 or more would work. Nothing was computed.")
        arrays = LinkArrays.of(links)
        return cls(
            bandwidth_bits_per_s=arrays.bandwidth_bits_per_s,
            latency_s=arrays.latency_s,
            step_time_s=np.array(times),
            half_duplex=arrays.half_duplex,
            jitter=jitter,
            seed=seed,
            dynamic_of=dynamic_of,
            overheads=overheads,
        )

    @property
    def num_replicas(self) -> int:
        """M."""
        return int(self.step_time_s.shape[-1])

    @property
    def links(self) -> LinkArrays:
        """The links as payload sees them."""
        rates, tcp = self.bandwidth_bits_per_s, self.overheads.tcp
        if tcp is not None:
            rates = tcp.carried_bits_per_s(rates, 2 * self.latency_s)
        return LinkArrays(self.overheads.goodput * rates, self.latency_s, self.half_duplex)

    def beside_s(self, parcel: Parcel, links: LinkArrays) -> NDArray[np.float64]:
        """How much longer a round takes than its payload and a vote are on their way, ``(..., 1)``.

        Args:
            parcel: what is sent.
            links: of those that take part, as payload sees them; nobody waits for anything where it is one.
        """
        if links.latency_s.shape[-1] == 1:
            return np.zeros(1)
        round_trip_s, tcp = 2 * links.latency_s.max(-1, keepdims=True), self.overheads.tcp
        rates = links.bandwidth_bits_per_s
        # as long as its payload takes, and not longer: what does not fill the way makes no queue
        filling_s = np.minimum(round_trip_s, 8 * parcel.sent_bytes / rates).max(-1, keepdims=True)
        beside_s: NDArray[np.float64] = self.overheads.round_trips * round_trip_s
        beside_s = beside_s + self.overheads.queue_trips * filling_s
        beside_s = beside_s + self.overheads.average_s_per_value * parcel.numel
        if tcp is not None:
            start_s = tcp.start_s(parcel.sent_bytes, rates, round_trip_s)
            beside_s = beside_s + start_s.max(-1, keepdims=True)
        return beside_s

    @property
    def trained_steps(self) -> tuple[int, ...]:
        """Of every ``dynamic_of`` scheduled steps (of every one, where that is None), how many each replica trains.

        >>> from diloco.transport.links import Link
        >>> Cluster.of([Link(1e9)] * 3, [1.0, 2.0, 3.0], dynamic_of=10).trained_steps
        (10, 5, 3)
        """
        if self.dynamic_of is None:
            return (1,) * self.num_replicas
        speeds = {replica: 1 / float(time_s) for replica, time_s in enumerate(self.step_time_s)}
        return tuple(steps_to_train(replica, speeds, self.dynamic_of) for replica in speeds)

    def computed_s(self, steps: int) -> NDArray[np.float64]:
        """By step and replica, ``(steps + 1, M)``: compute time of the first so many steps. No schedule changes it."""
        if self.jitter < 1e-6:  # less than a step can be told from another by, and the draw itself would overflow
            if self.dynamic_of is None:
                return np.arange(steps + 1)[:, None] * self.step_time_s
            lasting = self._trained(steps) * self.step_time_s
        else:
            shape = 1 / self.jitter**2
            drawn = np.random.default_rng(self.seed).gamma(shape, 1 / shape, (steps, self.num_replicas))
            lasting = drawn * self.step_time_s * self._trained(steps)
        return np.concatenate([np.zeros((1, self.num_replicas)), np.cumsum(lasting, axis=0)])

    def _trained(self, steps: int) -> NDArray[np.float64]:
        """By step and replica, ``(steps, M)`` or what broadcasts to it: 1, or 0 where it is left out."""
        if self.dynamic_of is None:
            return np.ones((1, 1))
        rows = [[trains_at(step, k, self.dynamic_of) for k in self.trained_steps] for step in range(self.dynamic_of)]
        return np.resize(np.array(rows, dtype=np.float64), (steps, self.num_replicas))
