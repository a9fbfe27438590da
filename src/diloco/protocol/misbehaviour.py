"""The faults of members in rounds that this rank has observed, and the exclusions and bans that follow. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Literal

from diloco.protocol.faults import Faults

__all__ = ["Misbehaviour"]

_RECENT_ROUNDS = 32  # most recent rounds that are kept per member


class Misbehaviour:
    """A count of the faults of a view's members, for as long as they are members, and the bans of spoilers.

    >>> misbehaviour = Misbehaviour()
    >>> misbehaviour.begin_view((0, 1, 2), 0.0)
    >>> [sorted(misbehaviour.note(refused)) for refused in ((2,), (), (2,), (2,))]
    [[], [], [], [2]]
    >>> misbehaviour.may_be_spoiler(2), misbehaviour.may_be_spoiler(1)
    (True, False)
    >>> misbehaviour.count("late", {1})
    >>> misbehaviour.faults[1], misbehaviour.faults[2]
    (Faults(spoilt=0, missed=0, against=0, late=1), Faults(spoilt=3, missed=0, against=0, late=0))
    >>> misbehaviour.begin_view((0, 1), 5.0)
    >>> misbehaviour.banned_for_s(2, 6.0), misbehaviour.banned_for_s(2, 66.0)
    (59.0, 0.0)
    """

    MOST_SPOILT = 3  # a member that has spoilt this many recent rounds is to be excluded
    # length of the first ban, which doubles with each further one, and the longest ban
    BAN_S, LONGEST_BAN_S = 60.0, 86_400.0

    def __init__(self) -> None:
        self.faults: Mapping[int, Faults] = {}  # replica -> its faults; only replicas that have any
        self._rounds: dict[int, deque[bool]] = {}
        # replica -> how often it was excluded as a spoiler, and until when it is banned
        self._bans: dict[int, tuple[int, float]] = {}

    def begin_view(self, members: Collection[int], now_s: float) -> None:
        """Start a view of ``members``. For members that have gone, only the bans of spoilers are kept."""
        for gone in self._rounds.keys() - set(members):
            if self.may_be_spoiler(gone):
                times = self._bans.get(gone, (0, 0.0))[0]
                self._bans[gone] = times + 1, now_s + min(self.BAN_S * 2.0 ** min(times, 20), self.LONGEST_BAN_S)
        self._rounds = {each: self._rounds.get(each, deque(maxlen=_RECENT_ROUNDS)) for each in members}
        self.faults = {each: faults for each, faults in self.faults.items() if each in self._rounds}

    def banned_for_s(self, replica: int, now_s: float) -> float:
        """Return for how many more seconds a replica may not rejoin."""
        return max(0.0, self._bans.get(replica, (0, 0.0))[1] - now_s)

    def note(self, spoilers: Collection[int]) -> frozenset[int]:
        """Record that a round, or its payloads, were judged, and which members have spoilt it.

        Returns:
            The members whose number of recent spoilt rounds has just reached a multiple of `MOST_SPOILT`.
        """
        self.count("spoilt", spoilers)
        for member, rounds in self._rounds.items():
            rounds.append(member in spoilers)
        return frozenset(each for each in spoilers if self._spoilt(each) and self._spoilt(each) % self.MOST_SPOILT == 0)

    def count(self, fault: Literal["spoilt", "missed", "against", "late"], replicas: Collection[int]) -> None:
        """Count one more round in which these replicas are at fault."""
        before = {each: self.faults.get(each, Faults()) for each in replicas}
        more = {each: faults._replace(**{fault: getattr(faults, fault) + 1}) for each, faults in before.items()}
        self.faults = {**self.faults, **more}

    def may_be_spoiler(self, member: int) -> bool:
        """Return whether a member may have spoilt `MOST_SPOILT` rounds, as others report that may be a round ahead."""
        return self._spoilt(member) >= self.MOST_SPOILT - 1

    def _spoilt(self, member: int) -> int:
        """Return the number of recent rounds that a member has spoilt."""
        return sum(self._rounds.get(member, ()))
