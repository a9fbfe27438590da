"""The sequence of views: why one ends, who joins and leaves, adopting the next one, and hanging up on lost members."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from diloco.errors import ReplicaLostError, TransportError
from diloco.membership import (
    NextView,
    RoundKeys,
    View,
    byzantine_quorum,
    could_follow,
    enough_without,
    names_of,
)
from diloco.protocol.events import Outbox, RoundsFailed, Submitted, Timer, ViewBegan
from diloco.protocol.members import Roster
from diloco.protocol.rounds import Rounds
from diloco.protocol.rules import Rules
from diloco.protocol.suspicion import Loss
from diloco.protocol.view_change import MOST_JOINERS, ViewChange
from diloco.protocol.wire import Adopted, Change, Excluded, Leaving, Refused

_TRY_AGAIN = Refused("a view change is in progress")


class Views:
    """The current view, and the change to the next one."""

    def __init__(self, rules: Rules, roster: Roster, rounds: Rounds, outbox: Outbox) -> None:
        self.view = View(-1, (rules.replica,))  # the current view; a joiner is not in it yet
        self.change: ViewChange | None = None  # the change to the next view, if it has begun
        # the last view that this rank was ready for in a change, and that others may have adopted; or None
        self._agreed: View | None = None
        # what ended the previous view, or stopped this rank; None before the first change
        self.adopted_last: NextView | None = None
        self.closed_to_joiners = ""  # why no replica can join at present; "" if any can
        self._first: View | None = None  # the view in which this rank began with all others; None: it joined
        self._rules = rules
        self._roster = roster
        self._rounds = rounds
        self._outbox = outbox
        self._leaving: set[int] = set()  # ranks that have announced that they leave this view
        # replica -> what it says has followed this view, see `_has_support`
        self._said: dict[int, NextView | None] = {}
        self._asked: dict[int, set[int]] = {}  # replica -> its ranks that have asked to join
        self._ended_early: set[int] = set()  # replicas that ended before this rank was a member

    @property
    def failure(self) -> TransportError | None:
        """Why this rank takes part in no more rounds, or None."""
        return self._rounds.failure

    @property
    def is_member(self) -> bool:
        """Whether this rank is a member of the view, or was when it stopped."""
        return self._rounds.view is not None

    @property
    def last_view(self) -> View | None:
        """The newest view that this rank was a member of; None before the first."""
        return self.view if self.is_member else None

    @property
    def agreed_view(self) -> View | None:
        """The view after `last_view` that this rank was ready for, and that others may have adopted; or None."""
        mine = None if self.change is None else self.change.mine.agreed
        agreed = self._agreed if mine is None else mine.following.view
        return agreed if agreed is not None and agreed.id > self.view.id else None

    @property
    def joining(self) -> frozenset[int]:
        """The replicas that become members by the current change, if there is one."""
        return frozenset() if self.change is None else self.change.mine.joining

    def others(self) -> list[int]:
        return [rank for rank in self._rules.ranks(self.view.members) if rank != self._rules.rank]

    # Requests of this rank's owner.

    def begin(self, view: View, *, member: bool) -> None:
        """Start in ``view``, or only observe it until `enter` if this rank is not a ``member``."""
        self.view = view
        if member:
            self._first = view
            self._open((), frozenset())
        self._outbox.queue.append(ViewBegan())

    def enter(self, following: NextView, connections: Mapping[int, int]) -> None:
        """Become a member of a view that the others agreed on. Ranks that were lost earlier are lost in this view.

        Args:
            following: the view.
            connections: rank -> its connection when the welcome was received; another process may have taken its place
                since.
        """
        assert following.view is not None
        self.view = following.view
        self._rounds.joined = following.from_step > 1  # at step 1 all replicas have the initial state
        self._rounds.from_step, self._rounds.step = following.from_step, following.from_step - 1
        self._roster.members.update(connections)
        self._open((), following.void)
        self._outbox.queue.append(ViewBegan(following))

    def leave(self, step: int) -> None:
        """Leave for good after inner step ``step``, with all ranks of this replica; rounds in flight end here."""
        if self.failure is None:
            self._outbox.send(self.others(), Leaving(max(0, self.view.id), step))
            # the others hang up once they have received it
            me = self._rules.replica
            self.close(TransportError(f"replica {me} left after step {step} and takes part in no more rounds."))

    def close(self, failure: TransportError) -> None:
        """Take part in no more rounds. Those in flight end with ``failure``."""
        self._end_change()
        self._rounds.close(failure)
        self._outbox.effects.closed = True

    def stop(self, why: str) -> None:
        """Take part in no more rounds for the reason ``why``, and hang up on all others."""
        me = self._rules.replica
        words = f"{why} Replica {me} takes part in no more rounds; work not yet shared stays in its local parameters."
        self.close(ReplicaLostError(words, replicas=[me]))
        for rank in self.others():
            self._hang_up(rank)

    def hang_up_on_others(self) -> None:
        for rank in self.others():
            if self._rules.replica_of(rank) != self._rules.replica:
                self._hang_up(rank)

    # The reasons to end the current view.

    def end(self, why: str, **facts: Any) -> None:
        """End the current view for the reason ``why`` and the ``facts`` of `ViewChange.extend`.

        Ignored if this rank takes no part in the view.
        """
        if change := self._begin_change(why):
            self._follow(change.extend(**facts))

    def _begin_change(self, why: str) -> ViewChange | None:
        """Return the change to the next view, which begins now unless it has begun."""
        if self.failure is None and self.is_member and self.change is None:
            self.change = ViewChange(self.view, why, self._rules, self._roster, self._rounds, self._outbox)
        return self.change

    def _end_change(self) -> None:
        if self.change is not None:
            self._agreed, self.change = self.agreed_view, None
            self._outbox.effects.timers[Timer("settle", self.view.id)] = None

    def lose(self, rank: int, loss: Loss) -> None:
        replica = self._rules.replica_of(rank)
        of_mine = f"rank {rank} of " if replica == self._rules.replica else ""
        self.drop(rank, f"{of_mine}replica {replica} is lost: {loss.text}", gone=loss.kind == "gone")

    def drop(self, rank: int, words: str, *, gone: bool = False) -> None:
        """Declare a rank lost for the reason in ``words``; ``gone``: its process is known to have ended."""
        replica = self._rules.replica_of(rank)
        self._asked.pop(replica, None)
        if not self.is_member and replica != self._rules.replica:
            if gone:
                self._ended_early.add(replica)
            return
        if replica not in self.joining.union(self.view.members) or self.failure is not None:
            return
        if replica == self._rules.replica:
            self.stop(f"{words}.")
        else:
            lost = frozenset({replica})
            # report all current losses together: one of them alone may look like another replica's fault
            unheard = lost | self._roster.unreached(self.view)
            self.end(words, unheard=unheard, gone=lost if gone else frozenset())

    def handle_failed(self, failed: RoundsFailed) -> None:
        """End the view, as rounds could not take place in it."""
        if failed.view_id != self.view.id:
            return
        enough = enough_without(self.view, failed.behind, self._rules.policy)
        if failed.anyway or failed.unheard or enough:
            self.end(failed.reason, behind=failed.behind, unheard=failed.unheard)

    def settle(self, view_id: int) -> None:
        """Push a long view change to its end: stop waiting for answers first, then exclude the replicas that obstruct
        it."""
        change, wait_s = self.change, self._rules.silence_s
        if change is None or view_id != self.view.id:
            return
        if change.patience_s() > 0:
            wait_s = change.patience_s()
        elif change.stop_waiting():
            wait_s /= 2
        elif blamed := change.blame():
            self.end(f"{names_of(blamed)} did not agree on the next view within {wait_s:g} s", unheard=blamed)
        else:
            return
        if self.change is change:
            self._outbox.effects.timers[Timer("settle", view_id)] = wait_s

    # Messages about the current view.

    def receive_change(self, sender: int, received: Change) -> None:
        last, step = self.adopted_last, received.report.step
        if last is not None and received.view == last.previous.id:
            self._outbox.send([sender], Adopted(last))  # the sender is still in the view that has ended here
        elif received.view == self.view.id and step > self._rounds.greatest_step:
            words = f"replica {self._rules.replica_of(sender)} reports step {step}"
            self.drop(sender, f"{words}, but no member can be past step {self._rounds.greatest_step}")
        elif received.view == self.view.id and len(received.report.joining) > MOST_JOINERS * len(self.view.members):
            words = (
                f"replica {self._rules.replica_of(sender)} reports that {len(received.report.joining)} replicas join"
            )
            self.drop(sender, f"{words}, more than so few members admit")  # all members would have to hear of each
        elif received.view == self.view.id and (change := self._begin_change(received.why)):
            self._follow(change.absorb(received.report))

    def receive_leaving(self, sender: int, leaving: Leaving) -> None:
        replica = self._rules.replica_of(sender)
        if replica == self._rules.replica:
            # and announce it, in case this rank's connections end before the other rank's message arrives
            self.leave(leaving.step)
        elif sender not in self._leaving:
            self._leaving.add(sender)
            words = f"replica {replica} left after step {leaving.step}"
            self.end(words, left=frozenset({replica}))

    def receive_adopted(self, sender: int, following: NextView) -> None:
        """Process a member's message that it has adopted what follows the current view.

        Where that is not what this rank was ready for, it needs as many equal reports as in `receive_parting`.
        """
        change = self.change
        if change is None:
            return
        if following.view is not None and self._rules.replica in following.view.members:
            near = following.from_step - 1 <= self._rounds.greatest_step
            if near and could_follow(following, self.view, change.mine):
                agreed = change.mine.agreed
                if self._has_support(sender, following) or (agreed is not None and agreed.following == following):
                    self._adopt(following)
        elif following.previous == self.view and self._has_support(sender):
            self._adopt(following)

    def receive_parting(self, sender: int, reason: str) -> None:
        """Process a member's report that it continues, or stops, without this replica.

        The report counts once more than f members (`byzantine_quorum`), or all that are connected, have sent one.
        """
        if self._has_support(sender):
            self.exclude(reason)

    def _has_support(self, sender: int, following: NextView | None = None) -> bool:
        """Record what a member says has followed; None: something without this replica. Return whether it counts."""
        self._said[self._rules.replica_of(sender)] = following
        alike = {replica for replica, said in self._said.items() if said == following}
        here = {*self.view.members} - {self._rules.replica} - self._roster.unreached(self.view)
        return len(alike) >= byzantine_quorum(len(self.view.members)) or here <= alike

    def send_excluded(self, rank: int) -> None:
        """Tell a rank of an ended view that it is excluded: it was lost while it began, and could not be told then."""
        self._outbox.send([rank], Excluded(self.view.id, self._rounds.reason))

    def exclude(self, reason: str) -> None:
        """Stop, as the others continue or stop without this replica."""
        done = "continued" if self._rules.continue_without_lost else "stopped"
        self.stop(f"the others {done} without replica {self._rules.replica}: {reason}.")

    # Joining.

    def receive_join(self, rank: int, connected: frozenset[int]) -> None:
        """Process a rank's request to join. Its replica joins once all of its ranks have asked.

        Args:
            rank: the rank that asks.
            connected: the ranks to which it is connected. If a member is missing, or another joiner, the rank is asked
                to try again.
        """
        replica, joining, members = self._rules.replica_of(rank), self.joining, self.view.members
        if self._roster.is_connected(rank):
            if self.view is not self._first:
                return  # it has joined already, by the request to another member
            self._roster.members[rank] = None  # restarted before this view began
        if self.closed_to_joiners or self.failure is not None or not self.is_member:
            why = self.closed_to_joiners or str(self.failure or "this replica is still joining")
            self._outbox.send([rank], Refused(why, for_good=self.failure is not None))
        elif (
            (self.change is not None and not self.change.accepts_joiners and replica not in joining.union(members))
            or len(joining - {replica}) >= MOST_JOINERS
            or not connected.issuperset(self._rules.ranks(joining.union(members) - {replica}))
        ):
            self._outbox.send([rank], _TRY_AGAIN)
        else:
            self._ended_early.discard(replica)
            asked = self._asked.setdefault(replica, set())
            asked.add(rank)
            if len(asked) < self._rules.ranks_per_replica:
                pass
            elif replica in members:  # it is back before its loss was noticed: lose it first
                self.end(f"replica {replica} was restarted", gone=frozenset({replica}))
            else:
                self._admit([replica])

    def _admit(self, replicas: Collection[int]) -> None:
        for each in replicas:
            self._asked.pop(each)
        if replicas:
            words = f"{names_of(replicas)} {'ask' if len(replicas) > 1 else 'asks'} to join"
            self.end(words, joining=frozenset(replicas))

    # The next view.

    def _follow(self, following: NextView | None) -> None:
        if following is not None:
            self._adopt(following)

    def _adopt(self, following: NextView) -> None:
        change, rounds, effects = self.change, self._rounds, self._outbox.effects
        assert change is not None
        me, members = self._rules.replica, following.previous.members
        if following.view is not None and me not in following.view.members:
            self.exclude(following.reason)
            return
        self._end_change()
        staying: Collection[int] = change.staying
        if following.view is not None:
            staying = following.view.members
        elif change.is_left_out:
            staying = {me, *members} - self._roster.unreached(following.previous)
        lost = [member for member in members if member not in staying]
        self.adopted_last, failure = following, self._stop_error(following, lost, change.why)
        rounds.failure = failure
        rounds.reason = reason = change.why if failure else f"{change.why}; {following.reason}"
        carried = rounds.end(following, reason, failure)
        effects.closed = effects.closed or failure is not None
        self._disconnect(lost, following)
        joined: tuple[int, ...] = ()
        if following.view is not None:
            self.view, joined = following.view, self._rules.ranks(following.joined)
            # they were lost after the view was agreed on, so they may not know of it
            late = self._rules.ranks(m for m in staying if m not in change.staying)
            self._outbox.send(late, Adopted(following))
        effects.adopted.append((following, reason, joined))
        if following.joined:
            rounds.from_step = following.from_step
        self._open(carried, following.void)
        self._outbox.queue.append(ViewBegan(following, change.mine))

    def _stop_error(self, following: NextView, lost: Sequence[int], why: str) -> ReplicaLostError | None:
        """Return why this side does not continue after ``lost`` were lost, or None if it does."""
        if following.view is not None and (self._rules.continue_without_lost or not lost):
            return None
        side = f"{why}: {following.reason}" if following.view is None else f"{why}; all replicas stop when one is lost"
        return ReplicaLostError(f"{side}. Committed rounds stay committed.", replicas=lost)

    def _open(self, carried: Sequence[Submitted], void: RoundKeys) -> None:
        self._roster.set_members(self.view)
        self._said.clear()
        self._leaving.clear()
        if self.failure is None:
            self._outbox.effects.view = self.view
        self._rounds.open(self.view, carried, void)

    def on_view_began(self, began: ViewBegan) -> None:
        """Handle members that can't be reached and replicas that ask to join, as a view has begun."""
        mine, following, me = began.mine, began.following, self._rules.replica
        members = frozenset(self.view.members)
        unheard, gone, left = self._roster.unreached(self.view), frozenset[int](), frozenset[int]()
        if mine is None:  # what it knows of members that ended before it was one
            gone = unheard & (self._ended_early | self._roster.replaced(unheard))
        elif following is not None and self.view is following.view:  # they have no connection whose end it will notice
            unheard |= {other for one, other in mine.unheard if one == me} & members
            gone, left = mine.gone & members, mine.left & members
        else:
            unheard = frozenset()
        if unheard | gone:
            words = f"replica {me} can't reach every member of view {self.view.id}: {names_of(unheard | gone)}"
            self.end(words, unheard=unheard, gone=gone, left=left)
        if following is None or mine is None:
            return
        complete = [replica for replica, asked in self._asked.items() if len(asked) == self._rules.ranks_per_replica]
        waiting = [each for each in dict.fromkeys((*complete, *mine.joining)) if each not in self.view.members]
        # they may not be connected to those that have just joined
        again = [each for each in waiting if following.joined or each in mine.joining]
        for replica in again:
            self._asked.pop(replica, None)
            self._outbox.send(self._rules.ranks((replica,)), _TRY_AGAIN)
        self._admit([each for each in waiting if each not in again][:MOST_JOINERS])

    def _disconnect(self, lost: Sequence[int], following: NextView) -> None:
        for rank in self._rules.ranks(lost):
            if self._roster.is_connected(rank):
                if (
                    following.view is not None and self._rules.replica_of(rank) not in following.left
                ):  # a replica that left knows
                    self._outbox.send([rank], Excluded(following.previous.id, self._rounds.reason))
                self._hang_up(rank)
            self._roster.members.pop(rank, None)

    def _hang_up(self, rank: int) -> None:
        if rank in self._roster.connections:
            self._roster.disconnect(rank)
            self._outbox.effects.hang_ups.append(rank)

    def validate(self) -> None:
        """Assert what holds between two events, for tests."""
        me, change = self._rules.replica, self.change
        assert not self.is_member or me in self.view.members, "a member of a view that it is not in"
        assert change is None or change.view == self.view, "a change of another view"
        assert change is None or self._rounds.frozen, "rounds go on during a view change"
        if self.is_member and self.failure is None:
            assert self._rounds.view == self.view, "rounds of another view"
            assert change is not None or not self._rounds.frozen, "rounds are frozen for ever"
