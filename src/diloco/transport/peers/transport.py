"""`PeerTransport`: the transport of one rank to other processes, which runs the protocol's machine."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import replace
from typing import Any

from diloco.algorithm import Contribution, RoundId, Uplink
from diloco.errors import ReplicaLostError, TransportError
from diloco.events import Event
from diloco.membership import View
from diloco.protocol import (
    Answer,
    Average,
    Entry,
    Join,
    Meet,
    Registry,
    Rules,
    Speed,
    Welcome,
    events,
)
from diloco.transport.address import Address
from diloco.transport.base import Fetching, Pending, SnapshotSource, Transport
from diloco.transport.connections.link import PeerLinks
from diloco.transport.connections.streams import Streams
from diloco.transport.peers.pending import HostCopies, PeerPending
from diloco.transport.peers.runner import ProtocolRunner
from diloco.transport.peers.state import StateTransfer
from diloco.waiting import in_thread

__all__ = ["PeerTransport"]

_LEAVING_S = 3.0
_ENDING_S = 2.0  # for threads that wait for links; one that is still opening a link may take longer, harmlessly


class PeerTransport(ProtocolRunner, Transport):
    """The transport between replicas in processes of their own.

    Contributions are sent in the background as soon as they are submitted, and `Pending.wait` waits for the rest. All
    methods are for the training thread.

    Args:
        rules: The rules of the run, and which rank this is.
        streams: How connections are opened and accepted.
        links: The class of the payload links, which the network may choose.
    """

    def __init__(self, rules: Rules, streams: Streams, links: type[PeerLinks] = PeerLinks) -> None:
        super().__init__(rules, streams, links)
        self.replica = rules.replica
        self.finishers: set[int] = set()  # replicas that have finished the run while this rank was not a member
        self.welcome_note = b""  # the result of a member's `on_change` when this rank joined
        # payload bytes of the last committed contribution, and the seconds until its round was decided; or None
        self.last_transfer: tuple[int, float] | None = None
        self.on_report: Callable[[Event], None] | None = None  # shows events to those who watch the run
        # fragment -> digest of the state behind this rank's last contribution
        self.digests: Mapping[int, str] = self._contributed.digests
        self._step_s = math.inf  # time of an inner step without waiting, measured between contributions
        # since the last contribution: the steps, when it was, and the time spent waiting for averages
        self._ticks, self._measured_s, self._waited_s = 0, time.monotonic(), 0.0
        self._merged: RoundId | None = None  # the last round whose average was taken
        self._copies = HostCopies()
        self._state = StateTransfer(self.connections)

    @property
    def address(self) -> Address:
        """The address of this rank's control port."""
        return self.connections.address

    @property
    def step(self) -> int:
        """The number of inner steps that this rank has begun to synchronise; see `tick`."""
        return self._machine.rounds.step

    @step.setter
    def step(self, step: int) -> None:
        self._machine.rounds.step = step

    @property
    def failure(self) -> TransportError | None:
        """Why this rank takes part in no more rounds, or None if it does."""
        fault = self.connections.fault
        return TransportError(fault) if fault else self._machine.views.failure

    @property
    def last_view(self) -> View | None:
        """The newest view that this rank was a member of; None before the first."""
        return self._machine.views.last_view

    @property
    def agreed_view(self) -> View | None:
        """The view after it that this rank was ready for, and that others may have adopted; or None."""
        return self._machine.views.agreed_view

    @property
    def uplink(self) -> Uplink:
        """What is known about the bandwidth with which this rank sends."""
        return self.links.uplink

    @property
    def link_descriptions(self) -> Mapping[int, str]:
        """The description of the link to each replica."""
        links, size = self.links.by_rank, self.rules.ranks_per_replica
        return {rank // size: link.description for rank, link in list(links.items()) if link.stripes}

    def known_entries(self) -> tuple[Entry, ...]:
        """Return the entries of all other ranks that are or were members, or have asked to join."""
        return tuple(entry for rank, entry in self.registry.entries.items() if rank != self.rules.rank)

    # Rounds.

    def average(self, contribution: Contribution) -> Pending:
        self.check_name(contribution)
        pending = self._contributed.add(contribution, self.rules.guard_s, self)
        if self._ticks:
            self._step_s = (pending.sent_s - self._measured_s - self._waited_s) / self._ticks
        self._ticks, self._measured_s, self._waited_s = 0, pending.sent_s, 0.0
        uplink = replace(self.uplink, window_s=contribution.transfer_steps * self._step_s)
        submitted = events.Submitted(contribution, self.step, pending.sent_s, uplink=uplink, after=self._merged)
        if contribution.payload.is_cuda:
            host, copied = self._copies.start(contribution)
            self._copies.after(copied, lambda: self._post(replace(submitted, contribution=host)), self._fail)
        else:
            self._post(submitted)
        return pending

    def tick(self) -> None:
        """Count one finished inner step. Later contributions belong to the next one."""
        self.step += 1
        self._ticks += 1

    def missing(self, round_id: RoundId) -> tuple[int, ...]:
        """Return the replicas that have not contributed to a round."""
        with self._changed:
            return self._machine.rounds.missing(round_id)

    def count(self, pending: PeerPending, outcome: Average | TransportError, waited_s: float) -> None:
        """Count the bytes of a round whose outcome is being returned, and the time for which it was waited for."""
        self._waited_s += waited_s
        if isinstance(outcome, Average):
            self._merged = pending.round
            self.sent_bytes += outcome.sent_bytes
            self.received_bytes += outcome.received_bytes
            if pending.decided_s is not None:
                self.last_transfer = pending.payload_bytes, pending.decided_s - pending.sent_s
        elif not isinstance(outcome, ReplicaLostError):
            others = len(self.view.members) - 1
            self.sent_bytes += others * pending.payload_bytes
            self.received_bytes += others * pending.payload_bytes

    def report(self, event: Event) -> None:
        if self.on_report is not None:
            self.on_report(event)

    # State.

    def publish(self, source: SnapshotSource, version: Callable[[int], object] | None = None) -> None:
        self._state.publish(source, version)

    def fetch(self, fragment: int, donors: Sequence[int], expected_bytes: int | None = None) -> Mapping[str, Any]:
        return self._fetch(fragment, donors, expected_bytes)()

    @property
    def fetched_bytes(self) -> int:
        return self._state.fetched_bytes

    def fetch_in_background(self, fragment: int, donors: Sequence[int], expected_bytes: int | None = None) -> Fetching:
        if self.rules.ranks_per_replica > 1:  # the ranks of a replica must adopt a state at the same step
            return super().fetch_in_background(fragment, donors, expected_bytes)
        return in_thread(self._fetch(fragment, donors, expected_bytes), f"diloco-state-{fragment}")

    def _fetch(
        self, fragment: int, donors: Sequence[int], expected_bytes: int | None
    ) -> Callable[[], Mapping[str, Any]]:
        """Return a function for any thread that fetches from the current members."""
        after = self._contributed.decided_rounds(fragment)
        members, entries = self.view.members, dict(self.registry.entries)
        return lambda: self._state.fetch(
            fragment, donors, after, members=members, entries=entries, expected_bytes=expected_bytes
        )

    def state_dict(self) -> dict[str, Any]:
        """Return traffic and steps. Contributions in flight are saved by the code that submitted them."""
        return {"traffic": [self.sent_bytes, self.received_bytes], "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.sent_bytes, self.received_bytes = map(int, state["traffic"])
        self.step = int(state["step"])

    # Members.

    @property
    def closed_to_joiners(self) -> str:
        """The reason for which replicas can't join at present; "" if they can."""
        return self._machine.views.closed_to_joiners

    def close_to_joiners(self, reason: str) -> None:
        """Refuse joiners for ``reason``; "" admits them again."""
        self._machine.views.closed_to_joiners = reason

    def announce_speed(self, steps_per_s: float) -> None:
        """Report to the other members how many inner steps per second this replica takes."""
        self._post(events.Announce(Speed(steps_per_s)))

    def speeds(self) -> Mapping[int, float]:
        """Return the inner steps per second that other members have reported, by replica."""
        return self._machine.speeds

    def finish(self) -> None:
        """Wait for the others after this rank's last step, or leave if they take more steps."""
        self._post(events.Announce(Meet("finished", self.step)))
        self._met("finished", unless=self._others_continue)
        if self._others_continue():
            self.leave()

    def leave(self) -> None:
        """Tell the others that this replica leaves, and wait until they have processed it."""
        if self.last_view is None or self.failure is not None:
            return
        others = {*self.rules.ranks(each for each in self.view.members if each != self.replica)}
        with contextlib.suppress(TimeoutError):  # the others then detect the loss themselves
            self._call(events.Leave(), _LEAVING_S)
        self._wait_for(lambda: not self.connections.connected & others, _LEAVING_S)

    def leave_at_once(self) -> None:
        """Leave without waiting for the others. For any thread."""
        self._post(events.Leave())

    def close(self) -> None:
        """End all connections within seconds. Operations that wait in other threads fail at once.

        The other ranks count this replica as lost unless it has left before.
        """
        if self._closed:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        left = TransportError(f"replica {self.replica} has closed its transport")
        with contextlib.suppress(TimeoutError, TransportError):  # an internal error has ended the connections
            self._call(events.Close(left), _ENDING_S)
        self._contributed.close(left)  # contributions that have not reached the machine
        self.connections.close()
        futures.wait(list(self._running), _ENDING_S)  # a thread inside PyTorch would abort a process that ends
        self._copies.close()

    # Becoming a member, for `connect` and `join`.

    def begin(self, view: View, registry: Registry, *, member: bool, closed: str = "") -> None:
        """Start in ``view``, or observe it if this rank is not a member yet. Control connections must be open.

        Args:
            registry: The entries of all ranks; updated from now on.
            closed: Why replicas can't join at first; "" if they can.
        """
        self.view, self.registry = view, registry
        self.connections.post(self.connections.trust, self.rules.ranks(view.members))
        self._call(events.Begin(view, member, closed))

    def ask_to_join(self, entry: Entry, timeout_s: float) -> Answer | None:
        """Ask all connected ranks for admission, and wait for an answer."""
        self._post(events.Announce(Join(entry)))
        self._wait_for(lambda: self._machine.answers, timeout_s)
        with self._changed:
            return self._machine.take_answer()

    def enter(self, welcome: Answer) -> None:
        """Enter the view of a welcome message."""
        message, connections = welcome
        assert isinstance(message, Welcome)
        following = message.following
        self.view, self.welcome_note = following.view, message.note
        self.connections.post(self.connections.trust, self.rules.ranks(self.view.members))
        self._call(events.Enter(following, connections))

    def _others_continue(self) -> bool:
        return self._machine.rounds.others_have_contributed()
