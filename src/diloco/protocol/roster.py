"""The connected ranks, and which of them are members of the current view rather than replacements of members."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from diloco.membership import View
from diloco.protocol.rules import Rules

__all__ = ["Roster"]

_MOST_UNSTEADY = 2
_UNSTEADY_PERIODS = 10  # a quiet period is remembered for this many times the limit that makes it one


class Roster:
    """The control connections by rank, and the connections of the current view's members."""

    def __init__(self, rules: Rules) -> None:
        self.connections: dict[int, int] = {}  # rank -> number of its connection
        self.addresses: dict[int, str] = {}  # rank -> the address on which it listens
        # rank -> number of messages received over its connection, heartbeats included
        self.message_counts: dict[int, int] = {}
        self._heard_s: dict[int, float] = {}  # rank -> when its last message was received
        self._quiet_s: dict[int, float] = {}  # rank -> when its last quiet period ended
        self.in_doubt: set[int] = set()  # ranks whose connection has ended for a reason that is still unknown
        self._rules = rules
        # rank -> its connection; None: it was not connected when the view began
        self._members: dict[int, int | None] = {}

    def connect(self, rank: int, connection: int, address: str, now_s: float) -> None:
        """Record an open connection."""
        self.connections[rank], self.addresses[rank], self.message_counts[rank] = connection, address, 0
        self._heard_s[rank] = now_s
        self.in_doubt.discard(rank)

    def note_message(self, rank: int, now_s: float) -> None:
        """Record a message of a rank, a heartbeat or another one."""
        if rank in self.message_counts:
            self.message_counts[rank] += 1
            if now_s - self._heard_s[rank] > self._rules.unsteady_s:
                self._quiet_s[rank] = now_s
            self._heard_s[rank] = now_s

    def unsteady(self, view: View, now_s: float) -> frozenset[tuple[int, int]]:
        """Return this replica paired with each connected member of ``view`` that is quiet, or has been recently.

        The set is empty if more than two are quiet: then this replica, or its machine, is more likely to have been
        suspended.
        """
        mine, limit_s = self._rules.replica, self._rules.unsteady_s
        quiet = {
            self._rules.replica_of(rank)
            for rank in filter(self.is_connected, self._rules.ranks(view.members))
            if now_s - self._quiet_s.get(rank, -math.inf) < _UNSTEADY_PERIODS * limit_s
            or now_s - self._heard_s[rank] > limit_s
        }
        quiet.discard(mine)
        return frozenset((mine, each) for each in quiet if len(quiet) <= _MOST_UNSTEADY)

    def disconnect(self, rank: int) -> None:
        """Record the end of a connection."""
        for known in (self.connections, self.addresses, self.message_counts, self._heard_s, self._quiet_s):
            known.pop(rank, None)

    def set_members(self, view: View) -> None:
        """Make the processes that are connected now the members of ``view``; those that were members before stay."""
        self._members = {
            rank: self._members.get(rank, self.connections.get(rank)) for rank in self._rules.ranks(view.members)
        }

    def set_connections(self, connections: Mapping[int, int]) -> None:
        """Make the processes with these connections the members, even if others have replaced them since."""
        self._members.update(connections)

    def remove(self, rank: int) -> None:
        """Remove the process of a rank from the members."""
        self._members.pop(rank, None)

    def mark_replaced(self, rank: int) -> None:
        """Record that the process connected as ``rank`` has taken the place of the member."""
        self._members[rank] = None

    def has(self, rank: int) -> bool:
        """Return whether a process of that rank is a member, connected or not."""
        return rank in self._members

    def is_from_member(self, rank: int, connection: int | None) -> bool:
        """Return whether a message is from a member; ``connection`` is None if it has ended since."""
        return self.has(rank) and (connection is None or connection == self._members[rank])

    def is_connected(self, rank: int) -> bool:
        """Return whether the process connected as ``rank`` is the member."""
        return self.has(rank) and rank in self.connections and self._members[rank] == self.connections[rank]

    def unreached(self, view: View) -> frozenset[int]:
        """Return the other members of ``view``, the current view, that are not connected."""
        return frozenset(
            member
            for member in view.members
            if member != self._rules.replica and not all(map(self.is_connected, self._rules.ranks((member,))))
        )

    def replaced(self, replicas: Collection[int]) -> frozenset[int]:
        """Return those of ``replicas`` whose place other processes have taken, which shows that they have ended."""
        return frozenset(
            replica
            for replica in replicas
            if any(rank in self.connections and not self.is_connected(rank) for rank in self._rules.ranks((replica,)))
        )
