"""Whether the loops on all sides of a transport were given the same arguments: each tells its own, before any round."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diloco.errors import ConfigurationError, RendezvousError
from diloco.protocol.registry import Entry, difference
from diloco.protocol.rules import Rules
from diloco.transport.peers.connection_manager import ConnectionManager
from diloco.waiting import waiting_for

__all__ = ["Agreement"]


class Agreement:
    """The facts of this rank's loop, and those of the others.

    Each rank tells its facts to all that it is connected to; whoever is told later than it has told answers with its
    own, so a replica that joins learns those of the members. A rank compares once, when its own loop begins: a joiner
    with other arguments is refused, and disturbs nobody.

    Args:
        rules: who I am.
        connections: control connections.
        present: the ranks of the view that can be reached, and this one.
        changed: notified where others come and go.
    """

    def __init__(
        self,
        rules: Rules,
        connections: ConnectionManager,
        present: Callable[[], set[int]],
        changed: threading.Condition,
    ) -> None:
        self._rules = rules
        self._connections = connections
        self._present = present
        self._changed = changed
        self._mine: Entry | None = None
        self._theirs: dict[int, Entry] = {}
        self._were_members: set[int] = set()

    def agree(self, facts: Mapping[str, str], timeout_s: float) -> None:
        """Tell ``facts`` to the others and wait for theirs; see `Transport.agree`."""
        with waiting_for(lambda: f"{_named(self._missing())} to make its DiLoCo", timeout_s), self._changed:
            self._mine = Entry(self._rules.rank, str(self._connections.address), facts)
            self._connections.post(self._tell_all)
            self._changed.wait_for(lambda: self._refusal() or not self._awaited(), timeout_s)
            refusal, missing = self._refusal(), self._missing()
        if refusal:
            raise ConfigurationError(f"{refusal}. All replicas need the same arguments of DiLoCo. Nothing was started.")
        if missing:
            raise RendezvousError(
                f"replica {self._rules.replica} has waited {timeout_s:g} s for {_named(missing)}, which "
                f"{'are' if len(missing) > 1 else 'is'} connected and not ready to train: no DiLoCo was made there. "
                "Nothing was started.",
                replicas=missing,
            )

    def _missing(self) -> list[int]:
        """Replicas that are waited for."""
        return sorted({rank // self._rules.ranks_per_replica for rank in self._awaited()})

    # In the control thread.

    def hear(self, sender: int, message: Mapping[str, Any], *, is_member: bool) -> None:
        """Another rank tells its facts."""
        entry = Entry.from_message(message)
        if entry.rank != sender:
            raise ValueError("it tells the facts of another one")
        with self._changed:
            self._theirs[sender] = entry
            if is_member:
                self._were_members.add(sender)
            mine = self._mine
            self._changed.notify_all()
        if mine is not None and not message["answer"]:
            self._tell(sender, mine, answer=True)

    def _tell_all(self) -> None:
        assert self._mine is not None
        for rank in self._connections.connected:
            self._tell(rank, self._mine, answer=False)

    def _tell(self, rank: int, mine: Entry, *, answer: bool) -> None:
        self._connections.send(rank, {"kind": "facts", "answer": answer, **mine.to_message()})

    # With `changed` held.

    def _refusal(self) -> str:
        """Both sides of the first difference from a member, be it gone by now; "" where there is none."""
        assert self._mine is not None
        counting = sorted((self._present() | self._were_members) & self._theirs.keys())
        pairs = (sorted((self._mine, self._theirs[rank]), key=lambda each: each.rank) for rank in counting)
        words = (difference(one, other, self._rules.ranks_per_replica) for one, other in pairs)
        return next(filter(None, words), "")

    def _awaited(self) -> set[int]:
        return self._present() - self._theirs.keys() - {self._rules.rank}


def _named(replicas: Sequence[int]) -> str:
    return f"replica{'s' if len(replicas) > 1 else ''} {', '.join(map(str, replicas))}"
