"""The replicas of this process and their connection to the others: in one process, or one rank of one replica."""

from __future__ import annotations

import dataclasses
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from diloco.data import Assignment, Shares
from diloco.errors import RendezvousError, ReplicaLostError, TransportError
from diloco.events import Event
from diloco.membership import LastViews, NextView, Ranks, View, enough_without
from diloco.protocol import Rules, WireMessage, decode, encode
from diloco.transport import (
    Connected,
    InProcessTransport,
    LeaderTransport,
    PeerTransport,
    Place,
    ReplicaGroup,
    TcpStreams,
    Transport,
    VirtualNetwork,
    connect_again,
    join,
)
from diloco.waiting import waiting_for

__all__ = ["Fleet", "PeerFleet", "TorchFleet", "WelcomeNote"]

Answer = TypeVar("Answer")


class Fleet:
    """The replicas of a run that all train in this process. The subclasses replace what several processes need."""

    elastic: bool = False  # whether replicas may join and leave
    rejoins: bool = False  # whether this process searches for the other replicas after losing them
    group: ReplicaGroup = ReplicaGroup()  # the ranks of the local replica

    def __init__(self, hub: InProcessTransport | None) -> None:
        self._hub = hub

    @property
    def in_one_process(self) -> bool:
        """Whether this process trains all replicas of the run."""
        return self._hub is not None

    @property
    def hub(self) -> InProcessTransport:
        """The transport of all replicas, if they train in this process."""
        assert self._hub is not None, "the replicas have processes of their own"
        return self._hub

    @property
    def local(self) -> tuple[int, ...]:
        """The numbers of the replicas that train in this process."""
        return self.hub.view.members

    @property
    def num_members(self) -> int:
        """The number of replicas in all processes: the members of an elastic fleet, else the planned number."""
        return len(self.local)

    @property
    def leads(self) -> bool:
        """Whether this process evaluates and reports for all replicas."""
        return True

    @property
    def network(self) -> VirtualNetwork | None:
        """The emulated links with a virtual clock, or None."""
        return self._hub.network if self._hub else None

    @property
    def failure(self) -> TransportError | None:
        """The reason why the replicas can't continue together, or None."""
        return None

    def endpoint(self, replica: int) -> Transport:
        """Return the transport of a local replica."""
        return self.hub.endpoint(replica)

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

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the connection for a checkpoint."""
        return self.hub.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.hub.load_state_dict(state)


class WelcomeNote(WireMessage):
    """What a member tells a replica that joins."""

    gathers: Ranks = ()  # the members of the lost view, if too few of them have come back so far
    begun: bool = False  # whether training has begun
    shares: Shares | None = None  # who draws which data, in a run whose replicas join and leave


class PeerFleet(Fleet):
    """One rank of a replica and its connection to the other replicas.

    If every rank holds the whole replica (``led``), position 0 communicates with the other replicas and shares the
    results with its ranks; every method must then be called on all ranks. A rank that holds a shard communicates for
    itself.

    Args:
        connected: the connection to the other replicas; None on a rank for which position 0 communicates.
        group: the ranks of the replica; None: this rank alone.
        led: whether position 0 communicates for all of them.
    """

    connected: Connected  # set only if this rank communicates, like `transport`
    transport: PeerTransport
    _endpoint: Transport

    def __init__(self, connected: Connected | None, group: ReplicaGroup | None = None, *, led: bool = False) -> None:
        super().__init__(None)
        self.group = group or ReplicaGroup()
        self._led = self.group if led else ReplicaGroup()
        self._talks = connected is not None
        self._changed = threading.Condition()
        self._news: list[NextView] = []
        self._lost_view: View | None = None
        self._views: LastViews | None = None  # what this replica has been and promised when it last lost its view
        self._searching = False  # whether it has lost its view and not found the others again
        self.gathering = False  # whether a view founded after a loss still has too few members
        self._reported_links: Mapping[int, str] = {}
        self.joining = False  # whether the others were already training when this process joined or rejoined
        if connected is not None:
            self._connect(connected)
        if led:
            self._endpoint = LeaderTransport(self.group, connected.transport if connected else None)
        self.joining = bool(self._ask(lambda: self.joining))

    def _connect(self, connected: Connected) -> None:
        """Use a new connection to the other replicas."""
        self.connected = connected
        self.transport = connected.transport
        self._endpoint = connected.transport
        self.transport.on_change = lambda following: encode(self._follow(following))
        self.joining = connected.joining

    def _ask(self, question: Callable[[], Answer]) -> Answer:
        """Return the answer of the rank that communicates for this one."""
        answer: Answer = self._led.done_by_leader(question)
        return answer

    @property
    def local(self) -> tuple[int, ...]:
        return (self._endpoint.replica,)

    def endpoint(self, replica: int) -> Transport:
        return self._endpoint

    @property
    def leads(self) -> bool:
        return bool(self.group.share(self._talks and self.transport.replica == self.transport.view.members[0]))

    @property
    def failure(self) -> TransportError | None:
        if self.group.size == 1:
            return self.transport.failure
        reasons = self.group.gather_texts(str(self.transport.failure or "") if self._talks else "")
        return next((ReplicaLostError(reason) for reason in reasons if reason), None)

    def close_to_joiners(self, reason: str) -> None:
        if self._talks:
            self.transport.close_to_joiners(reason)

    def state_dict(self) -> dict[str, Any]:
        return self.transport.state_dict() if self._talks else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._talks:
            self.transport.load_state_dict(state)

    # Queries of the training loop between two steps.

    def take_news(self) -> tuple[NextView, ...]:
        """Return the views adopted since the last call."""
        with self._changed:
            taken, self._news = self._news, []
            return tuple(taken)

    def take_notices(self) -> str:
        """Return sentences about other changes in this process since the last call; "" if there are none."""
        links = self.transport.link_descriptions if self._talks else {}
        news = {replica: link for replica, link in links.items() if self._reported_links.get(replica) != link}
        self._reported_links = {**self._reported_links, **news}
        sentences = [f"Payloads to replica {replica} go over {link}." for replica, link in sorted(news.items())]
        return " ".join(sentences)

    @property
    def view(self) -> View:
        """The current view."""
        return self._endpoint.view

    def announce_speed(self, steps_per_s: float) -> None:
        """Announce to the other members how many inner steps per second this replica takes."""
        self.transport.announce_speed(steps_per_s)

    def speeds(self) -> Mapping[int, float]:
        """Return the inner steps per second of each other member that has announced its speed."""
        return self.transport.speeds()

    def note(self, **seen: Any) -> None:
        """Publish facts about this replica for the status page."""
        return None

    def publish(self, event: Event) -> None:
        """Publish an event for the status page."""
        return None

    def wait_for_start(self, stopped: Callable[[], bool]) -> None:
        """Wait until there are enough replicas to start training, or ``stopped`` returns True."""
        return None

    def stop_soon(self) -> None:
        """Act on the user's request to stop as soon as it arrives, in any thread, whatever the training waits for.

        Replicas that stop together ask for it here, or one of them would wait for a round of another that has already
        asked and waits for it.
        """
        if self._talks:
            self.transport.ask_to_stop()

    # Joining and rejoining.

    @property
    def others_have_trained(self) -> bool:
        """Whether the others have a state that a joiner can adopt."""
        return True

    def gives_up(self, until_s: float) -> bool:
        """Return whether there is no connection to another replica, or `time.monotonic` has reached ``until_s``."""
        return bool(self._ask(lambda: time.monotonic() >= until_s or not self._sees_others()))

    def _sees_others(self) -> bool:
        rules = self.transport.rules
        return any(rules.replica_of(rank) != rules.replica for rank in self.transport.connections.connected)

    def held_steps(self) -> dict[int, int]:
        """Return the newest step from which each rank could resume; -1 for none."""
        entries = self._ask(lambda: [[rank, e.held_step] for rank, e in self.connected.table.entries.items()])
        return {int(rank): int(step) for rank, step in entries}

    def join(self, timeout_s: float) -> int:
        """Become a member of a running run and return the number of inner steps done.

        Raises:
            RendezvousError: if the members refuse or do not answer in time.
        """
        step = int(self._ask(lambda: join(self.connected, timeout_s)))
        if self._talks:
            try:
                self._read_welcome(decode(self.transport.welcome_note or encode(WelcomeNote()), WelcomeNote))
            except ValueError as error:
                raise RendezvousError(
                    f"The welcome note from the members can't be read: {error}. This replica does not take part."
                ) from error
        self.joining = False
        return step

    def _read_welcome(self, note: WelcomeNote) -> None:
        """Process the welcome note, which `_follow` of a member returned when this replica joined.

        The note is empty if the run had just started.
        """
        if members := set(note.gathers):
            self._lost_view, self.gathering = View(self.transport.view.id, tuple(sorted(members))), True

    def rejoin(self, patience_s: float) -> None:
        """Find the other replicas after losing them, or found another view for the replicas that also search.

        Raises:
            TransportError: if no replica is found in time, or the members refuse. The call may be repeated.
        """
        lost, state = self.transport, self.state_dict()
        if self._views is None or (lost.last_view and not self._searching):  # else what it promised earlier still holds
            last = lost.last_view or self._lost_view
            assert last is not None, "only a member can lose the others"
            if self.gathering and self._lost_view is not None:  # no replica trained in a view with too few members
                last = dataclasses.replace(self._lost_view, id=last.id)
            self._lost_view, self.gathering = last, False
            self._views = LastViews(last, lost.agreed_view)
        self._searching = True
        self._connect(self._connect_again(self._views, patience_s))
        self._searching = False
        self.gathering = not self.joining
        self.transport.sent_bytes, self.transport.received_bytes = lost.sent_bytes, lost.received_bytes
        self.transport.step = lost.step
        if not self.joining:
            self.load_state_dict(state)

    def _connect_again(self, views: LastViews, patience_s: float) -> Connected:
        """Close the transport and find the others, or found the view after ``views`` with replicas that also search.

        After a failure, only what keeps this process reachable at its address stays open for the next attempt.
        """
        raise NotImplementedError

    def gather(self, timeout_s: float) -> None:
        """Wait in a founded view until the replicas outside it are too few to continue from the lost view.

        Raises:
            RendezvousError: if too few replicas come in time.
        """
        if not self.gathering:
            return
        last = self._lost_view
        assert last is not None, "the others were lost"

        with waiting_for(lambda: f"enough of the {len(last.members)} replicas to rejoin", timeout_s), self._changed:
            self._changed.wait_for(lambda: self._enough(self.transport.view) or self.failure is not None, timeout_s)
        if not self._enough(self.transport.view):
            names = self.names()
            missing = (str(each) for each in sorted({*last.members} - {*self.transport.view.members}))
            raise RendezvousError(
                f"Too few of {len(last.members)} replicas rejoined; missing: "
                f"{', '.join(names.get(each, each) for each in missing)}. They may be training without this one, which "
                "takes no step until more have rejoined. Start the missing replicas."
            )
        self.gathering = False

    def _enough(self, view: View) -> bool:
        """Return whether ``view`` has so many members of the lost view that the rest can't continue without them."""
        last = self._lost_view
        return last is None or enough_without(last, {*last.members} - {*view.members}, self.transport.rules.policy)

    def tell_finished(self) -> None:
        """Announce that all steps are done, for replicas that rejoin later. A failure is only logged."""
        if not self._talks:
            return
        try:
            self.connected.finish()
        except Exception:  # errors of the DHT have no common base class
            logging.getLogger(__name__).debug("announcing that the run has ended failed", exc_info=True)

    def _follow(self, following: NextView) -> WelcomeNote:
        """Record an adopted view, in the control thread, and return the welcome note for the replicas that join it."""
        with self._changed:
            lacks = self.gathering and following.view is not None and not self._enough(following.view)
            if following.view is not None:
                self._news.append(dataclasses.replace(following, reason=self.transport.reason))
            self._changed.notify_all()
            return WelcomeNote(self._lost_view.members if lacks and self._lost_view else ())


class TorchFleet(PeerFleet):
    """A replica of a run with a fixed number of replicas.

    Args:
        connected: the connection to the other replicas; None on a rank for which position 0 of its replica
            communicates.
    """

    def __init__(
        self, connected: Connected | None, place: Place, rules: Rules, group: ReplicaGroup | None = None
    ) -> None:
        self._place = place
        self._rules = rules
        self._listening: socket.socket | None = None
        self.rejoins = not rules.together
        super().__init__(connected, group, led=group is not None and group.size > place.ranks_per_replica)

    @property
    def num_members(self) -> int:
        return self._place.num_replicas

    def _connect_again(self, views: LastViews, patience_s: float) -> Connected:
        if self._listening is None:
            self._listening = cast(TcpStreams, self.transport.connections.streams).keep()
        self.transport.close()
        listening = self._listening.dup()
        connected = connect_again(self._place, self._rules, self.connected, listening, views, patience_s)
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
        return {"control addresses": self._ask(self._addresses)}

    def _addresses(self) -> str:
        entries = self.connected.table.entries
        return ", ".join(f"{rank} at {entry.address}" for rank, entry in sorted(entries.items()))

    def finish(self) -> None:
        self._ask(lambda: self.transport.finish())
        self.close()

    def close(self) -> None:
        self._stop_listening()
        if self._talks:
            self.transport.close()
        self.group.close()
