"""What ranks agree on besides rounds: the numbers exchanged at barriers, and the arguments of their training loops."""

from __future__ import annotations

from collections.abc import Collection

from diloco.protocol.registry import Entry, difference
from diloco.protocol.rules import Rules
from diloco.protocol.wire import FactsMessage, MessageError

__all__ = ["Agreement", "Barriers"]

_MOST_BARRIERS = 64  # most barriers that one rank may name; a run has two kinds of them
_MOST_FACTS = 1024  # most non-member ranks whose facts are kept


class Barriers:
    """The number that each rank has reported at each barrier.

    >>> barriers = Barriers()
    >>> barriers.record(0, "finished", 7)
    >>> barriers.awaited("finished", {0, 1}), barriers.values("finished")
    ({1}, {0: 7})
    """

    def __init__(self) -> None:
        self.stopping = False  # whether this rank stops, by itself or with the others
        self._values: dict[str, dict[int, int]] = {}

    def record(self, rank: int, name: str, value: int) -> None:
        """Record that a rank reported ``value`` at the barrier ``name``."""
        self._values.setdefault(name, {})[rank] = value

    def receive(self, rank: int, name: str, value: int) -> None:
        """Record a value reported by another rank.

        Raises:
            MessageError: the rank has named too many barriers.
        """
        if name not in self._values and sum(rank in values for values in self._values.values()) >= _MOST_BARRIERS:
            raise MessageError(f"the sender has named more than {_MOST_BARRIERS} barriers")
        self.record(rank, name, value)

    def values(self, name: str) -> dict[int, int]:
        """Return the value that each rank has reported at the barrier ``name``, by rank."""
        return dict(self._values.get(name, {}))

    def awaited(self, name: str, present: Collection[int]) -> set[int]:
        """Return the ranks in ``present`` that have not reported a value."""
        return set(present) - self._values.get(name, {}).keys()


class Agreement:
    """The facts about this rank's training loop and those of the others.

    Each rank sends its facts to all connected ranks. A rank that has already sent its own answers with them, so that a
    joining replica learns those of the members. A rank compares once, when its own loop begins. A joiner with other
    arguments therefore stops without disturbing the others.
    """

    def __init__(self, rules: Rules) -> None:
        self.mine: Entry | None = None  # the facts that this rank has announced, or None
        self._rules = rules
        self._theirs: dict[int, Entry] = {}
        self._were_members: set[int] = set()

    def receive(self, sender: int, message: FactsMessage) -> Entry | None:
        """Record another rank's facts. Return this rank's own facts if the sender expects them in answer.

        Raises:
            MessageError: the message names another rank as its source.
        """
        if message.entry.rank != sender:
            raise MessageError("the message holds the facts of another rank")
        self._theirs[sender] = message.entry
        others = [rank for rank in self._theirs if rank not in self._were_members]
        if sender not in self._were_members and len(others) > _MOST_FACTS:
            del self._theirs[others[0]]
        return None if message.answer else self.mine

    def begin_view(self, members: Collection[int]) -> None:
        """Note the ranks of a view, whose facts stay when their connections end."""
        self._were_members.update(members)

    def forget(self, rank: int) -> None:
        """Handle the end of a rank's connection. The facts of a rank that was a member stay."""
        if rank not in self._were_members:
            self._theirs.pop(rank, None)

    def refusal(self) -> str:
        """Return the first difference from a current or former member, naming both sides, or "" if there is none."""
        if self.mine is None:
            return ""
        counting = sorted(self._were_members & self._theirs.keys())
        size = self._rules.ranks_per_replica
        return next(filter(None, (difference(self.mine, self._theirs[rank], size) for rank in counting)), "")

    def awaited(self, present: Collection[int]) -> set[int]:
        """Return the ranks in ``present`` that have not sent their facts."""
        return set(present) - self._theirs.keys() - (set() if self.mine is None else {self.mine.rank})
