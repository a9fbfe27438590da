"""Pauses between attempts to reach a peer."""

from __future__ import annotations

import random

__all__ = ["Backoff"]


class Backoff:
    """Pauses in seconds that double up to a limit, each shortened by up to half so that peers do not act in step.

    Args:
        seed: The pauses are a function of it; peers need different ones.

    >>> pauses = Backoff(1.0, 4.0, seed="rank 0")
    >>> [0.5 * upper <= pauses.next_s() <= upper for upper in (1.0, 2.0, 4.0, 4.0)]
    [True, True, True, True]
    >>> pauses.reset()
    >>> pauses.next_s() <= 1.0
    True
    """

    def __init__(self, first_s: float, longest_s: float, seed: str) -> None:
        self.upper_s = first_s  # the next pause at most
        self._first_s = first_s
        self._longest_s = longest_s
        self._random = random.Random(seed)

    def next_s(self) -> float:
        """Return the pause before the next attempt."""
        pause_s = self.upper_s * self._random.uniform(0.5, 1.0)
        self.upper_s = min(2 * self.upper_s, max(self._first_s, self._longest_s))
        return pause_s

    def reset(self) -> None:
        """Begin again with the first pause, after a success."""
        self.upper_s = self._first_s
