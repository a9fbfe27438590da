"""The processes that are members of the present view, told apart from others that come in their places."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from diloco.membership.view import View
from diloco.protocol.rules import Rules
from diloco.transport.peers.connection_manager import ConnectionManager

__all__ = ["Lineup"]


class Lineup:
    """Connections of members, by rank; nobody, before there is a view.

    Args:
        rules: who I am.
        board: control connections.
    """

    def __init__(self, rules: Rules, board: ConnectionManager) -> None:
        self._rules = rules
        self._board = board
        self._connections: dict[int, object | None] = {}

    def form(self, view: View) -> None:
        """The members of ``view`` are those who are connected now, and who was a member before stays the same."""
        self._connections = {
            rank: self._connections.get(rank, self._board.connection(rank)) for rank in self.ranks(view.members)
        }

    def ranks(self, members: Sequence[int]) -> list[int]:
        """Of these replicas, in ascending order."""
        size = self._rules.ranks_per_replica
        return [rank for member in members for rank in range(member * size, (member + 1) * size)]

    def has(self, rank: int) -> bool:
        """Whether somebody of that rank is a member, connected or not."""
        return rank in self._connections

    def speaks(self, rank: int, connection: object | None) -> bool:
        """Whether what came on this connection came from the process that is a member; None: it has ended since."""
        return self.has(rank) and (connection is None or connection is self._connections[rank])

    def is_connected(self, rank: int) -> bool:
        """Whether who is connected as ``rank`` is the process that is a member."""
        return self.has(rank) and self._connections[rank] is self._board.connection(rank)

    def remember(self, connections: Mapping[int, object]) -> None:
        """Whoever was connected like this is who is meant, whoever is connected in its place now."""
        self._connections.update(connections)

    def unreached(self, view: View) -> frozenset[int]:
        """Replicas of ``view``, which is formed, to whose processes no control connection stands."""
        connected, me = self._board.connected, self._rules.replica
        return frozenset(
            m
            for m in view.members
            if m != me and not all(rank in connected and self.is_connected(rank) for rank in self.ranks((m,)))
        )

    def replaced(self, replicas: Collection[int]) -> frozenset[int]:
        """Those in whose places other processes are connected; so they have ended."""
        connected = self._board.connected
        return frozenset(
            m for m in replicas if any(rank in connected and not self.is_connected(rank) for rank in self.ranks((m,)))
        )

    def part_from(self, rank: int) -> None:
        """The process of that rank is no member any more; one that has come in its place stays connected."""
        if self.is_connected(rank):
            self._board.hang_up(rank)
        self._connections.pop(rank, None)
