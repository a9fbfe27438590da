"""The links and speeds of the replicas in a simulation, and the inner steps that late replicas skip."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diloco.algorithm import Send, steps_to_train, trains_at
from diloco.errors import ConfigurationError
from diloco.membership import SHARE, Grace, byzantine_quorum
from diloco.simulate.overheads import IDEAL, Overheads
from diloco.simulate.traffic import Parcel, Traffic
from diloco.transport import Link, LinkArrays

__all__ = ["Cluster", "LateSteps"]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Replicas, their links and their speeds. Arrays may have leading scenario dimensions: ``(..., M)``."""

    bandwidth_bits_per_s: NDArray[np.float64]  # in each direction
    latency_s: NDArray[np.float64]  # one-way latency
    step_time_s: NDArray[np.float64]  # compute time of one inner step, ``(M,)``
    half_duplex: NDArray[np.bool_]  # whether a link can't send and receive at once, ``(M,)``
    # standard deviation of a step's time relative to its mean; step times are drawn independently from a gamma
    # distribution with the mean ``step_time_s``
    jitter: float = 0.0
    seed: int = 0  # random seed of the jitter
    # H, if replicas slower than the fastest skip steps (DyLU); None: every replica trains every step
    dynamic_of: int | None = None
    # whether late replicas skip the steps for which the others would wait, as with ``network.straggler = "grace"``
    grace: bool = False
    overheads: Overheads = IDEAL  # overheads of the run

    @classmethod
    def of(
        cls,
        links: Sequence[Link],
        step_time_s: float | Sequence[float],
        *,
        jitter: float = 0.0,
        seed: int = 0,
        dynamic_of: int | None = None,
        grace: bool = False,
        overheads: Overheads = IDEAL,
    ) -> Cluster:
        """Return a cluster with one link per replica, and one step time per replica or one for all.

        Raises:
            ConfigurationError: unless each replica has a link and a step time above 0, and the jitter is 0 or more.
        """
        times = [step_time_s] * len(links) if isinstance(step_time_s, int | float) else list(step_time_s)
        if len(times) != len(links) or not links or not all(0 < each < math.inf for each in times):
            raise ConfigurationError(
                f"a cluster needs one link and one step time above 0 s per replica, got {len(links)} links and the "
                f"step times {times}."
            )
        if not 0 <= jitter < math.inf:
            raise ConfigurationError(f"the jitter must be at least 0, got {jitter}.")
        arrays = LinkArrays.of(links)
        return cls(
            bandwidth_bits_per_s=arrays.bandwidth_bits_per_s,
            latency_s=arrays.latency_s,
            step_time_s=np.array(times),
            half_duplex=arrays.half_duplex,
            jitter=jitter,
            seed=seed,
            dynamic_of=dynamic_of,
            grace=grace,
            overheads=overheads,
        )

    @property
    def num_replicas(self) -> int:
        """The number of replicas (M)."""
        return int(self.step_time_s.shape[-1])

    @property
    def links(self) -> LinkArrays:
        """The links with the bandwidth that is left for payload."""
        rates, tcp = self.bandwidth_bits_per_s, self.overheads.tcp
        if tcp is not None:
            rates = tcp.carried_bits_per_s(rates, 2 * self.latency_s)
        return LinkArrays(self.overheads.goodput * rates, self.latency_s, self.half_duplex)

    def overhead_s(self, parcel: Parcel, links: LinkArrays) -> NDArray[np.float64]:
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
        overhead_s: NDArray[np.float64] = self.overheads.round_trips * round_trip_s
        overhead_s = overhead_s + self.overheads.queue_trips * filling_s
        overhead_s = overhead_s + self.overheads.average_s_per_value * parcel.numel
        if tcp is not None:
            start_s = tcp.start_s(parcel.sent_bytes, rates, round_trip_s)
            overhead_s = overhead_s + start_s.max(-1, keepdims=True)
        return overhead_s

    @property
    def trained_steps(self) -> tuple[int, ...]:
        """The number of steps that each replica trains, of ``dynamic_of`` scheduled steps (of one if that is None).

        >>> from diloco.transport.links import Link
        >>> Cluster.of([Link(1e9)] * 3, [1.0, 2.0, 3.0], dynamic_of=10).trained_steps
        (10, 5, 3)
        """
        if self.dynamic_of is None:
            return (1,) * self.num_replicas
        speeds = {replica: 1 / float(time_s) for replica, time_s in enumerate(self.step_time_s)}
        return tuple(steps_to_train(replica, speeds, self.dynamic_of) for replica in speeds)

    def computed_s(self, steps: int) -> NDArray[np.float64]:
        """Return the compute time of the first 0, 1, ..., ``steps`` steps of each replica, ``(steps + 1, M)``.

        It does not depend on the schedule, and does not account for the steps that `grace` skips.
        """
        if self.jitter < 1e-6:  # too small to make a difference, and the draw would overflow
            if self.dynamic_of is None:
                return np.arange(steps + 1)[:, None] * self.step_time_s
            lasting = self._trained(steps) * self.step_time_s
        else:
            shape = 1 / self.jitter**2
            drawn = np.random.default_rng(self.seed).gamma(shape, 1 / shape, (steps, self.num_replicas))
            lasting = drawn * self.step_time_s * self._trained(steps)
        return np.concatenate([np.zeros((1, self.num_replicas)), np.cumsum(lasting, axis=0)])

    def _trained(self, steps: int) -> NDArray[np.float64]:
        """Return 1 for each step that a replica trains and 0 for each other one, broadcastable to ``(steps, M)``."""
        if self.dynamic_of is None:
            return np.ones((1, 1))
        rows = [[trains_at(step, k, self.dynamic_of) for k in self.trained_steps] for step in range(self.dynamic_of)]
        return np.resize(np.array(rows, dtype=np.float64), (steps, self.num_replicas))


Floats = NDArray[np.float64]


class LateSteps:
    """The steps that late replicas skip, decided from one step that sends or merges to the next.

    The rule is that of `diloco.membership.grace`. Reports of other replicas arrive one latency later, and speeds are
    those of the cluster. Before a step that sends, a replica may skip only the steps since the last one that sent or
    merged.

    Args:
        computed_s: the result of `Cluster.computed_s`, ``(steps + 1, M)``.
        shape: the shape of the results, ``(..., M)``.
    """

    def __init__(self, cluster: Cluster, traffic: Traffic, computed_s: Floats, shape: tuple[int, ...]) -> None:
        self.reached = 0  # the last step that is decided
        self.trained_last = np.ones(shape, dtype=np.bool_)  # whether that step is trained, ``(..., M)``
        self._cluster = cluster
        self._schedule = traffic.schedule
        self._computed_s = computed_s
        self._shape = shape
        self._sync_s: dict[int, Floats] = {}  # by fragment, ``(..., 1)``

    def until(self, step: int, now_s: Floats) -> tuple[Floats, Floats]:
        """Decide the steps up to ``step``.

        Args:
            step: the next step that sends or merges, or the last step.
            now_s: the clocks after step `reached`, ``(..., M)``.

        Returns:
            The compute time that is saved and the number of steps that are skipped, each ``(..., M)``.
        """
        window, self.reached = range(self.reached + 1, step + 1), step
        saved_s, left_out = np.zeros(self._shape), np.zeros(self._shape)
        sent = [action.fragment for action in self._schedule.actions(step) if isinstance(action, Send)]
        self.trained_last = np.ones(self._shape, dtype=np.bool_)
        if not sent or self._shape[-1] == 1 or not window:
            return saved_s, left_out
        heard_s, due_s = self._due_s(sent[0], now_s + self._computed_s[step] - self._computed_s[window[0] - 1])
        for each in window:
            lasts_s = self._computed_s[each] - self._computed_s[each - 1]
            began_s = now_s + self._computed_s[each - 1] - self._computed_s[window[0] - 1] - saved_s
            self.trained_last = (began_s < heard_s) | (began_s + self._cluster.step_time_s <= due_s)
            left_out = left_out + (~self.trained_last & (lasts_s > 0))
            saved_s = saved_s + np.where(self.trained_last, 0.0, lasts_s)
        return saved_s, left_out

    def learn(self, fragment: int, took_s: Floats) -> None:
        """Record the time from each replica's sending to the commit of a round of ``fragment``, ``(..., M)``."""
        sync_s = took_s.min(-1, keepdims=True)
        self._sync_s[fragment] = Grace.KEPT * self._sync_s.get(fragment, sync_s) + (1 - Grace.KEPT) * sync_s

    def _due_s(self, fragment: int, ready_s: Floats) -> tuple[Floats, Floats]:
        """Return when each replica learns that a quorum has sent, and when its own contribution is due.

        Args:
            fragment: the fragment that is sent.
            ready_s: when each replica would send if it skipped no step. The first replicas skip none, so their times
                are final.
        """
        quorum = byzantine_quorum(self._shape[-1])
        quorum_s = np.partition(ready_s, quorum - 1, axis=-1)[..., quorum - 1 : quorum]
        lasts_until_s = ready_s + self._schedule.overlap_steps * self._cluster.step_time_s
        first_s = lasts_until_s.min(-1, keepdims=True)
        left_s = first_s - quorum_s - self._sync_s.get(fragment, np.zeros(1))
        heard_s = quorum_s + self._cluster.latency_s
        return heard_s, np.maximum(heard_s, quorum_s + SHARE * np.maximum(0.0, left_s))
