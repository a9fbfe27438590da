"""Giving this rank's state away and taking over that of others, as the training thread asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diloco.errors import TransportError
from diloco.protocol.registry import Entry
from diloco.protocol.rules import Rules
from diloco.transport.base import SnapshotSource
from diloco.transport.peers.connection_manager import ConnectionManager
from diloco.transport.peers.state_choice import donors_in_turn
from diloco.transport.peers.state_fetch import Meter, fetch_state
from diloco.transport.peers.state_service import serve_state

__all__ = ["StateDesk"]


class StateDesk:
    """State of fragments, to and from this rank.

    Args:
        rules: who I am.
        connections: whose loop does the work.
        state_bytes_per_s: what those who ask get together; None: as much as the way carries.
    """

    def __init__(self, rules: Rules, connections: ConnectionManager, state_bytes_per_s: float | None) -> None:
        self._rules = rules
        self._connections = connections
        self.meter = Meter()
        self._publication = serve_state(connections, state_bytes_per_s)

    def publish(self, source: SnapshotSource, version: Callable[[int], object] | None) -> None:
        """As `Transport.publish`."""
        self._publication.source, self._publication.version = source, version

    def fetch(
        self,
        fragment: int,
        donors: Sequence[int],
        after: int,
        *,
        members: Sequence[int],
        entries: Mapping[int, Entry],
        expected_bytes: int | None,
    ) -> Mapping[str, Any]:
        """As `Transport.fetch`.

        Args:
            fragment: of which.
            donors: replicas to ask.
            after: the state may not be from before so many rounds.
            members: of the present view.
            entries: where each rank listens.
            expected_bytes: more than this is refused.

        Raises:
            TransportError: if none of the donors gave it.
        """
        rules, streams = self._rules, self._connections.streams
        size = rules.ranks_per_replica
        ranks = {donor: donor * size + rules.rank % size for donor in donors if donor != rules.replica}
        there = [donor for donor in ranks if donor in members and ranks[donor] in entries]
        if not there:
            raise TransportError(
                f"replica {', '.join(map(str, donors))} was asked for fragment {fragment}, but is no other member of "
                f"the view {tuple(members)}.",
                replicas=donors,
            )
        errors = []
        for group in donors_in_turn(there, rules.replica, fragment):
            addresses = {donor: streams.address(entries[ranks[donor]].address) for donor in group}
            timeout_s = rules.round_timeout_s
            fetching = fetch_state(
                streams, addresses, fragment, after, timeout_s, expected_bytes=expected_bytes, meter=self.meter
            )
            try:
                return self._connections.call(fetching)
            except TransportError as error:  # the next ones may answer
                errors.append(str(error))
        raise TransportError(" ".join(errors), replicas=there)
