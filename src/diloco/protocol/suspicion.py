"""Whom a rank suspects: silent ranks, members that keep a round waiting, and members that spoil rounds. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

from diloco.protocol.rules import Rules

K = TypeVar("K")

MOST_SPOILT = 3  # a member that has spoilt this many recent rounds is to be excluded
_RECENT_ROUNDS = 32  # most recent rounds that are kept per member


@dataclass(frozen=True)
class Loss:
    """The reason for the loss of a rank."""

    # ``gone``: its process has ended; ``cut``: the connection has ended and the process can't be asked; ``silent``: the
    # connection is open and nothing is received
    kind: Literal["gone", "cut", "silent"]
    text: str  # a description for messages


class Pulse:
    """The heartbeats of this process itself.

    >>> pulse = Pulse(Rules())
    >>> pulse.begin(0.0)
    >>> pulse.beat(2.1), pulse.beat(22.1)
    (False, True)
    >>> pulse.was_suspended(30.0), pulse.was_suspended(40.0)
    (True, True)
    >>> pulse.beat(40.0), pulse.beat(42.0), pulse.was_suspended(56.0)
    (True, False, True)
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._beat_s = math.inf  # the time of the last beat, once there is one
        self._woke_s = -math.inf

    def begin(self, now_s: float) -> None:
        """Start the heartbeats."""
        self._beat_s = now_s

    def beat(self, now_s: float) -> bool:
        """Record a beat. Return True if this process was suspended since the last one, so peers need more time."""
        stood_s, self._beat_s = now_s - self._beat_s, now_s
        if stood_s > self._rules.silence_s - self._rules.heartbeat_s:
            self._woke_s = now_s
        return stood_s > 2 * self._rules.heartbeat_s + 1

    def was_suspended(self, now_s: float) -> bool:
        """Return whether this process was recently silent for so long that its peers may have declared it lost."""
        silence_s = self._rules.silence_s
        return now_s - self._beat_s > silence_s - self._rules.heartbeat_s or now_s - self._woke_s < silence_s


def silent_ones(quiet_s: Mapping[K, float], rules: Rules, members: Collection[K]) -> list[K]:
    """Return the keys that count as lost by silence.

    A process that is cut off from the others, or stood still, hears nothing from most of them. It waits until they are
    silent as well, up to twice `Rules.silence_s`, and so accuses none of them to another one, which its messages may
    still reach. A few ``members`` that are quiet, or any number of other processes, delay nothing.

    >>> silent_ones({1: 16.0, 2: 0.5}, Rules(), {1, 2}), silent_ones({1: 16.0, 2: 14.0}, Rules(), {1, 2})
    ([1], [])
    >>> silent_ones({1: 16.0, 2: 14.0, 3: 0.5}, Rules(), {1, 2, 3}), silent_ones({1: 30.5, 2: 14.0}, Rules(), {1, 2})
    ([1], [1])
    """
    waiting_s = [quiet_s[each] for each in members if each in quiet_s and quiet_s[each] <= rules.silence_s]
    most_are_quiet = 2 * sum(quiet > 2 * rules.heartbeat_s for quiet in waiting_s) > len(waiting_s)
    longest_s = 2 * rules.silence_s if most_are_quiet else rules.silence_s
    return [each for each, quiet in quiet_s.items() if quiet > longest_s]


class Lateness:
    """Counts, at regular looks, for how long something is awaited.

    Lateness is counted in looks, not in seconds: a process that was suspended for an hour has made no more looks than
    before. It reads what others sent meanwhile before it looks again.

    >>> lateness = Lateness()
    >>> [sorted(lateness.look(awaited)) for awaited in ({1, 2}, {1, 2}, {1}, {1, 2}, {1, 2})]
    [[], [], [], [], [1]]
    """

    LOOKS: ClassVar[int] = 4  # late is what is awaited from one look to the last of this many after it

    def __init__(self) -> None:
        self._looks: dict[int, int] = {}

    def look(self, awaited: Collection[int]) -> frozenset[int]:
        """Return what is late of what is ``awaited`` now."""
        self._looks = {each: self._looks.get(each, -1) + 1 for each in awaited}
        return frozenset(each for each, looks in self._looks.items() if looks >= self.LOOKS)


class Spoilers:
    """The members whose contributions no honest member sends, and how many recent rounds each has spoilt.

    >>> spoilers = Spoilers()
    >>> spoilers.begin_view((0, 1, 2))
    >>> [sorted(spoilers.note(refused)) for refused in ((2,), (), (2,), (2,))]
    [[], [], [], [2]]
    >>> spoilers.may_be(2), spoilers.may_be(1)
    (True, False)
    """

    def __init__(self) -> None:
        self._rounds: dict[int, deque[bool]] = {}

    def begin_view(self, members: Collection[int]) -> None:
        """Start a view of ``members``; those that have gone start anew when they return."""
        self._rounds = {each: self._rounds.get(each, deque(maxlen=_RECENT_ROUNDS)) for each in members}

    def note(self, spoilers: Collection[int]) -> frozenset[int]:
        """Record who has spoilt a round. Return those whose recent spoilt rounds just became a multiple of three."""
        for member, rounds in self._rounds.items():
            rounds.append(member in spoilers)
        return frozenset(each for each in spoilers if self._spoilt(each) and self._spoilt(each) % MOST_SPOILT == 0)

    def may_be(self, member: int) -> bool:
        """Return whether a member may have spoilt `MOST_SPOILT` rounds, as others report that may be a round ahead."""
        return self._spoilt(member) >= MOST_SPOILT - 1

    def _spoilt(self, member: int) -> int:
        return sum(self._rounds.get(member, ()))
