"""`PeerTransport`: one rank's way to the others, as the training thread sees it, run by the protocol's machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from diloco.algorithm.averaging import Contribution, RoundId
from diloco.errors import ReplicaLostError, TransportError
from diloco.membership.grace import Grace
from diloco.membership.view import View
from diloco.protocol import events
from diloco.protocol.actions import Average
from diloco.protocol.failure_detector import Timing
from diloco.protocol.faults import Faults
from diloco.protocol.machine import Answer
from diloco.protocol.messages import next_view, speed_message
from diloco.protocol.registry import Entry, Registry
from diloco.protocol.rules import Policies, Rules
from diloco.transport.address import Address
from diloco.transport.base import Fetching, Pending, SnapshotSource, Transport
from diloco.transport.connections.opened_link import OpenLink
from diloco.transport.connections.streams import Streams
from diloco.transport.links import Link
from diloco.transport.peers.payload_links import HostCopies
from diloco.transport.peers.pending import PeerPending
from diloco.transport.peers.runner import ProtocolRunner
from diloco.transport.peers.state_transfer import StateTransfer
from diloco.transport.peers.threads import in_thread

__all__ = ["PeerTransport"]

_LEAVING_S = 3.0
_ENDING_S = 2.0  # of what waits for links that have ended; one still being made may take longer, and does no harm


class PeerTransport(ProtocolRunner, Transport):
    """Replicas in processes of their own.

    Contributions are sent in the background as soon as they are handed in, and `Pending.wait` waits for the rest. All
    methods are for the training thread.

    Args:
        rules, policies, timing, streams, link: as of `ProtocolRunner`.
        together: whether all ranks stop when one has to.
        state_bytes_per_s: limit for all ranks that fetch state from this one; None: no limit.
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
        super().__init__(rules, replace(policies, together=together), timing, streams, link)
        self.replica = rules.replica
        self.run_is_over = False  # whether others have finished the run while this rank was not a member
        self.welcome_note: Mapping[str, Any] = {}  # what `on_change` of a member returned when this rank joined
        # bytes of the last contribution taken, and seconds until its round was decided; or None
        self.last_transfer: tuple[int, float] | None = None
        # by fragment, of the state behind this rank's last contribution
        self.digests: Mapping[int, str] = self._contributed.digests
        self._copies = HostCopies()
        self._grace = Grace(rules.replica)
        self._state = StateTransfer(rules, self.connections, state_bytes_per_s)

    @property
    def address(self) -> Address:
        """Of this rank's control port."""
        return self.connections.address

    @property
    def step(self) -> int:
        """Inner steps that this rank has begun to synchronise; see `tick`."""
        return self._machine.views.contributions.step

    @step.setter
    def step(self, step: int) -> None:
        self._machine.views.contributions.step = step

    @property
    def failure(self) -> TransportError | None:
        """Why this rank takes part in no more rounds, or None."""
        return self._machine.views.failure

    @property
    def last_view(self) -> View | None:
        """The newest view that this rank was a member of or has agreed to; None before the first."""
        return self._machine.views.last_view

    @property
    def link_words(self) -> Mapping[int, str]:
        """Replica -> what carries payloads to it."""
        return self._links.words

    def known_entries(self) -> tuple[Entry, ...]:
        """Entries of all other ranks that are members, have been members, or have asked to join."""
        return tuple(entry for rank, entry in self.registry.entries.items() if rank != self.rules.rank)

    # Rounds.

    def average(self, contribution: Contribution) -> Pending:
        self.check_name(contribution)
        pending = self._contributed.add(contribution, self._guard_s, self)
        handed = events.HandedIn(contribution, self.step, pending.sent_s)
        if contribution.payload.is_cuda:
            host, copied = self._copies.start(contribution)
            self._copies.after(copied, lambda: self._post(replace(handed, contribution=host)))
        else:
            self._post(handed)
        return pending

    def tick(self) -> None:
        """One inner step is done; contributions from now on belong to the next."""
        self.step += 1

    def missing(self, round_id: RoundId) -> tuple[int, ...]:
        """Replicas that have not contributed to a round."""
        with self._changed:
            rounds = self._machine.views.contributions.rounds
            return rounds.missing(round_id) if rounds is not None else ()

    def count(self, pending: PeerPending, outcome: Average | TransportError) -> None:
        """Count the bytes of a round whose outcome is taken."""
        if isinstance(outcome, Average):
            self.sent_bytes += outcome.sent_bytes
            self.received_bytes += outcome.received_bytes
            if pending.decided_s is not None:
                took_s = pending.decided_s - pending.sent_s
                self.last_transfer = pending.payload_bytes, took_s
                late_s = dict(zip(outcome.contributors, outcome.late_s, strict=True))
                self._grace.learn(outcome.round.fragment, took_s=took_s, late_s=late_s)
        elif not isinstance(outcome, ReplicaLostError):
            others = len(self.view.members) - 1
            self.sent_bytes += others * pending.payload_bytes
            self.received_bytes += others * pending.payload_bytes

    # State.

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
        """A function that fetches from the present members; for any thread."""
        after = self._contributed.decided_rounds(fragment)
        members, entries = self.view.members, dict(self.registry.entries)
        return lambda: self._state.fetch(
            fragment, donors, after, members=members, entries=entries, expected_bytes=expected_bytes
        )

    def state_dict(self) -> dict[str, Any]:
        """Traffic and steps; contributions in flight are kept by their sender."""
        return {"traffic": [self.sent_bytes, self.received_bytes], "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.sent_bytes, self.received_bytes = map(int, state["traffic"])
        self.step = int(state["step"])

    # Members.

    @property
    def closed_to_joiners(self) -> str:
        """Why nobody can join at present; "" if anybody can."""
        return self._machine.ends.closed_to_joiners

    def close_to_joiners(self, reason: str) -> None:
        """Let nobody join for ``reason``; "" lets everybody join again."""
        self._machine.ends.closed_to_joiners = reason

    def tell_speed(self, steps_per_s: float) -> None:
        """Tell the other members how many inner steps a second this replica takes."""
        self._post(events.Say(speed_message(steps_per_s)))

    def speeds(self) -> Mapping[int, float]:
        """Replica -> inner steps per second, of other members that have told it."""
        return self._machine.speeds

    def faults(self) -> Mapping[int, Faults]:
        """Replica -> what other members have done to rounds, as this rank has seen it; none of it for who is not in."""
        return self._machine.views.contributions.conduct.faults

    def time_left_s(self, overlap_steps: int) -> float | None:
        """How long this replica can still train before somebody stands still for its contribution; 0 or more.

        Returns:
            None: too few have contributed to a round that this replica has not, or nobody has told its speed.
        """
        with self._changed:
            rounds, members = self._machine.views.contributions.rounds, len(self.view.members)
            waiting = rounds.waiting_for_me() if rounds is not None else {}
            due_s = self._grace.due_s(waiting, self._machine.speeds, members=members, overlap_steps=overlap_steps)
        return None if due_s is None else max(0.0, due_s - time.monotonic())

    def finish(self) -> None:
        """This rank has done all its steps: wait for the others, or leave if they take more steps."""
        self._post(events.Say({"kind": "meet", "name": "finished", "value": self.step}))
        self._met("finished", unless=self._others_go_on)
        if self._others_go_on():
            self.leave()

    def leave(self) -> None:
        """Tell the others that this replica leaves, and wait until they have heard it."""
        if self.last_view is None or self.failure is not None:
            return
        others = {*self.rules.ranks(each for each in self.view.members if each != self.replica)}
        with contextlib.suppress(TimeoutError):  # then the others find out by themselves
            self._call(events.Leave(), _LEAVING_S)
        self._wait_for(lambda: not self.connections.connected & others, _LEAVING_S)

    def leave_at_once(self) -> None:
        """As `leave`, without waiting; for any thread."""
        self._post(events.Leave())

    def close(self) -> None:
        """End all connections within seconds, and at once whatever waits in another thread, with an error.

        The others count this replica as lost, unless they were told before.
        """
        if self._closed:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        left = TransportError(f"replica {self.replica} has closed its transport")
        with contextlib.suppress(TimeoutError):
            self._call(events.Close(left), _ENDING_S)
        self._contributed.close(left)  # what the machine has not heard of
        self.mailbox.close("the transport was closed")
        self.connections.close()
        self._threads.join(_ENDING_S)
        self._copies.close()

    # Becoming a member; called by `connect` and `join`.

    def begin(self, view: View, registry: Registry, open_link: OpenLink, *, member: bool, closed: str = "") -> None:
        """Start in ``view``, or only observe it if this rank is not a member yet; control connections stand.

        Args:
            registry: of all ranks; kept up to date from now on.
            closed: why nobody can join at first; "" if anybody can.
        """
        self.view, self.registry, self.open_link = view, registry, open_link
        self.connections.post(self.connections.trust, self.rules.ranks(view.members))
        self._call(events.Begin(view, member, closed))

    def ask_to_join(self, entry: Entry, timeout_s: float) -> Answer | None:
        """Ask all connected ranks for admission, and wait for an answer."""
        self._post(events.Say({"kind": "join", **entry.to_message()}))
        self._wait_for(lambda: self._machine.answers, timeout_s)
        with self._changed:
            return self._machine.take_answer()

    def enter(self, welcome: Answer) -> None:
        """Take part in the view of a welcome."""
        message, connections = welcome
        following = next_view(message, self.view)
        assert following.view is not None
        self.view, self.welcome_note = following.view, message["note"]
        self.connections.post(self.connections.trust, self.rules.ranks(self.view.members))
        self._call(events.Enter(following, connections))

    def _others_go_on(self) -> bool:
        rounds = self._machine.views.contributions.rounds
        return rounds is not None and rounds.goes_on_without_me()
