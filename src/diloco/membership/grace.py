"""Until when a straggler is waited for: as long as the overlap of those ahead lasts, and no longer (Decoupled DiLoCo).

`grace = SHARE * (tau * step_s - quorum_s - sync_s)` after a quorum has contributed. Whoever can finish its steps by
then does. Whoever can't leaves out those that don't fit and contributes what it has trained, which weighs by that.

Every replica decides about itself alone, from when it heard of the others' contributions. What follows from it is in
the weight that its header tells, so it is the same for all who judge and vote on the round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from diloco.membership.quorum import more_than_could_lie

__all__ = ["SHARE", "Grace", "due_s"]

SHARE = 0.9  # of the time that is left; the rest is for steps and exchanges that take longer than they did on average


def due_s(
    heard_s: Mapping[int, float], steps_per_s: Mapping[int, float], *, quorum: int, overlap_steps: int, sync_s: float
) -> float | None:
    """When a contribution has to be there, so that nobody stands still for it.

    Never before a quorum has contributed: replicas say themselves how fast they are, and one that lies may shorten the
    time that others are given, but hurry nobody who is ahead of the quorum.

    Args:
        heard_s: replica -> when its contribution to the round was heard of, without one's own.
        steps_per_s: replica -> its inner steps per second, where it has told them.
        quorum: how many must have contributed.
        overlap_steps: tau: so many steps each of them trains before it needs the average.
        sync_s: how long a round takes once the last contribution to it is there.

    Returns:
        By the clock of ``heard_s``; None: nobody is kept waiting yet, as far as is known.

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
    """Until when one replica is waited for, with what its own rounds tell: how long they take, for each fragment.

    >>> grace = Grace(0)
    >>> grace.learn(0, took_s=3.0, late_s={0: 0.5, 1: 0.0, 2: 2.5})   # 1 s after the last of them
    >>> grace.due_s({(0, 7): {1: 100.0, 2: 100.5}}, {1: 2.0}, members=3, overlap_steps=4)
    100.95
    """

    KEPT: ClassVar[float] = 0.9  # what each round keeps of the mean before it: about the last ten count

    def __init__(self, replica: int) -> None:
        self._replica = replica
        self._sync_s: dict[int, float] = {}

    def learn(self, fragment: int, *, took_s: float, late_s: Mapping[int, float]) -> None:
        """A round was committed.

        Args:
            took_s: from this replica's contribution to the commit.
            late_s: contributor -> how long after the first one it was heard of.
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
        """When the first of all rounds is due that others have contributed to and this replica has not.

        Args:
            waiting: (fragment, outer step) -> contributor -> when it was heard of.
            members: of the view; so many must have contributed as can't all lie.

        Returns:
            By the clock of ``waiting``; None: nobody is kept waiting yet, as far as is known.
        """
        quorum = more_than_could_lie(members)
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
