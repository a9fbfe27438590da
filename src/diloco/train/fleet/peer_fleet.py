"""One replica in processes of its own, which may lose the others and come back."""

from __future__ import annotations

import abc
import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from diloco.errors import RendezvousError, ReplicaLostError, TransportError
from diloco.events import Event
from diloco.membership.quorum import enough_without
from diloco.membership.reports import NextView
from diloco.membership.view import View
from diloco.protocol.fields import Fields
from diloco.train.fleet.base import Fleet
from diloco.transport.base import Transport
from diloco.transport.leader import LeaderTransport
from diloco.transport.peers.connected import Connected, join
from diloco.transport.peers.transport import PeerTransport
from diloco.transport.replica_group import ReplicaGroup
from diloco.waiting import waiting_for

__all__ = ["PeerFleet"]

Answer = TypeVar("Answer")


class PeerFleet(Fleet):
    """One rank of a replica, and its way to the other replicas.

    Where every rank holds the whole replica, position 0 talks to the other replicas and the others get its answers
    (``led``); every method must then be called on all ranks. Where a rank holds a shard, it talks for itself.

    Args:
        connected: the way to the others; None on a rank for which position 0 talks.
        group: the ranks of the replica; None: this one alone.
        led: whether position 0 talks for all of them.
    """

    connected: Connected  # the way to the others, where this rank has one, as the next
    transport: PeerTransport
    _endpoint: Transport

    def __init__(self, connected: Connected | None, group: ReplicaGroup | None = None, *, led: bool = False) -> None:
        self.group = group or ReplicaGroup()
        self._led = self.group if led else ReplicaGroup()
        self._talks = connected is not None
        self._changed = threading.Condition()
        self._news: list[NextView] = []
        self._lost_view: View | None = None
        self.gathering = False  # whether too few have come so far to a view that was founded after all were lost
        self._link_words: Mapping[int, str] = {}
        self.joining = False  # whether the others were at work already when this process came, or came back
        if connected is not None:
            self._connect(connected)
        if led:
            self._endpoint = LeaderTransport(self.group, connected.transport if connected else None)
        self.joining = bool(self._ask(lambda: self.joining))

    def _connect(self, connected: Connected) -> None:
        """Go by a new way to the others."""
        self.connected = connected
        self.transport = connected.transport
        self._endpoint = connected.transport
        self.transport.on_change = self._follow
        self.joining = connected.joining

    def _ask(self, question: Callable[[], Answer]) -> Answer:
        """The answer of the rank that talks for this one."""
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
        if self._led.size == 1:
            return self.transport.failure
        words = self._ask(lambda: str(self.transport.failure or ""))
        return ReplicaLostError(words) if words else None

    def close_to_joiners(self, reason: str) -> None:
        if self._talks:
            self.transport.close_to_joiners(reason)

    def state_dict(self) -> dict[str, Any]:
        return self.transport.state_dict() if self._talks else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._talks:
            self.transport.load_state_dict(state)

    # What the training loop asks between two steps.

    def take_news(self) -> tuple[NextView, ...]:
        """The views adopted since this was last asked."""
        with self._changed:
            taken, self._news = self._news, []
            return tuple(taken)

    def take_words(self) -> str:
        """Other changes in this process since the last call, in words; "" for none."""
        ways = self.transport.link_words if self._talks else {}
        news = {replica: way for replica, way in ways.items() if self._link_words.get(replica) != way}
        self._link_words = {**self._link_words, **news}
        sentences = [f"Payloads to replica {replica} go over {way}." for replica, way in sorted(news.items())]
        return " ".join(sentences)

    @property
    def view(self) -> View:
        """Who takes part now."""
        return self._endpoint.view

    def tell_speed(self, steps_per_s: float) -> None:
        """Tell the other members how many inner steps per second this replica takes."""
        self.transport.tell_speed(steps_per_s)

    def speeds(self) -> Mapping[int, float]:
        """Replica -> inner steps per second, of the other members that have told theirs."""
        return self.transport.speeds()

    def time_left_s(self, overlap_steps: int) -> float | None:
        """How long this replica can still train before somebody stands still for it; see `PeerTransport`."""
        return self.transport.time_left_s(overlap_steps)

    def note(self, **seen: Any) -> None:
        """Publish facts about this replica for people who watch the run."""
        return None

    def tell(self, event: Event) -> None:
        """Let people who watch the run hear of an event."""
        return None

    def wait_for_start(self, stopped: Callable[[], bool]) -> None:
        """Wait until enough replicas are there for training to begin, or ``stopped`` says so."""
        return None

    def leave_soon(self) -> None:
        """The user asked to stop: leave within seconds where the others go on; work that is not shared is kept."""
        return None

    # Becoming a member, and again.

    @property
    def others_have_trained(self) -> bool:
        """For a joiner: whether there is a state to take over."""
        return True

    @property
    def sees_others(self) -> bool:
        """Whether a connection to another replica stands."""
        return bool(self._ask(self._sees_others))

    def _sees_others(self) -> bool:
        rules = self.transport.rules
        return any(rules.replica_of(rank) != rules.replica for rank in self.transport.connections.connected)

    def held_steps(self) -> dict[int, int]:
        """Rank -> the newest step that it could resume from; -1 for none."""
        entries = self._ask(lambda: [[rank, e.held_step] for rank, e in self.connected.table.entries.items()])
        return {int(rank): int(step) for rank, step in entries}

    def join(self, timeout_s: float) -> int:
        """Become a member of the run that is going on; returns the number of inner steps done.

        Raises:
            RendezvousError: if the members refuse, or do not answer in time.
        """
        step = int(self._ask(lambda: join(self.connected, timeout_s)))
        if self._talks:
            try:
                self._hear(self.transport.welcome_note)
            except ValueError as error:
                raise RendezvousError(
                    f"The note with which the others let this replica in can't be read: {error}. It does not take part."
                ) from error
        self.joining = False
        return step

    def _hear(self, told: Mapping[str, Any]) -> None:
        """What `_follow` of a member returned when this replica joined; nothing where that had just begun.

        Raises:
            ValueError: a field is missing or is not what it should be.
        """
        if members := set(Fields(told).ranks("gathers") if told else ()):
            self._lost_view, self.gathering = View(self.transport.view.id, tuple(sorted(members))), True

    def rejoin(self, patience_s: float) -> None:
        """After the others were lost: find them, to join them, or found another view for those who look, too.

        Raises:
            TransportError: if nobody is found in time, or they refuse. It may be called again.
        """
        lost, state = self.transport, self.state_dict()
        last = lost.last_view or self._lost_view
        assert last is not None, "only a member can lose the others"
        if self.gathering and self._lost_view is not None:  # nobody trained in the view that too few came to
            last = dataclasses.replace(self._lost_view, id=last.id)
        self._lost_view, self.gathering = last, False
        self._connect(self._connect_again(self._lost_view, patience_s))
        self.gathering = not self.joining
        self.transport.sent_bytes, self.transport.received_bytes = lost.sent_bytes, lost.received_bytes
        self.transport.step = lost.step
        if not self.joining:
            self.load_state_dict(state)

    @abc.abstractmethod
    def _connect_again(self, last: View, patience_s: float) -> Connected:
        """Close the transport and find the others, or found the view after ``last`` with those who look, too.

        A failure leaves nothing open but what the next try needs to be found where this process was.
        """

    def gather(self, timeout_s: float) -> None:
        """In a view that was founded after all were lost: wait until nobody else can be going on from the last one.

        Raises:
            RendezvousError: if too few come in time.
        """
        if not self.gathering:
            return
        last = self._lost_view
        assert last is not None, "the others were lost"

        def awaited() -> str:
            return f"enough of replicas {', '.join(map(str, last.members))} to be back"

        with waiting_for(awaited, timeout_s), self._changed:
            self._changed.wait_for(lambda: self._enough(self.transport.view) or self.failure is not None, timeout_s)
        if not self._enough(self.transport.view):
            missing = ", ".join(str(each) for each in last.members if each not in self.transport.view.members)
            raise RendezvousError(
                f"Too few of replicas {', '.join(map(str, last.members))} came back; missing: {missing}. They may "
                "be training without this one, which takes no step until more are back. Start the missing ones."
            )
        self.gathering = False

    def _enough(self, view: View) -> bool:
        """Whether so many of the view that was lost are in ``view`` that the rest of them can't be going on."""
        last = self._lost_view
        return last is None or enough_without(last, {*last.members} - {*view.members}, self.transport.policies.quorum)

    def tell_finished(self) -> None:
        """All steps are done: tell those who come back later. That may fail."""
        if not self._talks:
            return
        try:
            self.connected.finish()
        except Exception:  # of the DHT, whose errors have no common root
            logging.getLogger(__name__).debug("telling that the run is over failed", exc_info=True)

    def _follow(self, following: NextView) -> Mapping[str, Any]:
        """In the control thread: a view was adopted. Returns what those who join with it are told."""
        with self._changed:
            lacks = self.gathering and following.view is not None and not self._enough(following.view)
            if following.view is not None:
                self._news.append(dataclasses.replace(following, reason=self.transport.reason))
            self._changed.notify_all()
            return {"gathers": list(self._lost_view.members) if lacks and self._lost_view else []}
