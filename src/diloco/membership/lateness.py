"""Which replicas keep a round waiting for too long.

Lateness is counted in looks, not in seconds, so that a process that was suspended accuses no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

__all__ = ["Lateness"]


class Lateness:
    """Counts, at regular looks, how long each awaited replica has shown no change.

    A process that was suspended for an hour has made no more looks than before. It reads what others sent meanwhile
    before it looks again.

    >>> lateness = Lateness()
    >>> looks = [lateness.look({1: "nothing came", 2: words}) for words in range(5)]
    >>> looks[3], looks[4]
    (frozenset(), frozenset({1}))
    """

    LOOKS: ClassVar[int] = 4  # a replica is late if nothing has changed from one look to the last of this many after it

    def __init__(self) -> None:
        self._seen: dict[int, tuple[object, int]] = {}

    def look(self, seen: Mapping[int, object]) -> frozenset[int]:
        """Look once, and return the replicas that are late.

        Args:
            seen: awaited replica -> a value that changes whenever the replica shows progress.
        """
        before = self._seen
        self._seen = {
            replica: (now, before[replica][1] + 1 if replica in before and before[replica][0] == now else 0)
            for replica, now in seen.items()
        }
        return frozenset(replica for replica, (_, unchanged) in self._seen.items() if unchanged >= self.LOOKS)

    @property
    def doubtful(self) -> frozenset[int]:
        """The replicas unchanged for more than half as many looks as make one late, and not late yet."""
        return frozenset(one for one, (_, looks) in self._seen.items() if self.LOOKS // 2 < looks < self.LOOKS)
