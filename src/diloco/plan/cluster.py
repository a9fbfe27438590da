"""The links and speeds of the replicas in a simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diloco.algorithm import steps_to_train, trains_at
from diloco.errors import ConfigurationError
from diloco.plan.overheads import IDEAL, Overheads
from diloco.plan.traffic import Parcel
from diloco.transport import Link, LinkArrays

__all__ = ["Cluster"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Replicas, their links and their speeds. Arrays may have leading scenario dimensions: ``(..., M)``."""

    bandwidth_bits_per_s: Floats  # in each direction
    latency_s: Floats  # one-way latency
    step_time_s: Floats  # compute time of one inner step, ``(M,)``
    # H, if replicas slower than the fastest skip steps (DyLU); None: every replica trains every step
    dynamic_of: int | None = None
    overheads: Overheads = IDEAL

    @classmethod
    def of(
        cls,
        links: Sequence[Link],
        step_time_s: float | Sequence[float],
        *,
        dynamic_of: int | None = None,
        overheads: Overheads = IDEAL,
    ) -> Cluster:
        """Return a cluster with one link per replica, and one step time per replica or one for all.

        Raises:
            ConfigurationError: unless each replica has a link and a step time above 0.
        """
        times = [step_time_s] * len(links) if isinstance(step_time_s, int | float) else list(step_time_s)
        if len(times) != len(links) or not links or not all(0 < each < math.inf for each in times):
            raise ConfigurationError(
                f"a cluster needs one link and one step time above 0 s per replica, got {len(links)} links and the "
                f"step times {times}."
            )
        return cls(
            bandwidth_bits_per_s=np.array([link.bandwidth_bits_per_s for link in links]),
            latency_s=np.array([link.latency_s for link in links]),
            step_time_s=np.array(times),
            dynamic_of=dynamic_of,
            overheads=overheads,
        )

    @property
    def num_replicas(self) -> int:
        """The number of replicas (M)."""
        return int(self.step_time_s.shape[-1])

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
            start_s = tcp.start_s(parcel.sent_bytes, rates, round_trip_s)
            overhead_s = overhead_s + start_s.max(-1, keepdims=True)
        return overhead_s

    @property
    def trained_steps(self) -> tuple[int, ...]:
        """The number of steps that each replica trains, of ``dynamic_of`` scheduled steps (of one if that is None).

        >>> from diloco.transport import Link
        >>> Cluster.of([Link(1e9)] * 3, [1.0, 2.0, 3.0], dynamic_of=10).trained_steps
        (10, 5, 3)
        """
        if self.dynamic_of is None:
            return (1,) * self.num_replicas
        speeds = {replica: 1 / float(time_s) for replica, time_s in enumerate(self.step_time_s)}
        return tuple(steps_to_train(replica, speeds, self.dynamic_of) for replica in speeds)

    def computed_s(self, steps: int) -> Floats:
        """Return the compute time of the first 0, 1, ..., ``steps`` steps of each replica, ``(steps + 1, M)``."""
        if self.dynamic_of is None:
            computed_s: Floats = np.arange(steps + 1)[:, None] * self.step_time_s
            return computed_s
        cycle = [[trains_at(step, k, self.dynamic_of) for k in self.trained_steps] for step in range(self.dynamic_of)]
        trained = np.resize(np.array(cycle, dtype=np.float64), (steps, self.num_replicas))
        return np.concatenate([np.zeros((1, self.num_replicas)), np.cumsum(trained * self.step_time_s, axis=0)])
