"""Who founds a view, of those who look for one at the same time. Pure: what they say and times in, a view out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diloco.membership.quorum import Policy, enough_without
from diloco.membership.view import View

__all__ = ["Founding", "Looker", "Lookers"]


@dataclass(frozen=True)
class Looker:
    """What one that looks for the others says of itself."""

    number: int  # of its replica
    held_step: int = -1  # the newest step that it could go on from; -1 for none
    # the newest view that it was a member of, or had agreed to be; None: none since its process began
    last: View | None = None


class Lookers:
    """Those who look, too. One that has ended while it looked is forgotten: what it said may stay for half an hour, and
    who waits for it would wait in vain.

    Who looks says so again and again, with another beat each time. How often it changes is seen here, so no clock is
    compared with another machine's.

    Args:
        silence_s: one whose beat stays the same for so long has ended.

    >>> lookers = Lookers(silence_s=30.0)
    >>> [sorted(lookers.hear({"Qm": 7}, now_s)) for now_s in (0.0, 29.0, 31.0)]
    [['Qm'], ['Qm'], []]
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._heard: dict[str, tuple[int, float]] = {}  # name -> its beat, and since when it is that

    def hear(self, beats: Mapping[str, int], now_s: float) -> frozenset[str]:
        """Names of those that look at ``now_s``, as far as is known; ``beats``: name -> what it says now."""
        for name, beat in beats.items():
            if name not in self._heard or self._heard[name][0] != beat:
                self._heard[name] = beat, now_s
        return frozenset(name for name in beats if now_s - self._heard[name][1] < self._silence_s)


@dataclass(frozen=True, kw_only=True)
class Founding:
    """What one of them brings to the question."""

    me: Looker  # what it says of itself
    alone: bool  # it knows of nobody to ask
    window_s: float  # so long it waits for others that look, too
    policy: Policy  # who may go on

    def founds(self, others: Sequence[Looker], waited_s: float, *, had_members: bool = False) -> View | None:
        """The view of this one alone that it is to found, for the others to join; None: it is not on this one.

        It is on who holds the newest step, and of several such ones on the lowest. Who has lost its view founds another
        one only if enough members of the newest view look, so that nobody else can be going on from it.

        Args:
            others: those who look, too.
            waited_s: from the moment at which others could know of it to that at which they were asked. Who waits less
                than another one needs to tell of itself may not have heard of it.
            had_members: whether anybody says that it was a member. A fresh start is no replacement for that.

        >>> newest = Founding(me=Looker(2, 150), alone=False, window_s=3.0, policy=Policy())
        >>> newest.founds([Looker(1, 100)], 2.0), newest.founds([Looker(1, 100)], 3.0)
        (None, View(id=0, members=(2,)))
        >>> from dataclasses import replace
        >>> lost = replace(newest, me=Looker(2, 150, View(7, (0, 1, 2))))
        >>> lost.founds([], 60.0), lost.founds([Looker(1, 140, View(6, (0, 1, 2, 3)))], 60.0)
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

    def _are_enough(self, newest: View, others: Sequence[Looker]) -> bool:
        there = {self.me.number, *(each.number for each in others)}
        return enough_without(newest, frozenset(newest.members) - there, self.policy)
