"""The state machine of one rank: events and a time go in, effects come out.

It owns no thread, clock, socket or future. Its owner hands in one event at a time and carries out the returned effects;
other threads read its state, and nobody else changes it. A connection has a number of its own, since a process that
takes a rank's place uses another connection.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from diloco.algorithm import RoundId
from diloco.protocol.effects import Effects, Outbox, RoundFailed, ViewBegan
from diloco.protocol.events import (
    Announced,
    BeatDue,
    Begun,
    Closed,
    ClosedToJoiners,
    Computed,
    Connected,
    Disconnected,
    Ejected,
    Entered,
    Event,
    Exchanged,
    Left,
    PresumedGone,
    RankLost,
    Received,
    Stepped,
    Submitted,
    TimerFired,
    Yielded,
)
from diloco.protocol.members import Announcements, Roster
from diloco.protocol.rounds import Rounds
from diloco.protocol.rules import Rules
from diloco.protocol.views import Views
from diloco.protocol.wire import (
    Accept,
    Adopted,
    Announcement,
    Beat,
    Change,
    Excluded,
    FactsMessage,
    Header,
    Introduce,
    Join,
    Leaving,
    Message,
    MessageError,
    Propose,
    Refused,
    RoundVote,
    SiteMessage,
    Store,
    ViewMessage,
    Welcome,
    decode,
    encode,
)

_FROM_MEMBERS = (Announcement, SiteMessage, Introduce, Excluded)
_VIEWS_AHEAD = 1000  # the members of a view can't be as many views ahead as this
_MAX_HELD = 1000  # messages held per sender: many times what a rank sends in a view before all have adopted it
_MAX_MEMBER_BYTES, _MAX_STRANGER_BYTES = 1 << 22, 1 << 19  # of one sender's held messages
_MAX_STRANGERS_BYTES = 1 << 22  # of all non-members together, one of which may be about to become a member


class _HeldMessage(NamedTuple):
    """A message that waits for a view."""

    sender: int
    data: bytes  # the encoded message, which takes the least memory
    connection: int | None  # None: it had ended when the message was taken in
    from_member: bool


class Machine:
    """One rank's part in everything that ranks agree on."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.roster = Roster(rules)  # the connected ranks, and the members
        self.said = Announcements(rules)
        self._outbox = Outbox()
        self.rounds = Rounds(rules, self._outbox)
        self.views = Views(rules, self.roster, self.rounds, self._outbox)
        self._asked: frozenset[int] = frozenset()  # the ranks that this rank has asked to let it join
        self._is_welcome = False  # whether one has answered so
        self._began = False
        self._leaves_if_waiting = False  # whether this rank takes no more steps, so that it waits for nobody
        self._held: list[_HeldMessage] = []  # in the order of their arrival

    def handle(self, now_s: float, event: Event) -> Effects:
        """Take in an event, and return the effects to carry out; ``now_s`` is the current time of a monotonic clock.

        Raises:
            MessageError: a message does not conform to this protocol. Nothing has changed, but for when its sender was
                last heard.
        """
        outbox = self._outbox
        outbox.now_s = now_s
        self._take_in(event)
        while outbox.queue:
            match outbox.queue.popleft():
                case RoundFailed() as failed:
                    self.views.handle_failure(failed)
                case ViewBegan() as began:
                    self.said.begin_view(self.roster.processes(self.views.view))
                    self._release_held()
                    self.views.on_view(began)
        if self.views.failure is not None and self._stops_together:
            self._stop()
        if self.views.waiting and (self.said.stopping or self._leaves_if_waiting):
            self.views.leave()
        outbox.effects.waiting = self.views.waiting
        effects, outbox.effects = outbox.effects, Effects()
        return effects

    def present(self) -> set[int]:
        """Return the connected ranks of the view, and this one."""
        ranks = self.rules.ranks(self.views.view.members)
        return {rank for rank in ranks if rank == self.rules.rank or rank in self.roster.connections}

    def stop_is_agreed(self) -> bool:
        """Return whether all ranks stop: half of the members have asked for it, or a loss would end the run."""
        stopping = {self.rules.replica_of(rank) for rank in self.said.numbers["stop"]} & {*self.views.view.members}
        if not self.rules.continue_without_lost:
            return bool(stopping)
        return 2 * len(stopping) >= len(self.views.view.members)

    # Events.

    def _take_in(self, event: Event) -> None:
        views, rounds, roster = self.views, self.rounds, self.roster
        match event:
            case Connected(rank, connection, address, process):
                self._connect(rank, connection, address, process)
            case Disconnected(rank):
                roster.disconnect(rank)
                roster.in_doubt.add(rank)
                self.said.forget(rank)
                self._miss_answer(rank)
            case RankLost(rank, why, cause):
                views.lose(rank, why, cause)
            case Received(sender, message):
                self._receive(sender, message)
            case BeatDue():
                now_s, effects = self._outbox.now_s, self._outbox.effects
                effects.stalled = roster.beat(now_s)
                effects.silent = roster.silent(self.rules.ranks(views.view.members), now_s)
            case TimerFired(None):
                views.settle()
            case TimerFired(RoundId() as round_id):
                rounds.look(round_id)
            case Begun(view, member):
                self._began = True
                views.begin(view, member=member)
            case Entered(following, connections):
                self._asked = frozenset()
                views.enter(following, connections)
            case ClosedToJoiners(why):
                views.closed_to_joiners = why
            case PresumedGone(replicas):
                views.presumed_gone |= replicas
            case Announced(message):
                self._announce(message)
            case Stepped(step):
                rounds.step = step
            case Submitted():
                rounds.submit(event)
            case Computed():
                rounds.compute(event)
            case Exchanged():
                rounds.end_exchange(event)
            case Ejected():
                views.eject(event)
            case Left(if_waiting):
                self._leaves_if_waiting = self._leaves_if_waiting or if_waiting
                if not if_waiting:
                    views.leave()
            case Yielded(why):
                views.stop(why)
            case Closed(failure):
                views.close(failure)
                if self._stops_together and self.rules.continue_without_lost:
                    views.hang_up_on_others()  # these continue: only the ranks of this replica are to stop

    def _connect(self, rank: int, connection: int, address: str, process: str) -> None:
        views, member = self.views, self.roster.process(rank)
        self._miss_answer(rank)
        if self.roster.connect(rank, connection, address, process, self._outbox.now_s):
            views.meet_again(rank)
            return
        if member and process:  # whether or not the new process asks this one
            views.drop(rank, f"replica {self.rules.replica_of(rank)} was started again", "restarted")
        if views.waiting and views.change is not None and self.rules.replica_of(rank) in views.view.members:
            views.change.tell(rank)

    def _miss_answer(self, rank: int) -> None:
        """Answer in the name of a rank that was asked, whose connection has ended: its own answer may be lost."""
        if rank in self._asked and self._can_refuse(rank):
            why = f"the connection to rank {rank}, which was asked, has ended"
            self._outbox.effects.answers.append((Refused(why), dict(self.roster.connections)))

    def _announce(self, message: Announcement | SiteMessage | FactsMessage | Join) -> None:
        match message:
            case Join():
                connected = tuple(sorted(self.roster.connections))
                self._asked = frozenset(connected)
                self._outbox.send(connected, msgspec.structs.replace(message, connected=connected))
            case FactsMessage():
                self.said.entries[self.rules.rank] = message.entry
                self._outbox.send(self.roster.connections, message)
            case Announcement("stop"):
                self._stop()
            case Announcement(topic, value):
                self.said.numbers[topic][self.rules.rank] = value
                self._send_to_others(message)
            case SiteMessage():
                self.said.sites[self.rules.rank] = message.site
                self._send_to_others(message)

    # What follows.

    @property
    def _stops_together(self) -> bool:
        """Whether all ranks stop at the same step when one has to."""
        return self.rules.together and not self.rules.raise_on_loss

    def _send_to_others(self, message: Announcement | SiteMessage) -> None:
        if self._began:
            self._outbox.send((rank for rank in self.views.others() if rank in self.roster.connections), message)

    def _stop(self) -> None:
        """Announce, once, how many inner steps this rank has begun to synchronise.

        All ranks can stop one step after the greatest of these numbers, whatever each of them is waiting for.
        """
        if not self.said.stopping:
            self.said.stopping = True  # set before the step is read, so that training begins at most one more step
            self.said.numbers["stop"][self.rules.rank] = self.rounds.step
            self._send_to_others(Announcement("stop", self.rounds.step))

    # Received messages.

    def _receive(self, sender: int, message: Message) -> None:
        self.roster.note_message(sender, self._outbox.now_s)
        match message:
            case Beat() | Store():
                pass
            case Welcome() | Refused():
                if sender in self._asked and (isinstance(message, Welcome) or self._can_refuse(sender)):
                    self._is_welcome = isinstance(message, Welcome)
                    self._outbox.effects.answers.append((message, dict(self.roster.connections)))
            case FactsMessage():
                if (mine := self.said.receive(sender, message, self.roster.connections.get(sender))) is not None:
                    self._outbox.send([sender], FactsMessage(mine, answer=True))
            case _:
                connection = self.roster.connections.get(sender)
                if self._began:
                    self._process(sender, message, connection)
                else:
                    self._hold(sender, message, connection)

    def _receive_announcement(self, sender: int, message: Announcement) -> None:
        if message.topic == "stop" and message.value > self.rounds.greatest_step:
            raise MessageError(f"no member can be past step {self.rounds.greatest_step}, got {message.value:g}")
        self.said.numbers[message.topic][sender] = message.value
        of_mine = self.rules.replica_of(sender) == self.rules.replica
        if message.topic == "stop" and (of_mine or self.stop_is_agreed()):
            self._stop()

    def _process(self, sender: int, message: Message, connection: int | None) -> None:
        views = self.views
        if isinstance(message, Excluded) and message.view >= views.view.id:
            # a member's process knows what follows this view; that another process has this rank's place, a joiner
            # may say as well, and this one stops all the same
            self.roster.recognise(sender, connection)
        if isinstance(message, _FROM_MEMBERS) and not self._is_member(sender, connection):
            return
        match message:
            case Announcement():
                self._receive_announcement(sender, message)
            case SiteMessage():
                self.said.sites[sender] = message.site
            case Introduce():
                self._outbox.effects.introduced.append(message.entry)
            case Join(entry, connected):
                if entry.rank != sender or entry.address != self.roster.addresses.get(sender):
                    raise MessageError("the request to join names another rank or address than the sender's")
                self._outbox.effects.registered.append(entry)
                views.receive_join(sender, frozenset(connected))
            case Excluded():
                if message.view >= views.view.id:
                    views.receive_parting(message)
            case Header() | RoundVote() | Change() | Propose() | Accept() | Adopted() | Leaving():
                self._process_view_message(sender, message, connection)

    def _process_view_message(self, sender: int, message: ViewMessage, connection: int | None) -> None:
        views, rounds = self.views, self.rounds
        is_report = isinstance(message, Change) and message.view == views.view.id
        if is_report and self.roster.recognise(sender, connection):  # only a member's process reports on a view
            views.meet_again(sender)
        is_from_member = self.roster.is_from_member(sender, connection)
        ahead = message.view - views.view.id
        is_far_ahead = views.is_member and is_from_member and ahead > _VIEWS_AHEAD
        match message:
            case Leaving() if is_from_member:  # takes effect at once, whatever view the sender is in
                views.receive_leaving(sender, message)
            case _ if is_far_ahead:
                views.drop(sender, f"rank {sender} sent a message about view {message.view}, far ahead of the others")
            case _ if ahead > 0:
                self._hold(sender, message, connection)
                if is_from_member and views.waiting and views.change is not None:
                    views.change.tell(sender)  # which answers how this view has ended
            case Header() | RoundVote() if not views.is_member:
                self._hold(sender, message, connection)
            case _ if not is_from_member:
                if ahead < 0 and sender not in self.roster.members and views.is_member:
                    # it was lost while that view began, and could not be told then
                    self._outbox.send([sender], Excluded(views.view.id, rounds.reason))
            case Change():
                if message.report.rank != sender:
                    views.drop(sender, f"rank {sender} sent a report in the name of rank {message.report.rank}")
                else:
                    views.receive_change(sender, message)
            case _ if ahead < 0:
                pass
            case Header() | RoundVote() if why := rounds.refuses(sender, message):
                views.drop(sender, f"rank {sender} sent messages about {why}")
            case Header():
                rounds.receive_header(sender, message)
            case RoundVote():
                rounds.receive_vote(sender, message)
            case Propose() | Accept():
                views.receive_ballot(sender, message)
            case Adopted():
                views.receive_adopted(message.following)

    # Messages that wait for a view.

    def _hold(self, sender: int, message: Message, connection: int | None) -> None:
        """Hold a message until a view begins; raise `MessageError` if its sender has reached its limit.

        All non-members together have a limit, too: their oldest messages are dropped. Before there are views, nobody is
        known to be a member.
        """
        data, from_member = encode(message), self._began and self._is_member(sender, connection)
        sizes = [len(held.data) for held in self._held if held.sender == sender]
        most_bytes = _MAX_MEMBER_BYTES if from_member else _MAX_STRANGER_BYTES
        if len(sizes) >= _MAX_HELD or sum(sizes) + len(data) > most_bytes:
            raise MessageError("the sender exceeded the hold-back limit with messages about later views")
        self._held.append(_HeldMessage(sender, data, connection, from_member))
        strangers = [held for held in self._held if not held.from_member]
        while sum(len(held.data) for held in strangers) > _MAX_STRANGERS_BYTES:
            self._held.remove(strangers.pop(0))

    def _release_held(self) -> None:
        """Process the messages that were held until this view began; those about later views are held again."""
        waiting, self._held = self._held, []
        for sender, data, connection, _ in waiting:
            try:
                self._process(sender, decode(data, Message), connection)
            except MessageError as error:
                self.views.drop(sender, f"replica {self.rules.replica_of(sender)} sent an invalid message: {error}")
        if self.stop_is_agreed():
            self._stop()

    def _can_refuse(self, sender: int) -> bool:
        """Return whether a rank that was asked may refuse this one: a non-member only if no other member was asked."""
        if self._is_welcome:
            return False
        asked_members = {*map(self.rules.replica_of, self._asked)}.intersection(self.views.view.members)
        return self.rules.replica_of(sender) in asked_members or asked_members <= {self.rules.replica}

    def _is_member(self, sender: int, connection: int | None) -> bool:
        """Return whether a message is a member's, as far as is known: before there are views, any rank may be one.

        Another process may have had a member's number before, or have it now.
        """
        if not self._began:
            return True
        members_connection = self.roster.members.get(sender)
        is_anothers = members_connection is not None and connection not in (None, members_connection)
        return not is_anothers and self.rules.replica_of(sender) in self.views.view.members
