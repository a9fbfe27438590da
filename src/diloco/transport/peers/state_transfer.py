"""State of fragments, given to others and taken from them, as the training thread asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from diloco.errors import TransportError
from diloco.protocol.registry import Entry
from diloco.protocol.rules import Rules
from diloco.transport.base import SnapshotSource
from diloco.transport.peers.connection_manager import ConnectionManager
from diloco.transport.peers.donor_client import Meter
from diloco.transport.peers.donor_session import DonorService
from diloco.transport.peers.state_fetch import fetch_state

__all__ = ["StateTransfer", "donors_in_turn"]


class StateTransfer:
    """One rank's part in handing over state.

    Args:
        rules: which rank this is.
        connections: whose loop does the work.
        state_bytes_per_s: what all askers get together; None: as much as the link carries.
    """

    def __init__(self, rules: Rules, connections: ConnectionManager, state_bytes_per_s: float | None) -> None:
        self._rules = rules
        self._connections = connections
        self._meter = Meter()
        self._service = DonorService(state_bytes_per_s)
        connections.services["fetch"] = self._service.serve

    @property
    def fetched_bytes(self) -> int:
        """Bytes that have come, in all fetches."""
        return self._meter.num_bytes

    def publish(self, source: SnapshotSource, version: Callable[[int], object] | None) -> None:
        """As `Transport.publish`."""
        self._service.source, self._service.version = source, version

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
            fragment: its index.
            donors: replicas to ask.
            after: rounds that must be in the state.
            members: of the present view.
            entries: where each rank listens.
            expected_bytes: a larger state is refused.

        Raises:
            TransportError: if none of the donors gives it.
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
            fetching = fetch_state(
                streams,
                addresses,
                fragment,
                after,
                rules.round_timeout_s,
                expected_bytes=expected_bytes,
                meter=self._meter,
            )
            try:
                return self._connections.call(fetching)
            except TransportError as error:  # the next group may have it
                errors.append(str(error))
        raise TransportError(" ".join(errors), replicas=there)


def donors_in_turn(donors: Sequence[int], asker: int, fragment: int, together: int = 3) -> Iterator[tuple[int, ...]]:
    """Groups of donors to ask one after the other until one gives the state; each donor is in one group.

    A donor copies its state for those who ask, so different askers begin with different donors, and so does one asker
    with each fragment. Three in a group are a majority against one that has diverged.

    >>> list(donors_in_turn([0, 1, 2, 3, 4], asker=6, fragment=0))
    [(3, 4, 0), (1, 2)]
    """
    start = (asker * together + fragment) % max(1, len(donors))
    turned = [*donors[start:], *donors[:start]]
    for first in range(0, len(turned), together):
        yield tuple(turned[first : first + together])
