"""`PeerTransport`: one rank's way to the others, as the training thread sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from diloco.algorithm.averaging import Contribution, RoundId
from diloco.errors import ReplicaLostError, TransportError
from diloco.membership.change import NextView
from diloco.membership.view import View
from diloco.protocol.failure_detector import Loss, Timing
from diloco.protocol.messages import next_view
from diloco.protocol.registry import Entry, Registry
from diloco.protocol.rules import Policies, Rules
from diloco.transport.address import Address
from diloco.transport.base import Average, Fetching, Pending, SnapshotSource, Transport
from diloco.transport.links import Link
from diloco.transport.peers.agreement import Agreement
from diloco.transport.peers.connection_manager import ConnectionManager
from diloco.transport.peers.data_link import OpenLink
from diloco.transport.peers.dispatch import Dispatch
from diloco.transport.peers.joining import Joining
from diloco.transport.peers.meetings import Meetings
from diloco.transport.peers.pending import PeerPending
from diloco.transport.peers.postman import Postman
from diloco.transport.peers.round_desk import RoundDesk
from diloco.transport.peers.speeds import Speeds, speed_message
from diloco.transport.peers.state_transfer import StateTransfer
from diloco.transport.peers.streams import Streams
from diloco.transport.peers.threads import Mailbox, Threads, in_thread
from diloco.transport.peers.views import ViewKeeper
from diloco.transport.shaping import Pacer

__all__ = ["PeerTransport"]

_LEAVING_S = 3.0
_ENDING_S = 2.0  # of what waits for links that have ended; one still being made may take longer, and does no harm


class PeerTransport(Transport):
    """Replicas in processes of their own.

    Contributions leave in the background as soon as they are handed in; `Pending.wait` waits for what is left. All
    methods are for the training thread.

    Args:
        rules: who I am, and how rounds go.
        policies: what happens when replicas are lost.
        timing: of heartbeats.
        streams: of control connections.
        link: emulated, at this end; None: none.
        together: whether all stop when one has to; else each goes its own way.
        state_bytes_per_s: what those who take over this rank's state get together; None: as much as the way carries.

    Attributes:
        address: of this rank's control port.
        step: inner steps that this rank has begun to synchronise; see `tick`.
        on_change: called with every next view, in the control thread; what it gives is told to those who join with it.
        last_transfer: bytes of a contribution, and seconds until its round was decided; None: none yet.
        digests: by fragment, of the state that this rank contributed from last.
        joining: asks those who are members to let this rank be one; see `enter`.
        on_introduction: called with the entry of somebody who can't open a connection to this rank and wants one.
        run_is_over: whether others have said that they have finished the run, while this rank was no member.
        welcome_note: what the others' `on_change` gave when this rank joined.
    """

    def __init__(
        self,
        rules: Rules,
        policies: Policies,
        timing: Timing,
        streams: Streams,
        link: Link | None = None,
        *,
        together: bool = True,
        state_bytes_per_s: float | None = None,
    ) -> None:
        self.rules = rules
        self.policies = policies
        self._together = together
        self.replica = rules.replica
        self.step = 0
        self.on_change: Callable[[NextView], Mapping[str, Any] | None] = lambda following: None
        self.run_is_over = False
        self.welcome_note: Mapping[str, Any] = {}
        self.on_introduction: Callable[[Entry], None] = lambda entry: None
        self.last_transfer: tuple[int, float] | None = None
        self.mailbox = Mailbox()
        self._threads = Threads()
        self._postman = Postman(Pacer(link) if link else None)
        self.timing = replace(timing, latency_s=link.latency_s if link else 0.0)
        self.connections = ConnectionManager(rules.rank, self.timing, self._deliver, self._lost, streams)
        self._state = StateTransfer(rules, self.connections, state_bytes_per_s)
        self._meetings = Meetings(rules.rank, self._tell, self.connections.post, self._present, lambda: self.step)
        self._agreement = Agreement(rules, self.connections, self._present, self._meetings.changed)
        self._rounds = RoundDesk(rules.replica, self._missing, self._taken)
        self.digests = self._rounds.digests
        self._keeper: ViewKeeper | None = None
        self._speeds = Speeds()
        self.joining = Joining(self.connections)
        self._dispatch = Dispatch(
            rules.ranks_per_replica,
            self.connections,
            self.mailbox,
            self._meetings,
            self.joining,
            self._speeds,
            self._agreement,
            lambda entry: self.on_introduction(entry),
        )
        self._finished = False
        self._others_go_on = False
        self._closed = False

    @property
    def address(self) -> Address:
        return self.connections.address

    @property
    def failure(self) -> TransportError | None:
        """Why no round takes place any more, or None."""
        return self._keeper.failure if self._keeper else None

    # Rounds.

    def average(self, contribution: Contribution) -> Pending:
        keeper, step = self._keeper, self.step
        assert keeper is not None, "connect comes first"

        def begin(contribution: Contribution, pending: PeerPending) -> None:
            self.connections.post(keeper.intake.begin, contribution, pending, step)

        return self._rounds.hand_in(contribution, self._guard_s(), begin)

    def tick(self) -> None:
        """One inner step is done; rounds sent from now on belong to the next."""
        self.step += 1

    def agree(self, facts: Mapping[str, str]) -> None:
        self._agreement.agree(facts, self.rules.round_timeout_s)

    def publish(self, source: SnapshotSource, version: Callable[[int], object] | None = None) -> None:
        self._state.publish(source, version)

    def fetch(self, fragment: int, donors: Sequence[int], expected_bytes: int | None = None) -> Mapping[str, Any]:
        return self._fetch(fragment, donors, expected_bytes)()

    @property
    def fetched_bytes(self) -> int:
        return self._state.fetched_bytes

    def fetch_beside(self, fragment: int, donors: Sequence[int], expected_bytes: int | None = None) -> Fetching:
        if self.rules.ranks_per_replica > 1:  # its ranks take over together, at one step
            return super().fetch_beside(fragment, donors, expected_bytes)
        return in_thread(self._fetch(fragment, donors, expected_bytes), f"diloco-state-{fragment}")

    def _fetch(
        self, fragment: int, donors: Sequence[int], expected_bytes: int | None
    ) -> Callable[[], Mapping[str, Any]]:
        """What fetches, from those who are members now; for any thread."""
        after = self._rounds.decided_rounds(fragment)
        members, entries = self.view.members, dict(self._registry.entries)
        return lambda: self._state.fetch(
            fragment, donors, after, members=members, entries=entries, expected_bytes=expected_bytes
        )

    @property
    def last_view(self) -> View | None:
        """The newest view that this rank was a member of, or has agreed to be; None: none yet."""
        return self._keeper.last_view if self._keeper else None

    @property
    def reason(self) -> str:
        """Why the present view is not the one before."""
        return self._keeper.reason if self._keeper else ""

    def known_entries(self) -> tuple[Entry, ...]:
        """Of all others that are members, or have been or wanted to be."""
        return tuple(entry for rank, entry in self._registry.entries.items() if rank != self.rules.rank)

    @property
    def closed_to_joiners(self) -> str:
        """Why nobody can join for now; "" where all can."""
        return self._keeper.attendance.closed_to_joiners if self._keeper else ""

    def close_to_joiners(self, reason: str) -> None:
        """Let nobody join for now, for ``reason``; "" opens again."""
        assert self._keeper is not None, "connect comes first"
        self._keeper.attendance.closed_to_joiners = reason

    # How fast the members train.

    def tell_speed(self, steps_per_s: float) -> None:
        """Tell the other members that this replica takes so many inner steps a second."""
        assert self._keeper is not None, "connect comes first"
        self.connections.post(self._keeper.tell, speed_message(steps_per_s))

    def speeds(self) -> Mapping[int, float]:
        """Replica -> inner steps per second, of those other members that have told."""
        return self._speeds.known

    # Stopping and meeting.

    def ask_to_stop(self) -> None:
        """Let `stop_step` of every rank agree on a step soon."""
        self._meetings.ask_to_stop(self.timing.silence_s)

    def stop_step(self) -> int | None:
        """As `Meetings.stop_step`."""
        return self._meetings.stop_step(self._guard_s())

    def meet(self, name: str, value: int) -> dict[int, int]:
        """As `Meetings.meet`."""
        return self._meetings.meet(name, value, self._guard_s())

    def finish(self) -> None:
        """All steps are done here: wait until the others are as far. Those that take more steps are told of the end."""
        self._finished = True
        self.connections.post(self._look_who_goes_on)
        self._meetings.meet("finished", self.step, self._guard_s(), unless=lambda: self._others_go_on)
        if self._others_go_on:
            self.leave()

    def leave(self) -> None:
        """Tell the others that this replica leaves, and wait until they have heard it; they go on without it."""
        if self._keeper is None or self.failure is not None:
            return
        members = set(self.view.members) - {self.replica}
        with contextlib.suppress(TimeoutError):  # the others find out, then
            self.connections.call(_called(self._tell_leaving, self._keeper), _LEAVING_S)
        with self._meetings.changed:
            self._meetings.changed.wait_for(lambda: not self.connections.connected & members, _LEAVING_S)

    def leave_at_once(self) -> None:
        """Tell the others that this replica leaves, and wait for nothing; rounds in flight are over for it.

        From any thread.
        """
        if self._keeper is not None:
            self.connections.post(self._tell_leaving, self._keeper)

    def close(self) -> None:
        """Leave: all connections end, in seconds. The others notice, so `meet` them first where they shall not mind."""
        if self._closed:
            return
        self._closed = True
        keeper = self._keeper
        if keeper is not None:
            left = TransportError(f"replica {self.replica} has closed its transport")
            with contextlib.suppress(TimeoutError):
                self.connections.call(_called(keeper.close, left), _ENDING_S)
        self.mailbox.close("the transport was closed")
        self.connections.close()
        self._postman.close(_ENDING_S)
        self._threads.join(_ENDING_S)
        self._rounds.close()

    def state_dict(self) -> dict[str, Any]:
        """Traffic and steps; contributions in flight are kept by who sent them."""
        return {"traffic": [self.sent_bytes, self.received_bytes], "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.sent_bytes, self.received_bytes = map(int, state["traffic"])
        self.step = int(state["step"])

    # Called by `connect`.

    def begin(self, view: View, registry: Registry, open_link: OpenLink, *, member: bool, closed: str = "") -> None:
        """The control connections stand: open ``view``, or, for one who is no member yet, only look at it.

        Args:
            view: the first one.
            registry: of all ranks; kept up to date from now on.
            open_link: makes payload connections.
            member: whether this rank is in the view.
            closed: why nobody can join at first; "": all can.
        """
        self.view = view
        self._registry = registry
        self.connections.call(_called(self._begin, view, open_link, member, closed))

    def enter(self, answer: Mapping[str, Any]) -> None:
        """Take part in the view that a welcome names: an answer of `joining`."""
        self.connections.call(_called(self._enter, answer))

    # In the control thread.

    def _begin(self, view: View, open_link: OpenLink, member: bool, closed: str) -> None:
        keeper = ViewKeeper(
            view,
            self.rules,
            self.policies,
            self.connections,
            self._postman,
            self._threads,
            open_link,
            self.mailbox,
            lambda: self.step,
            self._changed,
        )
        self._keeper = keeper
        keeper.attendance.closed_to_joiners = closed
        if member:
            keeper.open(view, 0)
        for sender, message, blob in self._dispatch.begin(keeper, self._registry):
            self._deliver(sender, message, blob)

    def _enter(self, answer: Mapping[str, Any]) -> None:
        following = next_view(answer, self.view)
        assert self._keeper is not None
        assert following.view is not None
        self.welcome_note = answer.get("note") or {}
        self.step = following.from_step - 1
        self.view = following.view
        self._keeper.enter(following, answer["lineup"])

    def _deliver(self, sender: int, message: dict[str, Any], blob: bytes) -> None:
        self._dispatch.deliver(sender, message, blob)
        self._stop_if_failed()
        if self._finished:
            self._look_who_goes_on()

    def _lost(self, rank: int, loss: Loss) -> None:
        if self._keeper is not None:
            self._keeper.attendance.lose(rank, loss)
        self._stop_if_failed()
        self._meetings.notice()

    def _changed(self, following: NextView) -> Mapping[str, Any] | None:
        if following.view is not None:
            self.view = following.view
            self._speeds.keep(following.view.members)
        self._stop_if_failed()
        self._meetings.notice()
        return self.on_change(following)

    def _stop_if_failed(self) -> None:
        if self.failure is not None and self._together and not self.policies.raise_on_loss:
            self._meetings.stop()

    def _look_who_goes_on(self) -> None:
        book = self._keeper.book if self._keeper else None
        if book is not None and book.goes_on_without_me():
            self._others_go_on = True
            self._meetings.notice()

    def _tell(self, message: Mapping[str, Any]) -> None:
        if self._keeper is not None:
            self._keeper.tell(message)

    def _present(self) -> set[int]:
        size, there = self.rules.ranks_per_replica, self.connections.connected | {self.rules.rank}
        return {rank for m in self.view.members for rank in range(m * size, (m + 1) * size) if rank in there}

    def _tell_leaving(self, keeper: ViewKeeper) -> None:
        keeper.leave(self.step)
        self._meetings.notice()

    # In the training thread.

    def _guard_s(self) -> float:
        """A round is decided sooner than this, or something is wrong that nothing here foresees."""
        return 3 * self.rules.round_timeout_s + 3 * self.timing.silence_s

    def _missing(self, round_id: RoundId) -> tuple[int, ...]:
        book = self._keeper.book if self._keeper else None
        return book.missing(round_id) if book else ()

    def _taken(self, pending: PeerPending, outcome: Average | TransportError) -> None:
        if isinstance(outcome, Average):
            self.sent_bytes += outcome.sent_bytes
            self.received_bytes += outcome.received_bytes
            if pending.decided_s is not None:
                self.last_transfer = pending.payload_bytes, pending.decided_s - pending.sent_s
        elif not isinstance(outcome, ReplicaLostError):
            others = len(self.view.members) - 1
            self.sent_bytes += others * pending.payload_bytes
            self.received_bytes += others * pending.payload_bytes


async def _called(function: Callable[..., object], *arguments: Any) -> None:
    """To have a function done in the control thread by `ConnectionManager.call`, which waits for it."""
    function(*arguments)
