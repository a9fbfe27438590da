"""How often members have spoilt rounds by faults that every other member sees as well. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

__all__ = ["Conduct"]

_LATELY = 32  # rounds that are remembered of each member


class Conduct:
    """Provable faults of members in the last rounds: a contribution whose header no honest member would send.

    >>> conduct = Conduct()
    >>> [sorted(conduct.note((0, 1, 2), refused)) for refused in ((2,), (), (2,), (2,))]
    [[], [], [], [2]]
    >>> conduct.faults(2), conduct.has_spoilt(2), conduct.has_spoilt(1)
    (3, True, False)
    """

    MOST = 3  # who has spoilt so many rounds is to go

    def __init__(self) -> None:
        self._rounds: dict[int, deque[bool]] = {}

    def note(self, members: Collection[int], refused: Collection[int]) -> frozenset[int]:
        """One round was judged; who has spoilt `MOST` rounds by now, or twice as many, and so on.

        Args:
            members: of the view; others are forgotten.
            refused: those of them whose contribution was refused.
        """
        self._rounds = {each: self._rounds.get(each, deque(maxlen=_LATELY)) for each in members}
        for member, rounds in self._rounds.items():
            rounds.append(member in refused)
        return frozenset(each for each in refused if self.faults(each) and self.faults(each) % self.MOST == 0)

    def faults(self, member: int) -> int:
        """Rounds that it has spoilt lately."""
        return sum(self._rounds.get(member, ()))

    def has_spoilt(self, member: int) -> bool:
        """Whether others may be right who say that a member has spoilt `MOST`: they may be one round ahead."""
        return self.faults(member) >= self.MOST - 1
