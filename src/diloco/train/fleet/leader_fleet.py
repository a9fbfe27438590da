"""A replica whose ranks all hold everything: position 0 has the way to the others, and its ranks do as it does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco.errors import ReplicaLostError, TransportError
from diloco.train.fleet.torch_fleet import TorchFleet
from diloco.transport.base import Transport
from diloco.transport.leader import LeaderTransport
from diloco.transport.links import VirtualNetwork
from diloco.transport.replica_group import ReplicaGroup

__all__ = ["LeaderFleet"]


class LeaderFleet:
    """What `TorchFleet` offers, on every rank of a replica; all of it is to be called on all of them.

    Args:
        group: the replica's ranks.
        leader: position 0's way to the others; None on the other ranks.
    """

    elastic = False
    comes_back = False
    others_have_trained = True
    network: VirtualNetwork | None = None

    def __init__(self, group: ReplicaGroup, leader: TorchFleet | None) -> None:
        self.group = group
        self.transport = LeaderTransport(group, None if leader is None else leader.transport)
        self.joining = bool(group.share(leader is not None and leader.joining))
        self._leader = leader

    @property
    def local(self) -> tuple[int, ...]:
        return (self.transport.replica,)

    @property
    def leads(self) -> bool:
        return bool(self._told(lambda leader: leader.leads))

    @property
    def failure(self) -> TransportError | None:
        words = self._told(lambda leader: str(leader.failure or ""))
        return ReplicaLostError(words) if words else None

    def endpoint(self, replica: int) -> Transport:
        return self.transport

    def held_steps(self) -> dict[int, int]:
        """Replica -> the newest step that it could resume from; -1 for none."""
        return {int(rank): step for rank, step in self._told(lambda leader: leader.held_steps()).items()}

    def join(self, timeout_s: float) -> int:
        """Become a member; the inner steps that are done."""
        self.joining = False
        return int(self._told(lambda leader: leader.join(timeout_s)))

    def stop_step(self, step: int, *, wanted: bool) -> int | None:
        somebody = self.group.any(wanted)
        agreed: int | None = self._told(lambda leader: leader.stop_step(step, wanted=somebody))
        return agreed

    def close_to_joiners(self, reason: str) -> None:
        if self._leader is not None:
            self._leader.close_to_joiners(reason)

    def facts(self) -> dict[str, str]:
        return dict(self._told(lambda leader: leader.facts()))

    def finish(self) -> None:
        self._told(lambda leader: leader.transport.meet("finished", 0) and None)
        self.close()

    def close(self) -> None:
        if self._leader is not None:
            self._leader.close()
        self.group.close()

    def state_dict(self) -> dict[str, Any]:
        return {} if self._leader is None else self._leader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._leader is not None:
            self._leader.load_state_dict(state)

    def _told(self, ask: Any) -> Any:
        """What ``ask`` gives on position 0's fleet, on all ranks."""
        leader = self._leader
        return self.group.done_by_leader(lambda: None if leader is None else ask(leader))
