"""A limit on the number of open connections from peers that nothing vouches for. Does no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

__all__ = ["ConnectionLimit"]

T = TypeVar("T", bound=Hashable)


class ConnectionLimit(Generic[T]):
    """A limit on the number of connections, in total and for each origin (a peer or an address).

    When the limit is reached, a new connection replaces the oldest connection of the origin that has the most. A flood
    of idle connections from one origin therefore keeps no other origin out.

    Args:
        most: The number of connections in total.
        most_of_one: The number of connections of one origin.

    >>> limit = ConnectionLimit[str](3, most_of_one=2)
    >>> [limit.enter(f"a{n}", ["peer a"]) for n in range(3)]  # peer a may have only two
    [None, None, 'a2']
    >>> limit.enter("b0", ["peer b"]), limit.enter("c0", ["peer c"])  # the oldest connection of peer a is evicted
    (None, 'a0')
    """

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._inside: dict[T, tuple[str, ...]] = {}

    def enter(self, one: T, origins: Sequence[str]) -> T | None:
        """Admit ``one`` and return the connection to close: another one, ``one`` itself, or None if there is room."""
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
        """Release the place of ``one``, if it has one."""
        self._inside.pop(one, None)
