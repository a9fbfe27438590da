"""The grace period for a straggler (Decoupled DiLoCo): others wait for it only as long as their overlap lasts.

`grace = SHARE * (tau * step_s - quorum_s - sync_s)` after a quorum has contributed. A replica that can finish its steps
by then does so. One that can't leaves out those that don't fit and contributes what it has trained, with the weight of
that work.

Every replica decides only for itself, based on when it received the others' contributions. The consequence is the
weight in its header, so every replica judges and votes on the same facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from diloco.membership.quorum import byzantine_quorum

__all__ = ["SHARE", "Grace", "due_s"]

# the granted part of the remaining time; the rest is a margin for steps and exchanges that take longer than average
SHARE = 0.9


def due_s(
    heard_s: Mapping[int, float], steps_per_s: Mapping[int, float], *, quorum: int, overlap_steps: int, sync_s: float
) -> float | None:
    """Return when a contribution is due so that no replica has to stall for it.

    This is never before a quorum has contributed. Replicas report their own speeds, so a false report can shorten the
    others' time, but can't hurry a replica that is ahead of the quorum.

    Args:
        heard_s: replica -> when its contribution to the round was received, without this replica's own.
        steps_per_s: replica -> its inner steps per second, if it has reported them.
        quorum: how many replicas must have contributed.
        overlap_steps: tau, the steps that each of them trains before it needs the average.
        sync_s: how long a round takes from its last contribution on.

    Returns:
        A time on the clock of ``heard_s``, or None if no replica is known to be waiting yet.

    >>> speeds = {1: 2.0, 2: 2.0, 3: 1.0}
    >>> due_s({1: 100.0}, speeds, quorum=2, overlap_steps=4, sync_s=0.5) is None
    True
    >>> due_s({1: 100.0, 2: 100.5}, speeds, quorum=2, overlap_steps=4, sync_s=0.5)   # 100.5 + 0.9 (2 - 0.5 - 0.5)
    101.4
    >>> due_s({1: 100.0, 2: 109.0}, speeds, quorum=2, overlap_steps=4, sync_s=0.5)   # replica 1 waits for 2 already
    109.0
    """
    lasts_until_s = [at_s + overlap_steps / steps_per_s[one] for one, at_s in heard_s.items() if one in steps_per_s]
    if len(heard_s) < quorum or not lasts_until_s:
        return None
    quorum_at_s = sorted(heard_s.values())[quorum - 1]
    return quorum_at_s + max(0.0, SHARE * (min(lasts_until_s) - quorum_at_s - sync_s))


class Grace:
    """The grace period of one replica, with the exchange times that it has measured for each fragment.

    >>> grace = Grace(0)
    >>> grace.learn(0, took_s=3.0, late_s={0: 0.5, 1: 0.0, 2: 2.5})   # 1 s after the last of them
    >>> grace.due_s({(0, 7): {1: 100.0, 2: 100.5}}, {1: 2.0}, members=3, overlap_steps=4)
    100.95
    """

    KEPT: ClassVar[float] = 0.9  # decay of the moving average per round: about the last ten rounds count

    def __init__(self, replica: int) -> None:
        self._replica = replica
        self._sync_s: dict[int, float] = {}

    def learn(self, fragment: int, *, took_s: float, late_s: Mapping[int, float]) -> None:
        """Record a committed round.

        Args:
            took_s: from this replica's contribution to the commit.
            late_s: contributor -> how long after the first one its contribution was received.
        """
        if self._replica in late_s:
            sync_s = max(0.0, took_s - (max(late_s.values()) - late_s[self._replica]))
            self._sync_s[fragment] = self.KEPT * self._sync_s.get(fragment, sync_s) + (1 - self.KEPT) * sync_s

    def due_s(
        self,
        waiting: Mapping[tuple[int, int], Mapping[int, float]],
        steps_per_s: Mapping[int, float],
        *,
        members: int,
        overlap_steps: int,
    ) -> float | None:
        """Return when the first of the rounds is due to which others have contributed and this replica has not.

        Args:
            waiting: (fragment, outer step) -> contributor -> when its contribution was received.
            members: the number of members in the view. The quorum is `byzantine_quorum` of them.

        Returns:
            A time on the clock of ``waiting``, or None if no replica is known to be waiting yet.
        """
        quorum = byzantine_quorum(members)
        dues_s = [
            due_s(
                heard_s,
                steps_per_s,
                quorum=quorum,
                overlap_steps=overlap_steps,
                sync_s=self._sync_s.get(fragment, 0.0),
            )
            for (fragment, _), heard_s in waiting.items()
        ]
        return min((each for each in dues_s if each is not None), default=None)
