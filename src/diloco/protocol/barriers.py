"""What ranks agree on beside rounds: numbers that each of them says at a barrier, and what their loops were given."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from diloco.protocol.registry import Entry, difference

__all__ = ["Agreement", "Barriers"]


class Barriers:
    """Numbers by the barrier's name and the rank that says them.

    Attributes:
        stopping: whether somebody has asked for a step after which all stop.

    >>> barriers = Barriers()
    >>> barriers.say(0, "end", 7)
    >>> barriers.awaited("end", {0, 1}), barriers.said("end")
    ({1}, {0: 7})
    """

    def __init__(self) -> None:
        self.stopping = False
        self._said: dict[str, dict[int, int]] = {}

    def say(self, rank: int, name: str, value: int) -> None:
        """A rank says ``value`` at the barrier ``name``."""
        self._said.setdefault(name, {})[rank] = value

    def said(self, name: str) -> dict[int, int]:
        """Rank -> what it said."""
        return dict(self._said.get(name, {}))

    def awaited(self, name: str, present: Collection[int]) -> set[int]:
        """Those of the ranks that are ``present`` that have said nothing yet."""
        return set(present) - self._said.get(name, {}).keys()


class Agreement:
    """The facts of this rank's loop, and those of the others.

    Each rank tells its facts to all that it is connected to; whoever is told later than it has told answers with its
    own, so a replica that joins learns those of the members. A rank compares once, when its own loop begins: a joiner
    with other arguments is refused, and disturbs nobody.

    Args:
        ranks_per_replica: S.

    Attributes:
        mine: what this rank has told; None: nothing yet.
    """

    def __init__(self, ranks_per_replica: int) -> None:
        self.mine: Entry | None = None
        self._size = ranks_per_replica
        self._theirs: dict[int, Entry] = {}
        self._were_members: set[int] = set()

    def hear(self, sender: int, message: Mapping[str, Any], *, is_member: bool) -> Entry | None:
        """Another rank tells its facts; what to answer, if anything.

        Raises:
            KeyError, ValueError, TypeError: it does not tell its own facts.
        """
        entry, is_answer = Entry.from_message(message), bool(message["answer"])
        if entry.rank != sender:
            raise ValueError("it tells the facts of another one")
        self._theirs[sender] = entry
        if is_member:
            self._were_members.add(sender)
        return None if is_answer else self.mine

    def refusal(self, present: Collection[int]) -> str:
        """Both sides of the first difference from a member, even if it has left by now; "" where there is none."""
        if self.mine is None:
            return ""
        counting = sorted((set(present) | self._were_members) & self._theirs.keys())
        pairs = (sorted((self.mine, self._theirs[rank]), key=lambda each: each.rank) for rank in counting)
        return next(filter(None, (difference(one, other, self._size) for one, other in pairs)), "")

    def awaited(self, present: Collection[int]) -> set[int]:
        """Those of the ranks that are ``present`` whose facts are not known yet."""
        return set(present) - self._theirs.keys() - (set() if self.mine is None else {self.mine.rank})
