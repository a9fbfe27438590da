"""The interface of a fleet, which connects a session to the other replicas, and the fleet of a single process."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

from diloco.data import Assignment
from diloco.errors import TransportError
from diloco.transport import InProcessTransport, ReplicaGroup, Transport, VirtualNetwork

__all__ = ["Fleet", "InProcessFleet"]


class Fleet(abc.ABC):
    """The replicas of this process and their connection to the others. The defaults suit a fixed number of replicas."""

    in_one_process: bool = False  # whether this process trains all replicas of the run
    elastic: bool = False  # whether replicas may join and leave
    rejoins: bool = False  # whether this process searches for the other replicas after losing them
    group: ReplicaGroup = ReplicaGroup()  # the ranks of the local replica

    @property
    @abc.abstractmethod
    def local(self) -> tuple[int, ...]:
        """The numbers of the replicas that train in this process."""

    @property
    @abc.abstractmethod
    def num_members(self) -> int:
        """The number of replicas in all processes: the members of an elastic fleet, else the planned number."""

    @property
    def leads(self) -> bool:
        """Whether this process evaluates and reports for all replicas."""
        return True

    @property
    def network(self) -> VirtualNetwork | None:
        """The emulated links with a virtual clock, or None."""
        return None

    @property
    def failure(self) -> TransportError | None:
        """The reason why the replicas can't continue together, or None."""
        return None

    @abc.abstractmethod
    def endpoint(self, replica: int) -> Transport:
        """Return the transport of a local replica."""

    def take_assignments(self) -> tuple[Assignment, ...]:
        """Return the new data assignments since the last call, which follow when replicas join or leave."""
        return ()

    def stop_step(self, step: int, *, wanted: bool) -> int | None:
        """Return the step after which all replicas stop, or None if no process wants to stop.

        Args:
            wanted: whether this process wants to stop.
        """
        return step if wanted else None

    def close_to_joiners(self, reason: str) -> None:
        """Refuse replicas that ask to join, giving ``reason``; "" admits them again."""
        return None

    def facts(self) -> dict[str, str]:
        """Return what identifies this replica, to print at the start, by name."""
        return {}

    def details(self) -> dict[str, str]:
        """Return facts about the connection to the other replicas, by name."""
        return {}

    def names(self) -> dict[str, str]:
        """Return the names of the replicas that have one, by number; no two are the same."""
        return {}

    def finish(self) -> None:
        """Wait until the other replicas have finished too, then disconnect."""
        return None

    def close(self) -> None:
        """Disconnect at once."""
        return None

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state of the connection for a checkpoint."""

    @abc.abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""


class InProcessFleet(Fleet):
    """The fleet of a run whose replicas all train in this process."""

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
        return self.hub.network

    def endpoint(self, replica: int) -> Transport:
        return self.hub.endpoint(replica)

    def state_dict(self) -> dict[str, Any]:
        return self.hub.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.hub.load_state_dict(state)
