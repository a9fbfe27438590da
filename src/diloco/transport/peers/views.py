"""Views as they follow one another: agreeing on the next one, connecting its members, and handing over the rounds.

Runs in the control thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from diloco.errors import ReplicaLostError, TransportError
from diloco.membership.change import NextView, Rounds
from diloco.membership.view import View
from diloco.protocol.headers import Header
from diloco.protocol.messages import Adopted, ChangeReport, Leaving, RoundVote, adopted, read
from diloco.protocol.rules import Policies, Rules, left_out, stopped
from diloco.transport.peers.attendance import Attendance
from diloco.transport.peers.connection_manager import ConnectionManager
from diloco.transport.peers.data_link import OpenLink
from diloco.transport.peers.intake import Intake
from diloco.transport.peers.lineup import Lineup
from diloco.transport.peers.postman import Postman
from diloco.transport.peers.present import Present
from diloco.transport.peers.round_state import Begun
from diloco.transport.peers.rounds import RoundBook
from diloco.transport.peers.threads import Mailbox, Threads
from diloco.transport.peers.view_end import ViewEnd
from diloco.transport.peers.view_links import ViewLinks
from diloco.transport.peers.waiting import Early, Letter

__all__ = ["ViewKeeper"]


class ViewKeeper:
    """The present view and its rounds.

    Args:
        view: the first one; for a joiner, without itself.
        rules: of rounds.
        policies: see there.
        connections: control connections.
        postman: of payloads.
        threads: in which payloads move, and links are made.
        open_link: makes payload connections.
        mailbox: of payload connections being made.
        step: tells the inner step that this rank has begun to synchronise.
        on_change: told of every next view, before anything of it is done; what it returns goes to those who join, under
            ``note`` in their welcome.

    Attributes:
        intake: takes contributions.
        attendance: told of who asks to join and who is lost.
    """

    def __init__(
        self,
        view: View,
        rules: Rules,
        policies: Policies,
        connections: ConnectionManager,
        postman: Postman,
        threads: Threads,
        open_link: OpenLink,
        mailbox: Mailbox,
        step: Callable[[], int],
        on_change: Callable[[NextView], Mapping[str, Any] | None],
    ) -> None:
        self._present = present = Present(view)
        self._rules = rules
        self._policies = policies
        self._connections = connections
        self._postman = postman
        self._threads = threads
        self._mailbox = mailbox
        self._on_change = on_change
        self._last: NextView | None = None
        self._early = Early()
        self._lineup = Lineup(rules, connections)
        self._ending = ViewEnd(present, rules, policies.quorum, connections, self._lineup, step, self._adopt)
        self.intake = Intake(present, self._ending, raise_on_loss=policies.raise_on_loss)
        self.attendance = Attendance(present, rules, connections, self._lineup, self._ending, self._stop)
        unlinked = self.attendance.unlinked
        self._links = ViewLinks(
            rules, policies.streams, policies.connect_timeout_s, connections, threads, open_link, unlinked
        )

    @property
    def view(self) -> View:
        """The present one."""
        return self._present.view

    @property
    def last_view(self) -> View | None:
        """The newest view that this rank was a member of, or has agreed to be; None: none yet."""
        now = self._present
        if now.book is None:
            return None
        return max((view for view in (now.view, now.agreed) if view is not None), key=lambda view: view.id)

    @property
    def book(self) -> RoundBook | None:
        """The rounds of the present view; None: this rank is no member yet."""
        return self._present.book

    @property
    def failure(self) -> TransportError | None:
        """Why no round takes place any more, or None."""
        return self._present.failure

    @property
    def reason(self) -> str:
        """Why the present view followed the one before, with what happened as this rank heard it."""
        return self._present.reason

    # Called by the transport, in the control thread.

    def open(self, view: View, from_step: int) -> None:
        """Begin with ``view``: connect its members, and let rounds sent at ``from_step`` or later take place in it."""
        self.intake.from_step = from_step
        self._open(view, (), frozenset())

    def heard(self, sender: int, message: Mapping[str, Any]) -> None:
        """A message about a view or a round. One that can't be read makes its sender lost, and raises nothing."""
        connection = self._connections.connection(sender)
        try:
            view_id, said = read(sender, message, self.view)
        except ValueError as error:
            if not self._lineup.has(sender) or self._lineup.speaks(sender, connection):
                replica = sender // self._rules.ranks_per_replica
                self.attendance.give_up(sender, f"replica {replica} sent what is no message of this protocol: {error}")
            return
        self._take(Letter(sender, view_id, said, connection))

    def enter(self, following: NextView, lineup: Mapping[int, object]) -> None:
        """Become a member of a view that was agreed on without me; who was lost before that is lost in it.

        Args:
            following: the view.
            lineup: rank -> the connection to it when I was told of the view; another process may have come since.
        """
        assert following.view is not None
        self.intake.joined = following.from_step > 1  # before it there is no state but the one all begin with
        self.intake.from_step = following.from_step
        self._lineup.remember(lineup)
        self._open(following.view, (), following.void)
        self.attendance.entered()

    def leave(self, step: int) -> None:
        """Leave for good after inner step ``step``: the others go on, and need not find out. Rounds in flight end here.

        All ranks of a replica leave when one of them does.
        """
        if self.failure is None:
            commits = self.book.freeze()[0] if self.book is not None else {}
            self.tell(Leaving(step, commits).to_message(self.view.id))
            self.close(self._parted(step))  # the others hang up when they have heard it

    def part(self) -> None:
        """End the connections to all members; nobody here is told of a loss."""
        for rank in self._lineup.ranks(self.view.members):
            self._connections.hang_up(rank)

    def tell(self, message: Mapping[str, Any]) -> None:
        """To all other ranks of the view."""
        for rank in self._lineup.ranks(self.view.members):
            if rank != self._rules.rank:
                self._connections.send(rank, message)

    def exclude(self, reason: str) -> None:
        """The others go on, or stop, without this replica."""
        self._stop(left_out(self._rules.replica, reason, self._policies))

    def close(self, failure: TransportError) -> None:
        """End everything; who waits gets ``failure``."""
        self._present.failure = self.failure or failure
        self._ending.change = None
        if self.book is not None:
            self.book.freeze()
            self.book.end(None, str(failure), self.intake.failure_of)
        self.intake.begin_waiting()
        self._links.close()

    # What is heard.

    def _take(self, letter: Letter) -> None:
        said, view_id = letter.said, letter.view_id
        of_a_round, speaks = isinstance(said, Header | RoundVote), self._lineup.speaks(letter.sender, letter.connection)
        if isinstance(said, Leaving) and speaks:  # true at once, whatever view its sender was in
            self._hear_leaving(letter.sender, said)
        elif view_id > self.view.id or (self.book is None and of_a_round):
            if not self._early.keep(letter):
                self.attendance.give_up(
                    letter.sender, f"rank {letter.sender} sent too much about views that are not there"
                )
        elif not speaks:
            return  # it is no member, so it has no say
        elif isinstance(said, Header | RoundVote):
            if view_id == self.view.id and self.book is not None:
                self.book.heard(letter.sender, said)
        elif isinstance(said, ChangeReport):
            self._hear_change(letter, said)
        elif isinstance(said, Adopted) and view_id == self.view.id and self._ending.change is not None:
            self._adopt(said.following)

    def _hear_change(self, letter: Letter, said: ChangeReport) -> None:
        if letter.view_id == self.view.id:
            if self.failure is None and self.book is not None:
                self._ending.absorb(said)
                self._ending.settle()
        elif self._last is not None and letter.view_id == self._last.previous.id:
            self._connections.send(letter.sender, adopted(self._last))  # it asks about a view that I have left behind

    def _hear_leaving(self, sender: int, said: Leaving) -> None:
        replica = sender // self._rules.ranks_per_replica
        if replica != self._rules.replica:
            self.attendance.leaves(replica, said)
        else:
            self.leave(said.step)  # and say so, lest my connections end before its words have come

    # What follows from it.

    def _open(self, view: View, kept: Sequence[Begun], void: Rounds) -> None:
        """Begin with ``view``, and with rounds that go on in it; ``void`` ones don't."""
        self._present.view = view
        self._lineup.form(view)
        if self.failure is None:
            self._present.book = book = RoundBook(
                view,
                self._rules,
                links=self._links.connect(view),
                postman=self._postman,
                threads=self._threads,
                tell=self.tell,
                later=self._connections.loop.call_later,
                post=self._connections.post,
                broken=self.attendance.broken,
                confirmed=self.intake.confirmed,
                late=self.attendance.late,
                words=self._connections.words,
                void=void,
            )
            self.intake.go_on(book, kept)
        self.intake.begin_waiting()
        for letter in self._early.take():
            self._take(letter)

    def _stop(self, why: str) -> None:
        words = f"{why} It takes part in no more rounds; what it has not shared is in its own parameters."
        self._end(ReplicaLostError(words, replicas=[self._rules.replica]))

    def _parted(self, step: int) -> TransportError:
        return TransportError(f"replica {self._rules.replica} left after step {step}; it takes part no more.")

    def _end(self, failure: TransportError) -> None:
        self.close(failure)
        self.part()

    def _adopt(self, following: NextView) -> None:
        assert self.book is not None
        me, members = self._rules.replica, following.previous.members
        if following.view is not None and me not in following.view.members:
            self.exclude(following.reason)
            return
        change = self._ending.take()
        if following.view is not None:
            staying: Collection[int] = following.view.members
        elif change.is_left_out:
            staying = [m for m in members if m == me or all(map(self._lineup.is_connected, self._lineup.ranks((m,))))]
        else:
            staying = change.staying
        lost = [m for m in members if m not in staying]
        self._present.failure = stopped(following, lost, change.why, self._policies)
        stops = self.failure is not None
        self._last = following
        self._present.reason = change.why if stops else f"{change.why}; {following.reason}"
        kept = self.book.end(following, self.reason, self.intake.failure_of, goes_on=not stops)
        self._links.close()
        self._part_from(lost, following)
        self._mailbox.forget(f"{following.previous.id}/")
        if following.view is not None:
            self._present.view = following.view
            for rank in self._lineup.ranks([m for m in staying if m not in change.staying]):
                self._connections.send(
                    rank, adopted(following)
                )  # it was agreed on before it was lost, and may not know
        note = self._on_change(following)  # before `_open`, which may adopt the view after this one
        self.attendance.welcome(following, note)
        if following.joined:
            self.intake.from_step = following.from_step
        self._open(self.view, kept, following.void)
        self.attendance.begun(following, change.mine)

    def _part_from(self, lost: Sequence[int], following: NextView) -> None:
        excluded = {"kind": "excluded", "view": following.previous.id, "reason": self.reason}
        left = dict(following.left)
        for rank in self._lineup.ranks(lost):
            knows = following.view is None or rank // self._rules.ranks_per_replica in left  # or is the larger side
            if not knows and self._lineup.is_connected(rank):
                self._connections.send(rank, excluded)
            self._lineup.part_from(rank)
