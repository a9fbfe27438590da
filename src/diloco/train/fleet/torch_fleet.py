"""One replica over torch.distributed, as a session sees it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from diloco.membership.view import View
from diloco.train.fleet.returning import Returning
from diloco.transport.peers.connected import Connected, join
from diloco.transport.peers.streams import TcpStreams
from diloco.transport.replica_group import ReplicaGroup
from diloco.transport.torch_distributed.connect import Place, TcpWire, connect_again

__all__ = ["TorchFleet"]


class TorchFleet(Returning):
    """One replica in this process, or one rank of it that speaks for its own shard.

    Args:
        connected: the way to the others.
        place: which rank this is.
        wire: how it is connected.
        group: the replica's ranks.
    """

    elastic = False

    def __init__(self, connected: Connected, place: Place, wire: TcpWire, group: ReplicaGroup | None = None) -> None:
        self._place = place
        self._wire = wire
        self.group = group or ReplicaGroup()
        self.comes_back = wire.comes_back
        self._listening: socket.socket | None = None
        super().__init__(connected)

    def _go_by(self, connected: Connected) -> None:
        super()._go_by(connected)
        self.transport.on_change = self._note_view

    def _look_again(self, last: View, patience_s: float) -> Connected:
        if self._listening is None:
            streams = self.transport.connections.streams
            assert isinstance(streams, TcpStreams)
            self._listening = streams.keep()
        self.transport.close()
        listening = self._listening.dup()
        connected = connect_again(self._place, self._wire, self.connected, listening, last, patience_s)
        self._let_go()
        return connected

    def _let_go(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    @property
    def leads(self) -> bool:
        return bool(self.group.share(self.transport.replica == self.transport.view.members[0]))

    def held_steps(self) -> dict[int, int]:
        """Rank -> the newest step that it could resume from; -1 for none."""
        return {rank: entry.held_step for rank, entry in self.connected.table.entries.items()}

    @property
    def others_have_trained(self) -> bool:
        """For a joiner: whether there is a state to take over."""
        return True

    def join(self, timeout_s: float) -> int:
        """Become a member; the inner steps that are done."""
        self.joining = False
        return join(self.connected, timeout_s)

    def stop_step(self, step: int, *, wanted: bool) -> int | None:
        if wanted and self.comes_back and (self.failure is not None or self.transport.last_view is None):
            return step  # there is nobody to agree with
        if wanted:
            self.transport.ask_to_stop()
        return self.transport.stop_step()

    def facts(self) -> dict[str, str]:
        rules, wire = self.transport.rules, self.transport.policies
        entries = self.connected.table.entries
        others = "go on in a smaller view" if wire.go_on else "save and stop"
        if self.comes_back:
            others += ", and it comes back to them by itself"
        return {
            "replica": f"{rules.replica}, in a process of its own; {len(entries)} processes in all",
            "control addresses": ", ".join(f"{rank} at {entry.address}" for rank, entry in sorted(entries.items())),
            "payload links": f"gloo, {wire.streams} streams to each replica, pieces of {rules.piece_bytes:,} bytes",
            "lost replicas": (
                f"noticed when their process ends, or after {self.transport.timing.silence_s:g} s of silence; the "
                f"others {others}"
            ),
        }

    def finish(self) -> None:
        self.transport.meet("finished", 0)
        self.close()

    def close(self) -> None:
        self._let_go()
        self.transport.close()
        self.group.close()

    def state_dict(self) -> dict[str, Any]:
        return self.transport.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.transport.load_state_dict(state)
