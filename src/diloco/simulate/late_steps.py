"""The steps that late replicas leave out (``swarm.straggler = "grace"``), of all scenarios at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from diloco.algorithm.schedule import Send
from diloco.membership.grace import SHARE, Grace
from diloco.membership.quorum import more_than_could_lie
from diloco.simulate.cluster import Cluster
from diloco.simulate.traffic import Traffic

__all__ = ["LateSteps"]

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
        """When each replica hears of a quorum, and when its own contribution has to be there.

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
