"""Where a run takes place: the replicas' links and speeds, and the steps that late replicas leave out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diloco.algorithm.pace import steps_to_train, trains_at
from diloco.algorithm.schedule import Send
from diloco.errors import ConfigurationError
from diloco.membership.grace import SHARE, Grace
from diloco.membership.quorum import more_than_could_lie
from diloco.simulate.overheads import IDEAL, Overheads
from diloco.simulate.traffic import Parcel, Traffic
from diloco.transport.links import Link, LinkArrays

__all__ = ["Cluster", "LateSteps"]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Replicas, their links and their speeds. Arrays may have scenarios in front: ``(..., M)``."""

    bandwidth_bits_per_s: NDArray[np.float64]  # each way
    latency_s: NDArray[np.float64]  # one way
    step_time_s: NDArray[np.float64]  # compute time of one inner step, ``(M,)``
    half_duplex: NDArray[np.bool_]  # ``(M,)``: sending and receiving take turns
    # standard deviation of a step's time over its mean; step times are drawn independently from a gamma distribution
    # with the mean ``step_time_s``, by ``seed``
    jitter: float = 0.0
    seed: int = 0  # of the jitter
    # H, where replicas slower than the fastest leave out steps (DyLU); None: all take every step
    dynamic_of: int | None = None
    # whether replicas that are late leave out steps for which the others would wait, as with ``swarm.straggler =
    # "grace"``
    grace: bool = False
    overheads: Overheads = IDEAL  # what a run spends beside that

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
        """One link and one step time per replica; one step time for all is enough.

        Raises:
            ConfigurationError: unless there is a link and a time above 0 for each replica.
        """
        times = [step_time_s] * len(links) if isinstance(step_time_s, int | float) else list(step_time_s)
        if len(times) != len(links) or not links or not all(0 < each < math.inf for each in times):
            raise ConfigurationError(
                f"{len(links)} links do not fit step times {times}: a cluster needs one of each per replica, and times "
                "above 0 s."
            )
        if not 0 <= jitter < math.inf:
            raise ConfigurationError(f"the jitter must be 0 or more, not {jitter}.")
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
            links: of those that take part, as payload sees them; a lone replica waits for nobody.
        """
        if links.latency_s.shape[-1] == 1:
            return np.zeros(1)
        round_trip_s, tcp = 2 * links.latency_s.max(-1, keepdims=True), self.overheads.tcp
        rates = links.bandwidth_bits_per_s
        # no longer than its payload takes: what does not fill the link makes no queue
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
        """How many of ``dynamic_of`` scheduled steps (of one, where that is None) each replica trains.

        >>> from diloco.transport.links import Link
        >>> Cluster.of([Link(1e9)] * 3, [1.0, 2.0, 3.0], dynamic_of=10).trained_steps
        (10, 5, 3)
        """
        if self.dynamic_of is None:
            return (1,) * self.num_replicas
        speeds = {replica: 1 / float(time_s) for replica, time_s in enumerate(self.step_time_s)}
        return tuple(steps_to_train(replica, speeds, self.dynamic_of) for replica in speeds)

    def computed_s(self, steps: int) -> NDArray[np.float64]:
        """Compute time of the first so many steps, by step and replica, ``(steps + 1, M)``; no schedule changes it, but
        for steps that are left out as there is no more time for them (`grace`)."""
        if self.jitter < 1e-6:  # too little to tell two steps apart, and the draw itself would overflow
            if self.dynamic_of is None:
                return np.arange(steps + 1)[:, None] * self.step_time_s
            lasting = self._trained(steps) * self.step_time_s
        else:
            shape = 1 / self.jitter**2
            drawn = np.random.default_rng(self.seed).gamma(shape, 1 / shape, (steps, self.num_replicas))
            lasting = drawn * self.step_time_s * self._trained(steps)
        return np.concatenate([np.zeros((1, self.num_replicas)), np.cumsum(lasting, axis=0)])

    def _trained(self, steps: int) -> NDArray[np.float64]:
        """1, or 0 where a replica leaves the step out, ``(steps, M)`` or what broadcasts to it."""
        if self.dynamic_of is None:
            return np.ones((1, 1))
        rows = [[trains_at(step, k, self.dynamic_of) for k in self.trained_steps] for step in range(self.dynamic_of)]
        return np.resize(np.array(rows, dtype=np.float64), (steps, self.num_replicas))


Floats = NDArray[np.float64]


class LateSteps:
    """Goes from one step in which something is sent or merged to the next.

    The rule is that of `diloco.membership.grace`. What it is told comes a latency later; speeds are the clusters' own.
    Before a step that sends, a replica leaves out steps since the last one that sent or merged, and no earlier ones.

    Args:
        computed_s: compute time of the first so many steps, ``(steps + 1, M)``.
        shape: of the results, ``(..., M)``.
    """

    def __init__(self, cluster: Cluster, traffic: Traffic, computed_s: Floats, shape: tuple[int, ...]) -> None:
        self.reached = 0  # the step up to which all is decided
        self.trained_last = np.ones(shape, dtype=np.bool_)  # whether that step was trained, ``(..., M)``
        self._cluster = cluster
        self._schedule = traffic.schedule
        self._computed_s = computed_s
        self._shape = shape
        self._sync_s: dict[int, Floats] = {}  # by fragment, ``(..., 1)``

    def until(self, step: int, now_s: Floats) -> tuple[Floats, Floats]:
        """The steps up to ``step`` pass.

        Args:
            step: that sends or merges, or the last one.
            now_s: the clocks after step `reached`, ``(..., M)``, like the results.

        Returns:
            Compute time that is saved, and how many steps are left out.
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
        """A round of ``fragment`` was committed so long after each replica sent, ``(..., M)``."""
        sync_s = took_s.min(-1, keepdims=True)
        self._sync_s[fragment] = Grace.KEPT * self._sync_s.get(fragment, sync_s) + (1 - Grace.KEPT) * sync_s

    def _due_s(self, fragment: int, ready_s: Floats) -> tuple[Floats, Floats]:
        """When each replica hears of a quorum, and when its own contribution is due.

        Args:
            fragment: that is sent.
            ready_s: when each would send if it left out nothing. No step of the first ones is left out, so theirs hold.
        """
        quorum = more_than_could_lie(self._shape[-1])
        quorum_s = np.partition(ready_s, quorum - 1, axis=-1)[..., quorum - 1 : quorum]
        lasts_until_s = ready_s + self._schedule.overlap_steps * self._cluster.step_time_s
        first_s = lasts_until_s.min(-1, keepdims=True)
        left_s = first_s - quorum_s - self._sync_s.get(fragment, np.zeros(1))
        heard_s = quorum_s + self._cluster.latency_s
        return heard_s, np.maximum(heard_s, quorum_s + SHARE * np.maximum(0.0, left_s))
