"""What ranks agree on besides rounds: numbers that they tell each other at barriers, and their loops' arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from diloco.protocol.fields import Fields
from diloco.protocol.registry import Entry, difference

__all__ = ["Agreement", "Barriers"]

_MOST_BARRIERS = 64  # that one rank may tell numbers at; there are two kinds of them

_MOST_FACTS = 1024  # ranks whose facts are kept while they are no members


class Barriers:
    """The numbers told at each barrier, by rank.

    >>> barriers = Barriers()
    >>> barriers.record(0, "end", 7)
    >>> barriers.awaited("end", {0, 1}), barriers.said("end")
    ({1}, {0: 7})
    """

    def __init__(self) -> None:
        self.stopping = False  # whether a rank has asked all ranks to stop
        self._values: dict[str, dict[int, int]] = {}

    def record(self, rank: int, name: str, value: int) -> None:
        """A rank tells ``value`` at the barrier ``name``."""
        self._values.setdefault(name, {})[rank] = value

    def receive(self, rank: int, name: str, value: int) -> None:
        """As `say`, of another rank.

        Raises:
            ValueError: it tells more numbers than there are barriers.
        """
        if name not in self._values and sum(rank in told for told in self._values.values()) >= _MOST_BARRIERS:
            raise ValueError(f"it speaks of more than {_MOST_BARRIERS} barriers")
        self.record(rank, name, value)

    def said(self, name: str) -> dict[int, int]:
        """Rank -> the value that it told."""
        return dict(self._values.get(name, {}))

    def awaited(self, name: str, present: Collection[int]) -> set[int]:
        """Ranks that are ``present`` and have not told a value."""
        return set(present) - self._values.get(name, {}).keys()


class Agreement:
    """The facts of this rank's loop, and those of the others.

    Each rank tells its facts to all connected ranks. A rank that has already told its own answers with them, so that a
    joining replica learns those of the members. A rank compares once, when its own loop begins; so a joiner with other
    arguments stops, and disturbs nobody.
    """

    def __init__(self, ranks_per_replica: int) -> None:
        self.mine: Entry | None = None  # what this rank has told, or None
        self._size = ranks_per_replica
        self._theirs: dict[int, Entry] = {}
        self._were_members: set[int] = set()

    def receive(self, sender: int, message: Mapping[str, Any], *, is_member: bool) -> Entry | None:
        """Another rank tells its facts; returns this rank's, if it expects them in answer.

        Raises:
            ValueError: the message is malformed, or tells another rank's facts.
        """
        entry, is_answer = Entry.from_message(message), Fields(message).flag("answer")
        if entry.rank != sender:
            raise ValueError("it tells the facts of another one")
        self._theirs[sender] = entry
        if is_member:
            self._were_members.add(sender)
        elif len(others := [rank for rank in self._theirs if rank not in self._were_members]) > _MOST_FACTS:
            del self._theirs[others[0]]
        return None if is_answer else self.mine

    def forget(self, rank: int) -> None:
        """Its connection has ended; what a member said stands."""
        if rank not in self._were_members:
            self._theirs.pop(rank, None)

    def refusal(self, present: Collection[int]) -> str:
        """Both sides of the first difference from a member, even from one that has left; "" if there is none."""
        if self.mine is None:
            return ""
        counting = sorted((set(present) | self._were_members) & self._theirs.keys())
        return next(filter(None, (difference(self.mine, self._theirs[rank], self._size) for rank in counting)), "")

    def awaited(self, present: Collection[int]) -> set[int]:
        """Ranks that are ``present`` and have not told their facts."""
        return set(present) - self._theirs.keys() - (set() if self.mine is None else {self.mine.rank})
