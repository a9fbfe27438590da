"""Views as they follow one another: agreeing on the next one, connecting its members, and handing over the rounds.

Runs in the control thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diloco.algorithm.averaging import Contribution, RoundId
from diloco.errors import ReplicaLostError, RoundVoidError, TransportError, ViewChangedError
from diloco.membership.change import NextView, Report, Rounds
from diloco.membership.view import View
from diloco.transport.peers.data_link import OpenLink
from diloco.transport.peers.header import Header
from diloco.transport.peers.lineup import Lineup
from diloco.transport.peers.liveness import Loss
from diloco.transport.peers.mailbox import Mailbox
from diloco.transport.peers.payloads import Postman
from diloco.transport.peers.pending import PeerPending
from diloco.transport.peers.round_state import Begun
from diloco.transport.peers.rounds import RoundBook
from diloco.transport.peers.rules import Rules
from diloco.transport.peers.switchboard import Switchboard
from diloco.transport.peers.view_end import ViewEnd
from diloco.transport.peers.view_links import ViewLinks
from diloco.transport.peers.view_messages import Adopted, ChangeReport, Leaving, RoundVote, adopted, read
from diloco.transport.peers.view_policies import Policies, left_out, stopped
from diloco.transport.peers.waiting import Early, Joiners, Letter

__all__ = ["Policies", "ViewKeeper"]

_AGAIN = {"kind": "refused", "reason": "the members are changing", "for_good": False}


class ViewKeeper:
    """The present view and its rounds.

    Args:
        view: the first one; for a joiner, without itself.
        rules: of rounds.
        policies: see there.
        board: control connections.
        postman: of payloads.
        open_link: makes payload connections.
        mailbox: of payload connections being made.
        step: tells the inner step that this rank has begun to synchronise.
        on_change: told of every next view, before anything of it is done; what it returns goes to those who join, under
            ``note`` in their welcome.
    """

    def __init__(
        self,
        view: View,
        rules: Rules,
        policies: Policies,
        board: Switchboard,
        postman: Postman,
        open_link: OpenLink,
        mailbox: Mailbox,
        step: Callable[[], int],
        on_change: Callable[[NextView], Mapping[str, Any] | None],
    ) -> None:
        self.view = view
        self.failure: TransportError | None = None
        self.joined = False
        self.closed_to_joiners = ""
        self.book: RoundBook | None = None
        self._rules = rules
        self._policies = policies
        self._board = board
        self._postman = postman
        self._mailbox = mailbox
        self._on_change = on_change
        self._links = ViewLinks(rules, policies.streams, policies.connect_timeout_s, board, open_link, self._unlinked)
        self._from_step = 0
        self._reason = ""
        self._ending = ViewEnd(rules, policies.quorum, board, step)
        self._last: NextView | None = None
        self._waiting: list[tuple[Begun, int]] = []
        self._early = Early()
        self._joiners = Joiners(rules.ranks_per_replica)
        self._lineup = Lineup(rules, board)
        self._has_state_of: set[int] = set()
        self._gone_before: set[int] = set()

    # Called by the transport, in the control thread.

    def open(self, view: View, from_step: int) -> None:
        """Begin with ``view``: connect its members, and let rounds sent at ``from_step`` or later take place in it."""
        self._from_step = from_step
        self._open(view, (), frozenset())

    def begin(self, contribution: Contribution, pending: PeerPending, step: int) -> None:
        """A contribution sent at inner step ``step``."""
        begun = Begun(contribution, pending)
        if self.failure is not None:
            failed = self._failure_of(pending.round)
            pending.resolve(
                failed or RoundVoidError(f"{pending.round} is void: {self.failure}", round=str(pending.round))
            )
        elif self._ending.change is not None or self.book is None:
            self._waiting.append((begun, step))
        elif step < self._from_step and contribution.round.fragment >= 0:
            why = f"{pending.round} is void: the view changed before it was sent ({self._reason})."
            pending.resolve(ViewChangedError(why, round=str(pending.round)))
        else:
            self._begin(begun, self.book)

    def heard(self, sender: int, message: Mapping[str, Any]) -> None:
        """A message about a view or a round. One that can't be read makes its sender lost, and raises nothing."""
        connection = self._board.connection(sender)
        try:
            view_id, said = read(sender, message, self.view)
        except ValueError as error:
            if not self._lineup.has(sender) or self._lineup.speaks(sender, connection):
                replica = sender // self._rules.ranks_per_replica
                self._give_up(sender, f"replica {replica} sent what is no message of this protocol: {error}")
            return
        self._take(Letter(sender, view_id, said, connection))

    def enter(self, following: NextView, lineup: Mapping[int, object]) -> None:
        """Become a member of a view that was agreed on without me; who was lost before that is lost in it.

        Args:
            following: the view.
            lineup: rank -> the connection to it when I was told of the view; another process may have come since.
        """
        assert following.view is not None
        self.joined = following.from_step > 1  # before the first step there is no state but the one all begin with
        self._from_step = following.from_step
        self._lineup.remember(lineup)
        self._open(following.view, (), following.void)
        if lost := self._lineup.unreached(self.view):
            words = f"replica {self._rules.replica} can't reach all that it joins"
            self._extend(words, lost=lost, gone=lost & (self._gone_before | self._lineup.replaced(lost)))

    def lose(self, rank: int, loss: Loss) -> None:
        """A rank can't be reached any more."""
        replica = rank // self._rules.ranks_per_replica
        of_mine = f"rank {rank} of " if replica == self._rules.replica else ""
        self._give_up(rank, f"{of_mine}replica {replica} is lost: {loss.text}", gone=loss.kind == "gone")

    def leave(self, step: int) -> None:
        """Leave for good after inner step ``step``: the others go on, and need not find out. Rounds in flight end here.

        All ranks of a replica leave when one of them does.
        """
        if self.failure is None:
            commits = self.book.freeze()[0] if self.book is not None else {}
            self.tell(Leaving(step, commits).to_message(self.view.id))
            self.close(self._parted(step))  # the others hang up when they have heard it

    @property
    def reason(self) -> str:
        """Why the present view followed the one before, with what happened as this rank heard it."""
        return self._reason

    def part(self) -> None:
        """End the connections to all members; nobody here is told of a loss."""
        for rank in self._lineup.ranks(self.view.members):
            self._board.hang_up(rank)

    def join(self, rank: int, connected: frozenset[int]) -> None:
        """A rank asks to be a member; its replica joins when all its ranks have asked.

        Args:
            rank: that asks.
            connected: ranks that it is connected to; without all members it is told to look again.
        """
        replica = rank // self._rules.ranks_per_replica
        if self._lineup.is_connected(rank):
            return  # another member heard it first, and all have agreed since
        if self.closed_to_joiners or self.failure is not None or self.book is None:
            why = self.closed_to_joiners or str(self.failure or "this replica is joining itself")
            self._board.send(rank, {"kind": "refused", "reason": why, "for_good": self.failure is not None})
            return
        others = set(self._lineup.ranks(tuple(m for m in self.view.members if m != replica)))
        if not connected.issuperset(others):
            self._board.send(rank, _AGAIN)
            return
        self._gone_before.discard(replica)
        if self._joiners.ask(rank):
            if replica in self.view.members:  # back before anybody noticed that it was lost; it joins once that is done
                text = f"replica {replica} was started again"
                self._extend(text, lost=frozenset({replica}), gone=frozenset({replica}))
            else:
                self._let_join(replica)

    def tell(self, message: Mapping[str, Any]) -> None:
        """To all other ranks of the view."""
        for rank in self._lineup.ranks(self.view.members):
            if rank != self._rules.rank:
                self._board.send(rank, message)

    def exclude(self, reason: str) -> None:
        """The others go on, or stop, without this replica."""
        self._stop(left_out(self._rules.replica, reason, self._policies))

    def close(self, failure: TransportError) -> None:
        """End everything; who waits gets ``failure``."""
        self.failure = self.failure or failure
        self._ending.change = None
        if self.book is not None:
            self.book.freeze()
            self.book.end(None, str(failure), self._failure_of)
        self._begin_waiting()
        self._links.close()

    # What is heard.

    def _take(self, letter: Letter) -> None:
        said, view_id = letter.said, letter.view_id
        of_a_round, speaks = isinstance(said, Header | RoundVote), self._lineup.speaks(letter.sender, letter.connection)
        if isinstance(said, Leaving) and speaks:  # true at once, whatever view its sender was in
            self._hear_leaving(letter.sender, said)
        elif view_id > self.view.id or (self.book is None and of_a_round):
            if not self._early.keep(letter):
                self._give_up(letter.sender, f"rank {letter.sender} sent too much about views that are not there")
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
            if self.failure is not None or self.book is None or self._ending.has_lost(letter.sender):
                return  # who is lost for me has no say in who else is
            change = self._ending.absorb(self.view, self.book, said)
            if self._rules.replica in change.mine.lost:
                self.exclude(f"replica {letter.sender // self._rules.ranks_per_replica} says: {said.why}")
            self._settle()
        elif self._last is not None and letter.view_id == self._last.previous.id:
            self._board.send(letter.sender, adopted(self._last))  # it asks about a view that I have left behind

    def _hear_leaving(self, sender: int, said: Leaving) -> None:
        replica = sender // self._rules.ranks_per_replica
        if replica != self._rules.replica:
            words, left = f"replica {replica} leaves after step {said.step}", frozenset({(replica, said.step)})
            self._extend(words, left=left, left_commits=said.left_commits)
        else:
            self.leave(said.step)  # and say so, lest my connections end before its words have come

    # What follows from it.

    def _open(self, view: View, kept: Sequence[Begun], void: Rounds) -> None:
        """Begin with ``view``, and with rounds that go on in it; ``void`` ones don't."""
        self.view = view
        self._lineup.form(view)
        if self.failure is None:
            self.book = book = RoundBook(
                view,
                self._rules,
                links=self._links.connect(view),
                postman=self._postman,
                tell=self.tell,
                later=self._board.loop.call_later,
                post=self._board.post,
                broken=self._broken,
                confirmed=self._has_state_of.add,
                late=self._late,
                words=self._board.words,
                void=void,
            )
            for begun in kept:
                self._begin(begun, book)
        self._begin_waiting()
        for letter in self._early.take():
            self._take(letter)

    def _begin(self, begun: Begun, book: RoundBook) -> None:
        fragment = begun.contribution.round.fragment
        book.begin(begun, taking_over=self.joined and fragment >= 0 and fragment not in self._has_state_of)

    def _begin_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for begun, step in waiting:
            self.begin(begun.contribution, begun.pending, step)

    def _failure_of(self, round_id: RoundId) -> TransportError | None:
        """What a round that can't take place raises; without gradients no step can be finished, so theirs always do."""
        return self.failure if self._policies.raise_on_loss or round_id.fragment < 0 else None

    def _extend(self, why: str, **known: Any) -> None:
        """See `ViewEnd.extend`."""
        if self.failure is None and self.book is not None:
            self._ending.extend(self.view, self.book, why, **known)
            self._settle()

    def _give_up(self, rank: int, words: str, *, gone: bool = False) -> None:
        """A rank is no use any more, for the reason in ``words``."""
        replica = rank // self._rules.ranks_per_replica
        self._joiners.forget(replica)
        if self.book is None and replica != self._rules.replica:  # no member yet, so it has no say
            if gone:
                self._gone_before.add(replica)
            return
        known = replica in self.view.members or self._ending.is_joining(replica)
        if not known or self.failure is not None:
            return
        if replica == self._rules.replica:
            self._stop(f"{words}. Starting the replica again would work.")
        else:
            lost = frozenset({replica})
            self._extend(words, lost=lost, gone=lost if gone else frozenset())

    def _stop(self, why: str) -> None:
        words = f"{why} It stops here; what it had not shared yet is lost."
        self._end(ReplicaLostError(words, replicas=[self._rules.replica]))

    def _parted(self, step: int) -> TransportError:
        return TransportError(f"replica {self._rules.replica} left after step {step}; it takes part no more.")

    def _end(self, failure: TransportError) -> None:
        self.close(failure)
        self.part()

    def _settle(self) -> None:
        if (outcome := self._ending.outcome()) is not None:
            self._adopt(outcome)

    def _adopt(self, following: NextView) -> None:
        assert self.book is not None
        change = self._ending.take()
        survivors = () if following.view is None else following.view.members
        members = following.previous.members
        lost = [m for m in members if (m in change.mine.lost if following.view is None else m not in survivors)]
        self.failure = stopped(following, lost, change.why, self._policies)
        stops = self.failure is not None
        self._last, self._reason = following, change.why if stops else f"{change.why}; {following.reason}"
        kept = self.book.end(following, self._reason, self._failure_of, goes_on=not stops)
        self._links.close()
        self._part_from(lost, following)
        self._mailbox.forget(f"{following.previous.id}/")
        if following.view is not None:
            self.view = following.view
        note = self._on_change(following)  # before `_open`, which may adopt the view after this one
        for rank in self._lineup.ranks(following.joined) if following.view is not None else ():
            self._board.send(rank, adopted(following) | {"kind": "welcome", "note": note})
        if following.joined:
            self._from_step = following.from_step
        self._open(self.view, kept, following.void)
        if self.view is following.view:
            self._lose_again(change.mine)
        waiting = [*self._joiners.complete(), *change.mine.joining]
        for replica in dict.fromkeys(m for m in waiting if m not in self.view.members):
            if following.joined or replica in change.mine.joining:  # it may have no connection to who has just joined
                self._joiners.forget(replica)
                for rank in self._lineup.ranks((replica,)):
                    self._board.send(rank, _AGAIN)
            else:
                self._let_join(replica)

    def _part_from(self, lost: Sequence[int], following: NextView) -> None:
        excluded = {"kind": "excluded", "view": following.previous.id, "reason": self._reason}
        left = dict(following.left)
        for rank in self._lineup.ranks(lost):
            knows = following.view is None or rank // self._rules.ranks_per_replica in left  # or is the larger side
            if not knows and self._lineup.is_connected(rank):
                self._board.send(rank, excluded)
            self._lineup.part_from(rank)

    def _lose_again(self, mine: Report) -> None:
        """Those whom the others agreed on before they heard of it; no connection is left that would tell of it."""
        members = frozenset(self.view.members)
        left = frozenset(each for each in mine.left if each[0] in members)
        still = (mine.lost & members) | self._lineup.unreached(self.view)
        if still:
            words = f"replica {self._rules.replica} can't reach all of the next view"
            commits = mine.left_commits if left else frozenset()
            self._extend(words, lost=still, gone=mine.gone & still, left=left, left_commits=commits)

    def _let_join(self, replica: int) -> None:
        self._joiners.forget(replica)
        self._extend(f"replica {replica} wants to join", joining=frozenset({replica}))

    def _late(self, late: frozenset[int], words: str) -> None:
        self._extend(words, lost=late)

    def _unlinked(self, failed: Mapping[int, str]) -> None:
        peer, words = next(iter(failed.items()))
        me = self._rules.replica
        self._extend(f"replica {peer} has no payload connection to replica {me}: {words}", lost=frozenset(failed))

    def _broken(self, words: str) -> None:
        """A payload connection ended while the control connection stands: the same members connect anew."""
        if self._ending.change is None and self.failure is None:
            self._board.loop.call_later(1.0, self._form_anew, self.view, words)

    def _form_anew(self, view: View, words: str) -> None:
        if self.view is view and self._ending.change is None and self.failure is None:
            self._extend(words)
