"""How many connections may be open that nobody of the run vouches for. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

__all__ = ["Gate"]

T = TypeVar("T", bound=Hashable)


class Gate(Generic[T]):
    """Places for connections, all in all and for each origin: a peer, or an address.

    When all places are taken, whoever has come last gets the place of the one that has been there longest of the origin
    that has the most. So a flood from one origin, of connections that do nothing, keeps nobody else out.

    Args:
        most: places.
        most_of_one: that one origin may have.

    >>> gate = Gate[str](3, most_of_one=2)
    >>> [gate.enter(f"a{n}", ["peer a"]) for n in range(3)]  # the third one is one too many
    [None, None, 'a2']
    >>> gate.enter("b0", ["peer b"]), gate.enter("c0", ["peer c"])  # the longest-standing one of a has to go
    (None, 'a0')
    """

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._inside: dict[T, tuple[str, ...]] = {}

    def enter(self, one: T, origins: Sequence[str]) -> T | None:
        """Let ``one`` in; returns the one that has to go: another one, itself, or None where there is room."""
        counts = Counter(origin for theirs in self._inside.values() for origin in theirs)
        if any(counts[origin] >= self._most_of_one for origin in origins):
            return one
        self._inside[one] = tuple(origins)
        if len(self._inside) <= self._most:
            return None
        counts.update(origins)
        largest = max(counts.values())
        out = next(each for each, theirs in self._inside.items() if any(counts[o] == largest for o in theirs))
        self.leave(out)
        return out

    def leave(self, one: T) -> None:
        """Its place is free, if it had one."""
        self._inside.pop(one, None)
