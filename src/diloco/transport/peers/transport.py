"""`PeerTransport`: the transport of one rank to other processes, which runs the protocol's machine."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Literal

import torch.distributed as dist

from diloco.algorithm import Contribution, Mean, Uplink, payload_window_s
from diloco.errors import ConfigurationError, RendezvousError, ReplicaLostError, RoundVoidError, TransportError
from diloco.events import PeerTraffic, Site
from diloco.membership import Cause, NextView, View, names_of
from diloco.protocol import (
    Announced,
    Announcement,
    Answer,
    Average,
    Begun,
    Closed,
    ClosedToJoiners,
    Effects,
    Entered,
    Entry,
    FactsMessage,
    Join,
    Left,
    Rules,
    SiteMessage,
    Stepped,
    Store,
    Welcome,
    note,
)
from diloco.transport.address import Address
from diloco.transport.base import BackgroundTransport, Pending, SnapshotSource
from diloco.transport.connections.connection_manager import ConnectionManager
from diloco.transport.connections.control_thread import Acts
from diloco.transport.connections.links import PeerLinks
from diloco.transport.connections.sockets import TcpStreams
from diloco.transport.connections.streams import within
from diloco.transport.connections.stripe import MOST_MESSAGE_BYTES
from diloco.transport.peers.in_flight import PeerPending, RoundsInFlight
from diloco.transport.peers.state import StateTransfer
from diloco.waiting import elapsed_s, in_thread, waiting_for

_LEAVING_S = 3.0
_ENDING_S = 2.0
_MOST_CALLS = 64  # connections opened at a time for ranks that can't open them; anybody may ask for one
_STOP_TOGETHER_S = 5.0  # how long a rank that is to stop waits for others that are
_MEASURED_STEPS = 16  # inner steps of whose times the median counts


OnChange = Callable[[NextView, str, Cause], bytes]
"""Called in the control thread with each next view, and with the reason and the cause of the change as this rank has
learned them. What it returns is sent to the ranks that join with that view."""


class PeerTransport(BackgroundTransport):
    """The transport between replicas in processes of their own: the machine of a rank, and what its effects need.

    Contributions are sent in the background as soon as they are submitted, and `Pending.wait` waits for the rest.
    Public methods are for the training thread, unless they say otherwise.
    """

    def __init__(
        self,
        rules: Rules,
        streams: TcpStreams,
        links: type[PeerLinks] = PeerLinks,
        on_change: OnChange | None = None,
    ) -> None:
        self.rules = rules
        self._on_change = on_change
        self._asked_to_stop = False
        self.connections = thread = ConnectionManager(
            rules, streams, lambda peer: self.links.begin(peer), acts=self._acts, on_fault=self._end_waiting
        )
        self._machine, self._changed = thread.machine, thread.changed
        self.views = self._machine.views  # the current view, and the change to the next one
        self.post = thread.post_event  # lets the machine take in an event soon; for any thread
        self._call, self._wait_for = thread.call_event, thread.wait_for
        self._answered: Answer | None = None  # to the request to join
        self.links = links(thread)
        self._rounds = RoundsInFlight(self.links)
        self.replica = rules.replica
        self.never_opens = False  # whether replicas can't join for as long as the run lasts
        self.finishers: set[int] = set()  # replicas that have finished the run while this rank was not a member
        self.order = b""  # what joiners are told before they are welcomed, as "order"; "": nothing
        self._welcome: Welcome  # to the ranks that join with the current view, once one has followed another
        self.welcome_note = b""  # the result of a member's `OnChange` when this rank joined
        # payload bytes of the last committed contribution, and the seconds until its round was decided; or None
        self.last_transfer: tuple[int, float] | None = None
        # the times of the last inner steps without waiting; when the last one ended, and the waiting since then
        self._steps_s: deque[float] = deque(maxlen=_MEASURED_STEPS)
        self._ticked_s, self._waited_s = elapsed_s(), 0.0
        self._state = StateTransfer(self.connections)
        self._calling: set[int] = set()  # ranks to which connections are being opened, as they can't
        self._waiting: contextlib.ExitStack | None = None  # reports that a view change waits for members

    @property
    def address(self) -> Address:
        return self.connections.address

    @property
    def view(self) -> View:  # type: ignore[override]  # nobody sets it here
        return self.views.view

    @property
    def step(self) -> int:
        """The number of inner steps that this rank has begun to synchronise; see `tick`."""
        return self._machine.rounds.step

    @step.setter
    def step(self, step: int) -> None:
        self.connections.note(Stepped(step))

    @property
    def failure(self) -> TransportError | None:  # type: ignore[override]  # nobody sets it here
        fault = self.connections.fault
        return TransportError(fault) if fault else self.views.failure

    @property
    def joining(self) -> bool:  # type: ignore[override]  # nobody sets it here
        return not self.views.is_member

    @property
    def uplink(self) -> Uplink:
        """What is known about the bandwidth with which this rank sends."""
        paced = any(math.isfinite(peer.link.pace.bits_per_s) for peer in self.links.by_rank.values())
        return self.connections.meter.uplink(full=paced)

    @property
    def newest_digest(self) -> tuple[str, str]:
        """The round of this rank's newest contribution to a fragment, and the digest of the state behind it; two empty
        texts if there is none."""
        sent = [pending for fragment, pending in list(self._rounds.last.items()) if fragment >= 0]  # no gradients
        newest = max(sent, key=lambda pending: pending.sent_s, default=None)
        return ("", "") if newest is None else (str(newest.round), newest.digest)

    def ranks(self) -> Collection[int]:
        if not dist.is_initialized():
            return ()
        return range(dist.get_world_size()) if self.rules.ranks_per_replica > 1 else (dist.get_rank(),)

    def traffic_by_peer(self) -> Mapping[str, PeerTraffic]:
        size = self.rules.ranks_per_replica
        return {str(rank // size): peer.link.traffic() for rank, peer in self.links.by_rank.items()}

    def entries(self) -> dict[int, Entry]:
        """Return what is known of all ranks, this one included, in ascending order. For any thread."""
        return dict(sorted(self.connections.entries.items()))  # at once, as the control thread changes them

    def names(self) -> Mapping[str, str]:
        known = {rank: entry.name for rank, entry in self.entries().items() if entry.name}
        counts = Counter(known.values())
        return {str(rank): name if counts[name] == 1 else f"{name}/{rank % 10_000}" for rank, name in known.items()}

    # Rounds.

    def average(
        self,
        contribution: Contribution,
        ready: Future[Any] | None = None,
        on_mean: Callable[[Mean], None] | None = None,
    ) -> Pending:
        before = self._rounds.last.get(contribution.round.fragment)
        again = before is not None and before.round == contribution.round and not before.void
        self.check(contribution, again=again)
        if contribution.extra_bytes > MOST_MESSAGE_BYTES:
            raise ConfigurationError(
                f"The model's buffers have {contribution.extra_bytes} bytes, and at most {MOST_MESSAGE_BYTES} can be "
                "averaged. Register those that can be computed again with persistent=False."
            )
        pending = PeerPending(contribution, self, on_mean)
        # the usual step: a few send, merge, evaluate or save besides
        step_s = statistics.median(self._steps_s) if self._steps_s else math.inf
        trips_s = (peer.link.counters().round_trip_s for peer in list(self.links.by_rank.values()))
        window_s = payload_window_s(contribution.transfer_steps * step_s, max(trips_s, default=0.0))
        uplink = replace(self.uplink, window_s=window_s)
        self._rounds.submit(pending, self.step, uplink, ready)
        return Pending(pending.wait)

    def tick(self) -> None:
        """Count one finished inner step. Later contributions belong to the next one."""
        self.step += 1
        now_s = elapsed_s()
        self._steps_s.append(now_s - self._ticked_s - self._waited_s)
        self._ticked_s, self._waited_s = now_s, 0.0

    def count(self, pending: PeerPending, outcome: Average | TransportError, waited_s: float) -> None:
        """Count the bytes of a round whose outcome is being returned, and the time for which it was waited for."""
        self._waited_s += waited_s
        if isinstance(outcome, Average):
            self.sent_bytes += outcome.sent_bytes
            self.received_bytes += outcome.received_bytes
            if pending.decided_s is not None:
                self.last_transfer = pending.payload_bytes, pending.decided_s - pending.sent_s
        elif not isinstance(outcome, ReplicaLostError):
            others = len(self.view.members) - 1
            self.sent_bytes += others * pending.payload_bytes
            self.received_bytes += others * pending.payload_bytes

    # State.

    def publish(self, source: SnapshotSource, version: Callable[[int], object] | None = None) -> None:
        self._state.publish(source, version)

    @property
    def fetched_bytes(self) -> int:  # type: ignore[override]  # as above
        return self._state.fetched_bytes

    def fetch(
        self, fragment: int, donors: Sequence[int], expected_bytes: int | None = None
    ) -> Future[Mapping[str, Any]]:
        after, entries = self._rounds.decided_rounds(fragment), self.entries()
        others = [donor for donor in donors if donor in self.view.members and donor != self.replica]
        ranks = {donor: self.rules.ranks([donor])[self.rules.position] for donor in others}
        known = {donor: entries[rank] for donor, rank in ranks.items() if rank in entries}
        fetched = in_thread(
            lambda: self._state.fetch(fragment, donors, known, after, expected_bytes), f"diloco-state-{fragment}"
        )
        if self.rules.ranks_per_replica > 1:  # the ranks of a replica must adopt a state at the same step
            futures.wait([fetched])
        return fetched

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.step = int(state["step"])

    # Members.

    def announce_speed(self, steps_per_s: float) -> None:
        """Report to the other members how many inner steps per second this replica takes."""
        self.post(Announced(Announcement("speed", steps_per_s)))

    def speeds(self) -> Mapping[int, float]:
        """Return the inner steps per second that other members have reported, by replica."""
        speeds = dict(self._machine.said.numbers["speed"])  # at once, as the control thread changes it
        return {self.rules.replica_of(rank): speed for rank, speed in speeds.items() if rank != self.rules.rank}

    def announce_site(self, site: Site) -> None:
        self.post(Announced(SiteMessage(site)))

    def sites(self) -> Mapping[int, Site]:
        sites = dict(self._machine.said.sites)  # at once, as the control thread changes it
        return {self.rules.replica_of(rank): site for rank, site in sites.items()}

    def finish(self) -> None:
        """Wait for the others after this rank's last step, or leave if they take more steps."""
        others_continue = self._machine.rounds.others_have_contributed
        self.post(Announced(Announcement("finished", self.step)))
        self._met("finished", others_continue)
        with self._changed:
            leaves = others_continue()
        if leaves:
            self.leave()

    def leave(self) -> None:
        """Tell the others that this replica leaves, and wait until they have processed it."""
        if self.views.last_view is None or self.failure is not None:
            return
        others = {*self.rules.ranks(each for each in self.view.members if each != self.replica)}
        with contextlib.suppress(TimeoutError):  # the others then detect the loss themselves
            self._call(Left(), _LEAVING_S)
        self._wait_for(lambda: not self.connections.connected & others, _LEAVING_S)

    def close_to_joiners(self, why: str, *, for_good: bool = False) -> None:
        """Refuse replicas that ask to join, for the reason ``why``; "" admits them again."""
        self.never_opens = for_good
        self.connections.note(ClosedToJoiners(why))

    def end_steps(self) -> None:
        """Wait for lost members no longer, as this rank takes no more steps; rounds in flight may still end."""
        self.post(Left(if_waiting=True))

    def close(self) -> None:
        """End all connections within seconds. Operations that wait in other threads fail at once.

        The other ranks count this replica as lost unless it has left before.
        """
        if self.connections.left:
            return
        with self._changed:
            self.connections.left = f"replica {self.replica} has closed its transport"
            self._changed.notify_all()
        left = TransportError(self.connections.left)
        with contextlib.suppress(TimeoutError, TransportError):  # an internal error has ended the connections
            self._call(Closed(left), _ENDING_S)
        self._note_waiting("")
        self._rounds.close(left)  # contributions that have not reached the machine
        self.connections.close()
        self._rounds.wait_for_threads()

    # Becoming a member, for `connect` and `join`.

    def begin(self, view: View, *, member: bool, closed: str = "") -> None:
        """Start in ``view``, or observe it if this rank is not a member yet. Control connections must be open.

        Args:
            closed: Why replicas can't join at first; "" if they can.
        """
        self.connections.post(self.connections.trust, self.rules.ranks(view.members))
        self.connections.note(ClosedToJoiners(closed))
        self._call(Begun(view, member))

    def ask_to_join(self, entry: Entry, timeout_s: float) -> Answer | None:
        """Ask all connected ranks for admission, and wait for an answer."""
        self.post(Announced(Join(entry)))
        self._wait_for(lambda: self._answered, timeout_s)
        with self._changed:
            answer, self._answered = self._answered, None
            return answer

    def enter(self, welcome: Answer) -> None:
        message, connections = welcome
        assert isinstance(message, Welcome)
        self.welcome_note = message.note
        self.connections.post(self.connections.trust, self.rules.ranks(message.following.view.members))
        self._call(Entered(message.following, connections))

    # For the training thread: what ranks agree on outside their rounds.

    def agree(self, facts: Mapping[str, str]) -> None:
        streams, address = self.connections.streams, str(self.connections.address)
        entry = Entry(self.rules.rank, address, streams.me, dict(facts))
        timeout_s = self.rules.round_timeout_s
        said, present = self._machine.said, self._machine.present

        def unready() -> list[int]:
            return sorted({self.rules.replica_of(rank) for rank in present() - said.entries.keys()})

        self.post(Announced(FactsMessage(entry)))
        with waiting_for(lambda: f"{len(unready())} of the replicas to create DiLoCo", timeout_s), self._changed:
            self._wait_for(lambda: said.mine == entry and (said.refusal() or not unready()), timeout_s)
            why, missing = said.refusal(), unready()
        if why:
            raise ConfigurationError(f"{why}. All replicas must pass the same arguments to DiLoCo.")
        if missing:
            raise RendezvousError(
                f"replica {self.rules.replica} has waited {timeout_s:g} s for {names_of(missing)}, which "
                f"{'are' if len(missing) > 1 else 'is'} connected but not ready to train: no DiLoCo was created there.",
                replicas=missing,
            )

    def ask_to_stop(self) -> None:
        self._asked_to_stop = True
        self.post(Announced(Announcement("stop", 0)))

    def stop_step(self, step: int, *, wanted: bool) -> int | None:
        """Do as `Transport.stop_step`, if half of the members ask for it. A rank that asks alone stops alone."""
        machine = self._machine
        if wanted and not self.rules.together and (self.failure is not None or self.views.last_view is None):
            return step  # no other replica is left to agree with
        if wanted:
            self.ask_to_stop()
        if self._asked_to_stop:
            self._wait_for(lambda: machine.said.stopping, self.rules.silence_s)
        if not machine.said.stopping:
            return None
        if not machine.stop_is_agreed():
            with contextlib.suppress(TimeoutError), self._changed:
                self._wait_for(machine.stop_is_agreed, min(_STOP_TOGETHER_S, self.rules.silence_s))
        return int(max(self._met("stop"))) + 1 if machine.stop_is_agreed() else machine.rounds.step

    def _met(self, topic: Literal["stop", "finished"], unless: Callable[[], bool] = lambda: False) -> list[float]:
        """Wait until all connected ranks have announced a step, or ``unless`` holds. Return the steps."""
        said, present = self._machine.said, self._machine.present
        self._wait_for(lambda: unless() or not present() - said.numbers[topic].keys(), self.rules.guard_s)
        return [*said.numbers[topic].values()]

    # In the control thread.

    def _end_waiting(self) -> None:
        """Let all who wait learn of an internal error."""
        fault = TransportError(self.connections.fault)
        with self._changed:
            self._changed.notify_all()
        self._rounds.decide_all(
            lambda each: fault if self.rules.raises(each) else RoundVoidError(str(fault), round=str(each))
        )
        self._rounds.cancel()

    def _acts(self, effects: Effects) -> Acts:
        return [
            (self.connections.send, effects.messages),
            (self.connections.hang_up, zip(effects.hang_ups)),
            (self._rounds.resolve, effects.outcomes),
            (self._adopt, effects.adopted),
            (self._send_welcome, zip(effects.welcomed)),
            (self._rounds.start, effects.exchanges),
            (self._rounds.give, zip(effects.verdicts)),
            (self._rounds.open, [(effects.view,)] if effects.view is not None else []),
            (self._register, zip(effects.registered)),
            (self._introduce, zip(effects.introduced)),
            (self._note_waiting, [(effects.waiting,)]),
            (self._note_answer, zip(effects.answers)),
        ]

    def _note_answer(self, answer: Answer) -> None:
        with self._changed:
            self._answered = answer
            self._changed.notify_all()

    def _adopt(self, following: NextView, reason: str, cause: Cause) -> None:
        self.connections.trust(self.rules.ranks(following.view.members))
        note = b"" if self._on_change is None else self._on_change(following, reason, cause)
        self._welcome = Welcome(following, note)
        for rank in self.rules.ranks(following.joined):
            self._send_welcome(rank)

    def _send_welcome(self, rank: int) -> None:
        if self.order:
            self.connections.send(rank, Store("order", self.order))
        self.connections.send(rank, self._welcome)

    def _note_waiting(self, why: str) -> None:
        """Report, from time to time, for whom a view change waits, as long as it does."""
        if why and self._waiting is None and not self.connections.left:
            self._waiting = contextlib.ExitStack()
            self._waiting.enter_context(waiting_for(self._awaited))
        elif not why and self._waiting is not None:
            self._waiting.close()
            self._waiting = None

    def _awaited(self) -> str:
        missing = self.views.missing
        return (
            f"{names_of(missing) if missing else 'other replicas'} to be back ({self.views.waiting}; start again those "
            "that have ended, or end this replica, whose state is then saved, and resume it without them)"
        )

    def _register(self, entry: Entry) -> None:
        if entry.key != self.connections.identity(entry.rank):
            return  # the entry is that of another process than its sender
        note(self.connections.entries, entry, {*self.rules.ranks(self.view.members), *self.connections.connected})

    def _introduce(self, entry: Entry) -> None:
        rank, known = entry.rank, self.connections.entries.get(entry.rank)
        if rank in self.rules.ranks(self.view.members) and known is not None and known.key != entry.key:
            return  # nobody else can take a member's place, or that of this process
        reached = {self.rules.rank, *self.connections.connected, *self._calling}
        if rank not in reached and len(self._calling) < _MOST_CALLS:
            self._calling.add(rank)
            self.connections.begin(self._call_back(entry))

    async def _call_back(self, entry: Entry) -> None:
        with contextlib.suppress(OSError, EOFError, TransportError, ValueError):
            await within(self.rules.silence_s, self.connections.dial(entry))
        self._calling.discard(entry.rank)
