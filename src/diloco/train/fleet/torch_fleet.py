"""The fleet of one rank of a replica over torch.distributed."""

from __future__ import annotations

import socket
from typing import cast

from diloco.membership import LastViews
from diloco.train.fleet.peer_fleet import PeerFleet
from diloco.transport import (
    Connected,
    Place,
    ReplicaGroup,
    TcpStreams,
    TcpWire,
    connect_again,
    streams_to_each,
)

__all__ = ["TorchFleet"]


class TorchFleet(PeerFleet):
    """A replica of a run with a fixed number of replicas.

    Args:
        connected: the connection to the other replicas; None on a rank for which position 0 of its replica
            communicates.
    """

    def __init__(
        self, connected: Connected | None, place: Place, wire: TcpWire, group: ReplicaGroup | None = None
    ) -> None:
        self._place = place
        self._wire = wire
        self._listening: socket.socket | None = None
        self.rejoins = wire.comes_back
        super().__init__(connected, group, led=group is not None and group.size > place.ranks_per_replica)

    @property
    def num_members(self) -> int:
        return self._place.num_replicas

    def _connect_again(self, views: LastViews, patience_s: float) -> Connected:
        if self._listening is None:
            self._listening = cast(TcpStreams, self.transport.connections.streams).keep()
        self.transport.close()
        listening = self._listening.dup()
        connected = connect_again(self._place, self._wire, self.connected, listening, views, patience_s)
        self._stop_listening()
        return connected

    def _stop_listening(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def stop_step(self, step: int, *, wanted: bool) -> int | None:
        wanted = self._led.any(wanted)
        return self._ask(lambda: self._agreed_stop_step(step, wanted=wanted))

    def _agreed_stop_step(self, step: int, *, wanted: bool) -> int | None:
        transport = self.transport
        if wanted and self.rejoins and (transport.failure is not None or transport.last_view is None):
            return step  # no other replica is left to agree with
        if wanted:
            transport.ask_to_stop()
        return transport.stop_step()

    def facts(self) -> dict[str, str]:
        return self._ask(lambda: {"replica": f"{self.transport.rules.replica}, in its own process"})

    def details(self) -> dict[str, str]:
        return self._ask(self._details)

    def _details(self) -> dict[str, str]:
        rules, policies = self.transport.rules, self.transport.policies
        entries = self.connected.table.entries
        streams = streams_to_each(self._place.num_replicas - 1)
        others = "continue in a smaller view" if policies.continue_without_lost else "save and stop"
        if self.rejoins:
            others += ", and the lost replica rejoins them by itself"
        return {
            "control addresses": ", ".join(f"{rank} at {entry.address}" for rank, entry in sorted(entries.items())),
            "payload links": f"{streams} TCP connections to each replica, pieces of {rules.piece_bytes:,} bytes",
            "lost replicas": (
                f"noticed when their process ends, or after {self.transport.timing.silence_s:g} s of silence; the "
                f"others {others}"
            ),
        }

    def finish(self) -> None:
        self._ask(lambda: self.transport.meet("finished", 0) and None)
        self.close()

    def close(self) -> None:
        self._stop_listening()
        if self._talks:
            self.transport.close()
        self.group.close()
