"""Who is silent, and whether it is this process itself that stood still. Times of one clock go in; nothing waits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

__all__ = ["Loss", "Pulse", "Timing", "silent_ones"]

K = TypeVar("K")


@dataclass(frozen=True)
class Timing:
    """How soon a silent rank is noticed."""

    heartbeat_s: float = 2.0  # between two beats
    silence_s: float = 15.0  # without any word from a rank it counts as lost
    latency_s: float = 0.0  # emulated: every message is delivered this much later


@dataclass(frozen=True)
class Loss:
    """Why a rank is lost."""

    # ``gone``: its process has ended; ``cut``: the connection ended and the process can't be asked; ``silent``: the
    # connection stands and nothing comes
    kind: Literal["gone", "cut", "silent"]
    text: str  # in words


class Pulse:
    """This process's own beats.

    >>> pulse = Pulse(Timing(heartbeat_s=2.0, silence_s=15.0))
    >>> pulse.begin(0.0)
    >>> pulse.beat(2.1), pulse.beat(22.1)
    (False, True)
    >>> pulse.stood_still(30.0), pulse.stood_still(40.0)
    (True, True)
    >>> pulse.beat(40.0), pulse.beat(42.0), pulse.stood_still(56.0)
    (True, False, True)
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._beat_s = math.inf  # of the last beat, once there are any
        self._woke_s = -math.inf

    def begin(self, now_s: float) -> None:
        """From now on there are beats."""
        self._beat_s = now_s

    def beat(self, now_s: float) -> bool:
        """A beat; True if this process stood still since the one before, so that the others get their chance."""
        stood_s, self._beat_s = now_s - self._beat_s, now_s
        if stood_s > self._timing.silence_s - self._timing.heartbeat_s:
            self._woke_s = now_s
        return stood_s > 2 * self._timing.heartbeat_s + 1

    def stood_still(self, now_s: float) -> bool:
        """Whether this process said nothing for so long, lately, that the others may have given it up."""
        silence_s = self._timing.silence_s
        return now_s - self._beat_s > silence_s - self._timing.heartbeat_s or now_s - self._woke_s < silence_s


def silent_ones(quiet_s: Mapping[K, float], timing: Timing) -> list[K]:
    """Who is to be given up as silent; nobody yet, while others have become so quiet that they may be next.

    So who is cut off from all the others accuses none of them to another one: what it says may still arrive.

    Args:
        quiet_s: since when nothing came from each.

    >>> silent_ones({1: 16.0, 2: 0.5}, Timing())
    [1]
    >>> silent_ones({1: 16.0, 2: 14.0}, Timing())
    []
    """
    if any(2 * timing.heartbeat_s < quiet <= timing.silence_s for quiet in quiet_s.values()):
        return []
    return [each for each, quiet in quiet_s.items() if quiet > timing.silence_s]
