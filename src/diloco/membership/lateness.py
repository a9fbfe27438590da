"""Who keeps a round waiting for too long. Counted in looks, not in seconds: one that stood still accuses nobody."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

__all__ = ["Lateness"]


class Lateness:
    """Looks at those who are waited for, at regular times.

    A process that was stopped for an hour and wakes has looked no oftener than before: what others sent meanwhile is
    read before it looks again.

    >>> lateness = Lateness()
    >>> looks = [lateness.look({1: "nothing came", 2: words}) for words in range(5)]
    >>> looks[3], looks[4]
    (frozenset(), frozenset({1}))
    """

    LOOKS: ClassVar[int] = 4  # who has done nothing from one look to the last of so many after it is late

    def __init__(self) -> None:
        self._seen: dict[int, tuple[object, int]] = {}

    def look(self, seen: Mapping[int, object]) -> frozenset[int]:
        """Those who are late.

        Args:
            seen: replica that is waited for -> something that changes whenever it is not to be called late yet.
        """
        before = self._seen
        self._seen = {
            replica: (now, before[replica][1] + 1 if replica in before and before[replica][0] == now else 0)
            for replica, now in seen.items()
        }
        return frozenset(replica for replica, (_, unchanged) in self._seen.items() if unchanged >= self.LOOKS)

    @property
    def doubtful(self) -> frozenset[int]:
        """Those who have done nothing for more than half as many looks as make them late, and are not late yet."""
        return frozenset(one for one, (_, looks) in self._seen.items() if self.LOOKS // 2 < looks < self.LOOKS)
