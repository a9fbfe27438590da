"""The replicas of this process, and their ways to all others: what a session needs to know of a transport."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from diloco.errors import TransportError
from diloco.transport.base import Transport
from diloco.transport.in_process import InProcessTransport
from diloco.transport.links import VirtualNetwork
from diloco.transport.replica_group import ReplicaGroup

__all__ = ["Fleet", "InProcessFleet"]


class Fleet(Protocol):
    """What all kinds have."""

    @property
    def elastic(self) -> bool:
        """Whether replicas come and go."""

    @property
    def comes_back(self) -> bool:
        """Whether this process looks for the others when it has lost them; see `Returning`."""

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
    comes_back = False
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
