"""The state machine of one rank: events and a time go in, actions come out.

It owns no thread, clock, socket, future or callback. Its owner passes it one event at a time and carries out the
returned actions in order. What an event causes in another part of the machine is handled before `handle` returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco.protocol import events
from diloco.protocol.actions import Action, Introduce, Register
from diloco.protocol.barriers import Agreement, Barriers
from diloco.protocol.events import Event, Outbox
from diloco.protocol.fields import Fields, MessageError
from diloco.protocol.headers import Header
from diloco.protocol.hold_back import HeldMessage, HoldBackQueue
from diloco.protocol.messages import (
    Adopted,
    ChangeReport,
    Leaving,
    RoundVote,
    facts_message,
    read,
    read_answer,
    speed_of,
)
from diloco.protocol.registry import Entry
from diloco.protocol.roster import Roster
from diloco.protocol.rules import Policies, Rules
from diloco.protocol.view_ends import ViewEnds
from diloco.protocol.views import ViewManager

__all__ = ["Machine"]

Answer = tuple[Mapping[str, Any], Mapping[int, int]]
"""A message, and rank -> connection at the time when the message was received."""

_MEMBERS_ONLY = ("meet", "introduce", "excluded", "replaced", "speed")


class Machine:
    """One rank's part in everything that ranks agree on."""

    def __init__(self, rules: Rules, policies: Policies) -> None:
        self.rules = rules
        self.policies = policies
        self.roster = Roster(rules)  # the connected ranks, and the members
        self.barriers = Barriers()  # the numbers that ranks exchange
        self.agreement = Agreement(rules.ranks_per_replica)  # the arguments of all ranks' training loops
        # replica -> inner steps per second, for other members that have reported them
        self.speeds: Mapping[int, float] = {}
        self._outbox = Outbox()
        self.views = ViewManager(rules, policies, self.roster, self._outbox)  # the current view and its rounds
        self.ends = ViewEnds(rules, policies, self.roster, self.views, self._outbox)  # ends the current view
        self.answers: dict[int, Answer] = {}  # the last answer of each asked rank to this rank's request to join
        self._asked: frozenset[int] = frozenset()  # the ranks that this rank has asked
        self._began = False
        self._held_back = HoldBackQueue()

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Handle ``event``, and return the actions to carry out, in order.

        Args:
            event: what happened.
            now_s: the current time of a monotonic clock.

        Raises:
            MessageError: the event is a message that does not conform to this protocol. The state has not changed.
        """
        outbox = self._outbox
        outbox.now_s = now_s
        outbox.queue.append(event)
        while outbox.queue:
            self._handle(outbox.queue.popleft())
        if self.views.failure is not None and self._stops_together:
            self._stop()
        actions, outbox.actions = outbox.actions, []
        return actions

    def take_answer(self) -> Answer | None:
        """Return the answer to this rank's request to join: a welcome if there is one, else the last answer."""
        answers, self.answers = list(self.answers.values()), {}
        return next((each for each in answers if each[0]["kind"] == "welcome"), answers[-1] if answers else None)

    def present(self) -> set[int]:
        """Return the connected ranks of the view, and this one."""
        ranks = self.rules.ranks(self.views.view.members)
        return {rank for rank in ranks if rank == self.rules.rank or rank in self.roster.connections}

    def _handle(self, event: Event) -> None:
        views, ends, rounds = self.views, self.ends, self.views.contributions.rounds
        match event:
            case events.Received(sender, message, _, num_bytes):
                self._receive(sender, message, num_bytes)
            case events.ConnectionMade(rank, connection, address):
                self.roster.connect(rank, connection, address, self._outbox.now_s)
            case events.ConnectionEnded(rank):
                self.roster.disconnect(rank)
                self.roster.in_doubt.add(rank)
                self.agreement.forget(rank)
            case events.Lost(rank, loss):
                self.roster.in_doubt.discard(rank)
                ends.lose(rank, loss)
            case events.LinksFailed(view_id, replicas, reason):
                if view_id == views.view.id:
                    ends.drop_unlinked(replicas, reason)
            case events.Submitted():
                views.contributions.submit(event)
            case events.Computed() if rounds is not None:
                rounds.compute(event)
            case events.ExchangeEnded() if rounds is not None:
                ends.renew_soon(rounds.end_exchange(event))
            case events.TimerFired(timer):
                if timer.kind == "renew":
                    ends.renew(timer.view_id)
                elif timer.kind == "settle":
                    ends.settle(timer.view_id)
                elif rounds is not None and timer.kind == "expire":
                    if owing := rounds.overdue(timer):
                        views.end(owing[1], behind=owing[0])
                    else:
                        ends.renew_soon(rounds.expire(timer))
                elif rounds is not None and (late := rounds.look(timer)):
                    ends.drop_late(*late)
            case events.Begin(view, member, closed):
                self._began = True
                ends.closed_to_joiners = closed
                views.begin(view, member=member)
            case events.RoundsSpoilt(view_id, replicas, reason):
                if view_id == views.view.id:
                    ends.drop_late(replicas, frozenset(), reason)
            case events.ViewBegan():
                self.speeds = {one: speed for one, speed in self.speeds.items() if one in views.view.members}
                self._release_held()
                ends.on_view_began(event)
            case events.Enter(following, connections):
                self._asked = frozenset()
                views.enter(following, connections)
            case events.Leave():
                views.leave(views.contributions.step)
            case events.Close(failure):
                views.close(failure)
                if self._stops_together and self.policies.continue_without_lost:
                    views.hang_up_on_others()  # the other replicas continue: only the ranks of this replica are to stop
            case events.Announce(message):
                self._announce(message)

    @property
    def _stops_together(self) -> bool:
        """Whether all ranks stop at the same step when one has to."""
        return self.policies.together and not self.policies.raise_on_loss

    # Announcements of this rank.

    def _announce(self, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        if kind == "join":
            connected = sorted(self.roster.connections)
            self._asked = frozenset(connected)
            self._outbox.send(connected, {**message, "connected": connected})
        elif kind == "facts":
            self.agreement.mine = Entry.from_message(message)
            self._outbox.send(self.roster.connections, message)
        elif kind == "meet" and message["name"] == "stop":
            self._stop()
        elif kind == "meet":
            self._join_barrier(message["name"], message["value"])
        elif self._began:
            self._outbox.send(self.views.others(), message)

    def _join_barrier(self, name: str, value: int) -> None:
        self.barriers.record(self.rules.rank, name, value)
        if self._began:
            there = [rank for rank in self.views.others() if rank in self.roster.connections]
            self._outbox.send(there, {"kind": "meet", "name": name, "value": value})

    def _stop(self) -> None:
        """Announce, once, how many inner steps this rank has begun to synchronise.

        All ranks can stop one step after the greatest of these numbers, whatever each of them is waiting for.
        """
        if not self.barriers.stopping:
            self.barriers.stopping = True  # set before the step is read, so that training begins at most one more step
            self._join_barrier("stop", self.views.contributions.step)

    # Received messages.

    def _receive(self, sender: int, message: Mapping[str, Any], num_bytes: int) -> None:
        kind = message["kind"]
        self.roster.note_message(sender, self._outbox.now_s)
        if kind in _MEMBERS_ONLY and not self._is_member(sender):
            return
        if kind == "beat":
            pass
        elif kind == "meet":
            name = Fields(message).printable("name")
            self.barriers.receive(sender, name, Fields(message).integer("value"))
            if name == "stop":
                self._stop()
        elif kind in ("welcome", "refused"):
            if sender in self._asked and (kind == "welcome" or self._can_refuse(sender)):
                self.answers[sender] = read_answer(message, self.views.view), dict(self.roster.connections)
        elif kind == "facts":
            mine = self.agreement.receive(sender, message, is_member=self._is_member(sender))
            if mine is not None:
                self._outbox.send([sender], facts_message(mine, answer=True))
        else:
            connection, from_member = self.roster.connections.get(sender), self._is_member(sender)
            held = HeldMessage(sender, message, connection, num_bytes, from_member)
            if self._began:
                self._process(held)
            elif not self._held_back.keep(held):
                raise MessageError("the sender exceeded the hold-back limit before this rank was ready")

    def _process(self, held: HeldMessage) -> None:
        """Process a message that needs a view."""
        sender, message, views = held.sender, held.message, self.views
        kind = message["kind"]
        if kind == "speed":
            self.speeds = {**self.speeds, self.rules.replica_of(sender): speed_of(message)}
        elif kind == "introduce":
            self._outbox.actions.append(Introduce(Entry.from_message(Fields(message).message("entry"))))
        elif kind == "join":
            entry, connected = Entry.from_message(message), frozenset(Fields(message).ranks("connected"))
            if entry.rank != sender or entry.address != self.roster.addresses.get(sender):
                raise MessageError("the request to join names another rank or address than the sender's")
            self._outbox.actions.append(Register(entry))
            self.ends.receive_join(sender, connected)
        elif kind == "excluded":
            if Fields(message).integer("view") >= views.view.id:
                views.receive_parting(sender, Fields(message).words("reason"))
        elif kind == "replaced":
            views.receive_parting(sender, "another process has taken its place")
        else:
            self._process_view_message(held)

    def _process_view_message(self, held: HeldMessage) -> None:
        """Process a message about a round or a view. A malformed message drops its sender."""
        sender, views, ends = held.sender, self.views, self.ends
        is_from_member = self.roster.is_from_member(sender, held.connection)
        try:
            view_id, parsed = read(sender, held.message, views.view)
        except MessageError as error:
            if is_from_member or not self.roster.has(sender):
                words = f"replica {self.rules.replica_of(sender)} sent a malformed message: {error}"
                ends.drop(sender, words)
            return
        rounds, of_this_view = views.contributions.rounds, view_id == views.view.id
        match parsed:
            case Leaving() if is_from_member:  # takes effect at once, whatever view the sender is in
                ends.receive_leaving(sender, parsed)
            case _ if view_id > views.view.id:
                self._hold_back(held)
            case Header() | RoundVote() if rounds is None:
                self._hold_back(held)
            case _ if not is_from_member:
                if view_id < views.view.id and not self.roster.has(sender) and rounds is not None:
                    views.send_excluded(sender)
            case Header() | RoundVote() if (
                rounds is not None and of_this_view and rounds.exceeds_early_limit(sender, parsed.round)
            ):
                ends.drop(sender, f"rank {sender} sent messages about too many rounds that this rank has not begun")
            case Header() if rounds is not None and of_this_view:
                rounds.receive_header(sender, parsed)
            case RoundVote() if rounds is not None and of_this_view:
                rounds.receive_vote(sender, parsed)
            case ChangeReport():
                ends.receive_change(sender, view_id, parsed)
            case Adopted() if of_this_view:
                views.receive_adopted(sender, parsed.following)

    def _hold_back(self, held: HeldMessage) -> None:
        if not self._held_back.keep(held):
            words = f"rank {held.sender} exceeded the hold-back limit with messages about later views"
            self.ends.drop(held.sender, words)

    def _release_held(self) -> None:
        """Process the messages that were held until this view began; those about later views are held again."""
        for held in self._held_back.release():
            if held.message["kind"] in _MEMBERS_ONLY and not self._is_member(held.sender):
                continue
            try:
                self._process(held)
            except MessageError as error:
                words = f"replica {self.rules.replica_of(held.sender)} sent a malformed message: {error}"
                self.ends.drop(held.sender, words)

    def _can_refuse(self, sender: int) -> bool:
        """Return whether a rank that was asked may refuse this one: if a member was asked, non-members may not."""
        members = {each for each in map(self.rules.replica_of, self._asked) if each in self.views.view.members}
        return self.rules.replica_of(sender) in members or members <= {self.rules.replica}

    def _is_member(self, sender: int) -> bool:
        """Return whether a rank is a member, as far as is known: before there are views, any rank may be."""
        return not self._began or self.rules.replica_of(sender) in self.views.view.members
