"""What members have done to rounds, as this rank has seen it: for this they are put out, or people told. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Literal

from diloco.protocol.faults import Faults

__all__ = ["Conduct"]

_LATELY = 32  # rounds that are remembered of each member


class Conduct:
    """Faults of the members of a view, counted while they are members.

    >>> conduct = Conduct()
    >>> [sorted(conduct.note((0, 1, 2), refused)) for refused in ((2,), (), (2,), (2,))]
    [[], [], [], [2]]
    >>> conduct.has_spoilt(2), conduct.has_spoilt(1)
    (True, False)
    >>> conduct.count("late", {1})
    >>> conduct.faults[1], conduct.faults[2]
    (Faults(spoilt=0, missed=0, against=0, late=1), Faults(spoilt=3, missed=0, against=0, late=0))
    """

    MOST = 3  # who has spoilt so many rounds is to go

    def __init__(self) -> None:
        self.faults: Mapping[int, Faults] = {}  # replica -> of each that has been at fault
        self._rounds: dict[int, deque[bool]] = {}

    def note(self, members: Collection[int], spoilers: Collection[int]) -> frozenset[int]:
        """A round was judged, or its payloads were; who has spoilt `MOST` by now, or twice as many, and so on.

        Args:
            members: of the view; others are forgotten.
            spoilers: those of them who have spoilt it.
        """
        self._rounds = {each: self._rounds.get(each, deque(maxlen=_LATELY)) for each in members}
        self.faults = {each: faults for each, faults in self.faults.items() if each in self._rounds}
        self.count("spoilt", spoilers)
        for member, rounds in self._rounds.items():
            rounds.append(member in spoilers)
        return frozenset(each for each in spoilers if self._spoilt(each) and self._spoilt(each) % self.MOST == 0)

    def count(self, fault: Literal["spoilt", "missed", "against", "late"], replicas: Collection[int]) -> None:
        """One more round in which these are at fault."""
        before = {each: self.faults.get(each, Faults()) for each in replicas}
        more = {each: faults._replace(**{fault: getattr(faults, fault) + 1}) for each, faults in before.items()}
        self.faults = {**self.faults, **more}

    def has_spoilt(self, member: int) -> bool:
        """Whether others may be right who say that a member has spoilt `MOST`: they may be one round ahead."""
        return self._spoilt(member) >= self.MOST - 1

    def _spoilt(self, member: int) -> int:
        """Rounds that it has spoilt lately."""
        return sum(self._rounds.get(member, ()))
