"""What waits for a view to come: letters about it, and replicas that want to be members of it."""

from __future__ import annotations

from dataclasses import dataclass

from diloco.protocol.messages import Said

__all__ = ["Early", "Joiners", "Letter"]

_MOST_EARLY = 1000
"""Messages that are kept of one sender: many times what it says in a view before all have adopted it."""


@dataclass(frozen=True, eq=False)
class Letter:
    """What was said.

    Attributes:
        sender: its rank.
        view_id: of the view that it is about.
        said: what.
        connection: on which it came; None: it had ended by then.
    """

    sender: int
    view_id: int
    said: Said
    connection: object | None


class Early:
    """Letters about views to come, in the order in which they came."""

    def __init__(self) -> None:
        self._letters: list[Letter] = []

    def __len__(self) -> int:
        return len(self._letters)

    def keep(self, letter: Letter) -> bool:
        """Keep a letter for later; False if there are too many of its sender."""
        if sum(each.sender == letter.sender for each in self._letters) >= _MOST_EARLY:
            return False
        self._letters.append(letter)
        return True

    def take(self) -> list[Letter]:
        """All of them; none is kept any more."""
        letters, self._letters = self._letters, []
        return letters


class Joiners:
    """Ranks that asked to become members, by replica: one joins when all its ranks have asked.

    Args:
        ranks_per_replica: S.

    >>> joiners = Joiners(2)
    >>> joiners.ask(6), joiners.ask(7), joiners.complete()
    (False, True, (3,))
    """

    def __init__(self, ranks_per_replica: int) -> None:
        self._size = ranks_per_replica
        self._asked: dict[int, set[int]] = {}

    def ask(self, rank: int) -> bool:
        """Note that a rank asked; True if all ranks of its replica have by now."""
        asked = self._asked.setdefault(rank // self._size, set())
        asked.add(rank)
        return len(asked) == self._size

    def forget(self, replica: int) -> None:
        """It is a member, or is lost."""
        self._asked.pop(replica, None)

    def complete(self) -> tuple[int, ...]:
        """Replicas all of whose ranks have asked, in the order in which they came."""
        return tuple(replica for replica, asked in self._asked.items() if len(asked) == self._size)
