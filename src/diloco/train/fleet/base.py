"""What a session needs to know of the replicas of its process and of their way to the others."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

from diloco.data.assignment import Assignment
from diloco.errors import TransportError
from diloco.transport.base import Transport
from diloco.transport.in_process import InProcessTransport
from diloco.transport.links import VirtualNetwork
from diloco.transport.replica_group import ReplicaGroup

__all__ = ["Fleet", "InProcessFleet"]


class Fleet(abc.ABC):
    """The replicas of this process. The defaults suit a fixed number of them."""

    in_one_process: bool = False  # whether these are all replicas of the run
    elastic: bool = False  # whether replicas come and go
    comes_back: bool = False  # whether this process looks for the others when it has lost them
    group: ReplicaGroup = ReplicaGroup()  # the ranks of the local replica

    @property
    @abc.abstractmethod
    def local(self) -> tuple[int, ...]:
        """Numbers of the replicas that train in this process."""

    @property
    @abc.abstractmethod
    def num_members(self) -> int:
        """How many replicas take part, in all processes; the planned number unless the fleet is elastic."""

    @property
    def leads(self) -> bool:
        """Whether this process evaluates and reports for all."""
        return True

    @property
    def network(self) -> VirtualNetwork | None:
        """The emulated links with a virtual clock, if there are any."""
        return None

    @property
    def failure(self) -> TransportError | None:
        """Why the replicas can't go on together, or None."""
        return None

    @abc.abstractmethod
    def endpoint(self, replica: int) -> Transport:
        """The transport of a local replica."""

    def take_assignments(self) -> tuple[Assignment, ...]:
        """What the sampler draws by from now on, if that has changed, as it does where replicas come and go."""
        return ()

    def stop_step(self, step: int, *, wanted: bool) -> int | None:
        """The step after which all replicas stop, once this or another process wants to; None until then."""
        return step if wanted else None

    def close_to_joiners(self, reason: str) -> None:
        """Let no replica join for now, for ``reason``; "" opens again."""
        return None

    def facts(self) -> dict[str, str]:
        """What to print about the way to the others, by name."""
        return {}

    def finish(self) -> None:
        """All is done and saved here: wait for the others to be as far, and part."""
        return None

    def close(self) -> None:
        """Part at once."""
        return None

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the way to the others."""

    @abc.abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""


class InProcessFleet(Fleet):
    """All replicas of the run, in this process."""

    in_one_process = True

    def __init__(self, hub: InProcessTransport) -> None:
        self.hub = hub

    @property
    def local(self) -> tuple[int, ...]:
        return self.hub.view.members

    @property
    def num_members(self) -> int:
        return len(self.local)

    @property
    def network(self) -> VirtualNetwork | None:
        return self.hub.rounds.network

    def endpoint(self, replica: int) -> Transport:
        return self.hub.endpoint(replica)

    def state_dict(self) -> dict[str, Any]:
        return self.hub.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.hub.load_state_dict(state)
