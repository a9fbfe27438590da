"""The replicas of this process, and their ways to all others: what a session needs to know of a transport."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from diloco.errors import TransportError
from diloco.transport.base import Transport
from diloco.transport.in_process import InProcessTransport
from diloco.transport.links import VirtualNetwork
from diloco.transport.torch_distributed.connect import Connected, join
from diloco.transport.torch_distributed.transport import TorchTransport

__all__ = ["Fleet", "InProcessFleet", "TorchFleet"]


class Fleet(Protocol):
    """What both kinds have."""

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

    def endpoint(self, replica: int) -> Transport:
        """The transport of a local replica."""

    def stop_step(self, step: int, *, wanted: bool) -> int | None:
        """After which step all replicas stop, once this or another process wants to; None until then."""

    def close_to_joiners(self, reason: str) -> None:
        """Let no replica join for now, for ``reason``; "" opens again."""

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

    joining = False
    leads = True
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

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return self.hub.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.hub.load_state_dict(state)


class TorchFleet:
    """One replica, or one rank of it, in this process."""

    network: VirtualNetwork | None = None

    def __init__(self, connected: Connected) -> None:
        self.connected = connected
        self.transport: TorchTransport = connected.transport
        self.joining = connected.joining

    @property
    def local(self) -> tuple[int, ...]:
        return (self.transport.replica,)

    @property
    def leads(self) -> bool:
        first = self.transport.view.members[0] * self.transport.rules.ranks_per_replica
        return self.transport.rules.rank == first

    @property
    def failure(self) -> TransportError | None:
        return self.transport.failure

    def endpoint(self, replica: int) -> Transport:
        return self.transport

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

    def finish(self) -> None:
        self.transport.meet("finished", 0)
        self.transport.close()

    def close(self) -> None:
        self.transport.close()

    def state_dict(self) -> dict[str, Any]:
        return self.transport.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.transport.load_state_dict(state)
