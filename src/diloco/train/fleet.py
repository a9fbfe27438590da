"""The replicas of this process, and their ways to all others: what a session needs to know of a transport."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from diloco.errors import TransportError
from diloco.transport.base import Transport
from diloco.transport.in_process import InProcessTransport
from diloco.transport.links import VirtualNetwork
from diloco.transport.peers.connected import Connected, join
from diloco.transport.peers.transport import PeerTransport
from diloco.transport.replica_group import ReplicaGroup

__all__ = ["Fleet", "InProcessFleet", "TorchFleet"]


class Fleet(Protocol):
    """What both kinds have."""

    @property
    def elastic(self) -> bool:
        """Whether replicas come and go."""

    @property
    def local(self) -> tuple[int, ...]:
        """Replicas that train in this process."""

    @property
    def leads(self) -> bool:
        """Whether this process evaluates and reports for all."""

    @property
    def network(self) -> VirtualNetwork | None:
        """The emulated links with a virtual clock, if there are any."""

    @property
    def failure(self) -> TransportError | None:
        """Why the replicas can't go on together, or None."""

    @property
    def joining(self) -> bool:
        """Whether the others were at work already when this process came."""

    @property
    def group(self) -> ReplicaGroup:
        """The ranks of the local replica."""

    def endpoint(self, replica: int) -> Transport:
        """The transport of a local replica."""

    def stop_step(self, step: int, *, wanted: bool) -> int | None:
        """After which step all replicas stop, once this or another process wants to; None until then."""

    def close_to_joiners(self, reason: str) -> None:
        """Let no replica join for now, for ``reason``; "" opens again."""

    def facts(self) -> dict[str, str]:
        """What is worth printing about the way to the others, by name."""

    def finish(self) -> None:
        """All is done and saved here: wait for the others to be as far, and part."""

    def close(self) -> None:
        """Part at once."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the way to the others."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""


class InProcessFleet:
    """All replicas in this process."""

    elastic = False
    joining = False
    leads = True
    group = ReplicaGroup()
    failure: TransportError | None = None

    def __init__(self, hub: InProcessTransport) -> None:
        self.hub = hub

    @property
    def local(self) -> tuple[int, ...]:
        return self.hub.view.members

    @property
    def network(self) -> VirtualNetwork | None:
        return self.hub.network

    def endpoint(self, replica: int) -> Transport:
        return self.hub.endpoint(replica)

    def stop_step(self, step: int, *, wanted: bool) -> int | None:
        return step if wanted else None

    def close_to_joiners(self, reason: str) -> None:
        pass

    def facts(self) -> dict[str, str]:
        return {}

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return self.hub.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.hub.load_state_dict(state)


class TorchFleet:
    """One replica in this process, or one rank of it that speaks for its own shard.

    Args:
        connected: the way to the others.
        group: the replica's ranks.
    """

    elastic = False
    network: VirtualNetwork | None = None

    def __init__(self, connected: Connected, group: ReplicaGroup | None = None) -> None:
        self.connected = connected
        self.transport: PeerTransport = connected.transport
        self.joining = connected.joining
        self.group = group or ReplicaGroup()

    @property
    def local(self) -> tuple[int, ...]:
        return (self.transport.replica,)

    @property
    def leads(self) -> bool:
        return bool(self.group.share(self.transport.replica == self.transport.view.members[0]))

    @property
    def failure(self) -> TransportError | None:
        return self.transport.failure

    def endpoint(self, replica: int) -> Transport:
        return self.transport

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
        if wanted:
            self.transport.ask_to_stop()
        return self.transport.stop_step()

    def close_to_joiners(self, reason: str) -> None:
        self.transport.close_to_joiners(reason)

    def facts(self) -> dict[str, str]:
        rules, wire = self.transport.rules, self.transport.policies
        entries = self.connected.table.entries
        others = "go on in a smaller view" if wire.go_on else "save and stop"
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
        self.transport.close()
        self.group.close()

    def state_dict(self) -> dict[str, Any]:
        return self.transport.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.transport.load_state_dict(state)
