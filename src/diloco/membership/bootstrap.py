"""The choice of the replica that founds a view if several search for one. Pure: takes announcements and times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diloco.membership.quorum import Policy, enough_without
from diloco.membership.view import View

__all__ = ["BootstrapElection", "Candidate", "Candidates"]


@dataclass(frozen=True)
class Candidate:
    """The announcement of a replica that searches for the others."""

    number: int  # the replica's number
    held_step: int = -1  # the newest step that it could resume from; -1 for none
    # the newest view that it was a member of or had agreed to; None: none since its process began
    last: View | None = None


class Candidates:
    """The other replicas that are searching, as far as their beats show.

    The announcement of a replica that has ended may stay visible for half an hour. A searching replica therefore
    announces itself repeatedly, each time with another beat. Changes of the beat are timed here, so no clocks of two
    machines are compared.

    Args:
        silence_s: a replica whose beat has not changed for this long counts as ended.

    >>> candidates = Candidates(silence_s=30.0)
    >>> [sorted(candidates.record({"Qm": 7}, now_s)) for now_s in (0.0, 29.0, 31.0)]
    [['Qm'], ['Qm'], []]
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._heard: dict[str, tuple[int, float]] = {}  # name -> its beat, and when that was first seen

    def record(self, beats: Mapping[str, int], now_s: float) -> frozenset[str]:
        """Record the current beats by name, and return the names of the replicas that are searching at ``now_s``."""
        for name, beat in beats.items():
            if name not in self._heard or self._heard[name][0] != beat:
                self._heard[name] = beat, now_s
        return frozenset(name for name in beats if now_s - self._heard[name][1] < self._silence_s)


@dataclass(frozen=True, kw_only=True)
class BootstrapElection:
    """The election of the founder, as one replica holds it: its own candidacy and the rules."""

    me: Candidate  # its own announcement
    alone: bool  # whether it knows no other replica to ask
    window_s: float  # how long it waits for others that are searching, too
    policy: Policy  # decides which survivors may continue

    def founds(self, others: Sequence[Candidate], waited_s: float, *, had_members: bool = False) -> View | None:
        """Return the view of this replica alone that it founds for the others to join, or None if it founds none.

        The founder is the replica with the newest step; of several, the one with the lowest number. A replica that has
        lost its view founds a new one only if enough members of the newest view are searching, so that no others can be
        continuing from it.

        Args:
            others: the other replicas that are searching.
            waited_s: from the moment at which others could see this replica's announcement to the moment at which they
                were asked. If this is shorter than another replica needs to announce itself, that one may be unknown
                here.
            had_members: whether any replica announces that it was a member. In that case a replica without a checkpoint
                founds none.

        >>> newest = BootstrapElection(me=Candidate(2, 150), alone=False, window_s=3.0, policy=Policy())
        >>> newest.founds([Candidate(1, 100)], 2.0), newest.founds([Candidate(1, 100)], 3.0)
        (None, View(id=0, members=(2,)))
        >>> from dataclasses import replace
        >>> lost = replace(newest, me=Candidate(2, 150, View(7, (0, 1, 2))))
        >>> lost.founds([], 60.0), lost.founds([Candidate(1, 140, View(6, (0, 1, 2, 3)))], 60.0)
        (None, View(id=8, members=(2,)))
        """
        if self.me.held_step < 0 and had_members:
            return None
        last = [each.last for each in (self.me, *others) if each.last is not None]
        newest = max(last, key=lambda view: view.id, default=View(-1, (self.me.number,)))
        founded = View(newest.id + 1, (self.me.number,))
        if self.alone and self.me.last is None:
            return founded
        if self.me.last is not None and not self._are_enough(newest, others):
            return None
        mine = (-self.me.held_step, self.me.number)
        first = all(mine <= (-each.held_step, each.number) for each in others)
        return founded if waited_s >= self.window_s and first else None

    def _are_enough(self, newest: View, others: Sequence[Candidate]) -> bool:
        there = {self.me.number, *(each.number for each in others)}
        return enough_without(newest, frozenset(newest.members) - there, self.policy)
