"""The replicas of this process, and their ways to all others: what a session needs to know of a transport."""

from __future__ import annotations

import abc
import dataclasses
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from diloco.errors import RendezvousError, TransportError
from diloco.membership.change import NextView
from diloco.membership.quorum import enough_without
from diloco.membership.view import View
from diloco.transport.base import Transport
from diloco.transport.in_process import InProcessTransport
from diloco.transport.links import VirtualNetwork
from diloco.transport.peers.connected import Connected, join
from diloco.transport.peers.transport import PeerTransport
from diloco.transport.replica_group import ReplicaGroup
from diloco.transport.torch_distributed.connect import Place, TcpWire, connect_again
from diloco.waiting import waiting_for

__all__ = ["Fleet", "InProcessFleet", "Returning", "TorchFleet"]


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


class Returning(abc.ABC):
    """One replica in processes of its own, which may lose sight of the others and come back.

    Args:
        connected: the way to the others.

    Attributes:
        transport: that of ``connected``.
        joining: whether the others were at work already when this process came, or came back.
        last: the newest view that this replica was a member of, or had agreed to be, before it lost the others.
    """

    def __init__(self, connected: Connected) -> None:
        self._changed = threading.Condition()
        self._untold: list[NextView] = []
        self.last: View | None = None
        self._go_by(connected)

    def _go_by(self, connected: Connected) -> None:
        self.connected = connected
        self.transport: PeerTransport = connected.transport
        self.joining = connected.joining

    @abc.abstractmethod
    def _look_again(self, last: View, patience_s: float) -> Connected:
        """Find the others anew over what is known of them, or found another view with those who look, too."""

    def rejoin(self, patience_s: float) -> None:
        """After the others were lost: find them, as one who joins, or found another view for those who look, too.

        Args:
            patience_s: so long they are looked for.

        Raises:
            TransportError: if they aren't found in time, or refuse. It may be called again.
        """
        lost, state = self.transport, self.state_dict()
        self.last = lost.last_view or self.last
        assert self.last is not None, "only a member can lose the others"
        lost.close()
        self._go_by(self._look_again(self.last, patience_s))
        self.transport.sent_bytes, self.transport.received_bytes = lost.sent_bytes, lost.received_bytes
        self.transport.step = lost.step
        if not self.joining:
            self.load_state_dict(state)

    def gather(self, timeout_s: float) -> None:
        """As the founder of another view: wait until nobody else can be going on from the last one.

        Raises:
            RendezvousError: if too few come in time.
        """
        last, policy = self.last, self.transport.policies.quorum
        assert last is not None, "the others were lost"

        def enough() -> bool:
            return enough_without(last, frozenset(last.members) - {*self.transport.view.members}, policy)

        def whom() -> str:
            return f"enough of replicas {', '.join(map(str, last.members))} to be back"

        with waiting_for(whom, timeout_s), self._changed:
            self._changed.wait_for(lambda: enough() or self.failure is not None, timeout_s)
        if not enough():
            raise RendezvousError(f"replica {self.transport.replica} founded another view, and too few came to it.")

    def take_news(self) -> tuple[NextView, ...]:
        """The views that were adopted since this was asked last."""
        with self._changed:
            taken, self._untold = self._untold, []
            return tuple(taken)

    def _note_view(self, following: NextView) -> None:
        """In the control thread: a view was adopted."""
        with self._changed:
            if following.view is not None:
                self._untold.append(dataclasses.replace(following, reason=self.transport.reason))
            self._changed.notify_all()

    @property
    def failure(self) -> TransportError | None:
        return self.transport.failure

    # As in `Fleet`.

    group: ReplicaGroup
    elastic: bool
    comes_back: bool
    network: VirtualNetwork | None = None

    @property
    def local(self) -> tuple[int, ...]:
        return (self.transport.replica,)

    def endpoint(self, replica: int) -> Transport:
        return self.transport

    def close_to_joiners(self, reason: str) -> None:
        self.transport.close_to_joiners(reason)

    @abc.abstractmethod
    def join(self, timeout_s: float) -> int:
        """Become a member; the inner steps that are done."""

    @property
    @abc.abstractmethod
    def leads(self) -> bool: ...

    @abc.abstractmethod
    def stop_step(self, step: int, *, wanted: bool) -> int | None: ...

    @abc.abstractmethod
    def facts(self) -> dict[str, str]: ...

    @abc.abstractmethod
    def finish(self) -> None: ...

    @abc.abstractmethod
    def close(self) -> None: ...

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abc.abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


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
        super().__init__(connected)

    def _go_by(self, connected: Connected) -> None:
        super()._go_by(connected)
        self.transport.on_change = self._note_view

    def _look_again(self, last: View, patience_s: float) -> Connected:
        return connect_again(self._place, self._wire, self.connected, last, patience_s)

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
        self.transport.close()
        self.group.close()

    def state_dict(self) -> dict[str, Any]:
        return self.transport.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.transport.load_state_dict(state)
