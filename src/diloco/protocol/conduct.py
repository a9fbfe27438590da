"""What members have done to rounds, as this rank has seen it: for this they are put out, or people told. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Literal

from diloco.protocol.faults import Faults

__all__ = ["Conduct"]

_RECENT_ROUNDS = 32  # rounds that are remembered of each member


class Conduct:
    """Faults of the members of a view, counted while they are members.

    >>> conduct = Conduct()
    >>> conduct.begin_view((0, 1, 2), 0.0)
    >>> [sorted(conduct.note(refused)) for refused in ((2,), (), (2,), (2,))]
    [[], [], [], [2]]
    >>> conduct.may_be_spoiler(2), conduct.may_be_spoiler(1)
    (True, False)
    >>> conduct.count("late", {1})
    >>> conduct.faults[1], conduct.faults[2]
    (Faults(spoilt=0, missed=0, against=0, late=1), Faults(spoilt=3, missed=0, against=0, late=0))
    >>> conduct.begin_view((0, 1), 5.0)
    >>> conduct.banned_for_s(2, 6.0), conduct.banned_for_s(2, 66.0)
    (59.0, 0.0)
    """

    MOST_SPOILT = 3  # who has spoilt so many rounds is to go
    BAN_S, LONGEST_BAN_S = 60.0, 86_400.0  # for how long, the first time, and at most; each time twice as long

    def __init__(self) -> None:
        self.faults: Mapping[int, Faults] = {}  # replica -> of each that has been at fault
        self._rounds: dict[int, deque[bool]] = {}
        self._bans: dict[int, tuple[int, float]] = {}  # replica -> how often it went as a spoiler, and until when

    def begin_view(self, members: Collection[int], now_s: float) -> None:
        """A view of ``members`` begins; of those who have gone it is only known how long spoilers are to stay out."""
        for gone in self._rounds.keys() - set(members):
            if self.may_be_spoiler(gone):
                times = self._bans.get(gone, (0, 0.0))[0]
                self._bans[gone] = times + 1, now_s + min(self.BAN_S * 2.0 ** min(times, 20), self.LONGEST_BAN_S)
        self._rounds = {each: self._rounds.get(each, deque(maxlen=_RECENT_ROUNDS)) for each in members}
        self.faults = {each: faults for each, faults in self.faults.items() if each in self._rounds}

    def banned_for_s(self, replica: int, now_s: float) -> float:
        """For how long yet it may not come back."""
        return max(0.0, self._bans.get(replica, (0, 0.0))[1] - now_s)

    def note(self, spoilers: Collection[int]) -> frozenset[int]:
        """A round was judged, or its payloads were, which these members have spoilt.

        Returns:
            Who has spoilt `MOST_SPOILT` by now, or twice as many, and so on.
        """
        self.count("spoilt", spoilers)
        for member, rounds in self._rounds.items():
            rounds.append(member in spoilers)
        return frozenset(each for each in spoilers if self._spoilt(each) and self._spoilt(each) % self.MOST_SPOILT == 0)

    def count(self, fault: Literal["spoilt", "missed", "against", "late"], replicas: Collection[int]) -> None:
        """One more round in which these are at fault."""
        before = {each: self.faults.get(each, Faults()) for each in replicas}
        more = {each: faults._replace(**{fault: getattr(faults, fault) + 1}) for each, faults in before.items()}
        self.faults = {**self.faults, **more}

    def may_be_spoiler(self, member: int) -> bool:
        """Whether others may be right who say that a member has spoilt `MOST_SPOILT`: they may be one round ahead."""
        return self._spoilt(member) >= self.MOST_SPOILT - 1

    def _spoilt(self, member: int) -> int:
        """Rounds that it has spoilt lately."""
        return sum(self._rounds.get(member, ()))
