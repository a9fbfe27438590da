"""The sequence of views: why one ends, who joins and leaves, adopting the next one, and hanging up on lost members."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any

from diloco.algorithm import RoundId
from diloco.errors import ReplicaLostError, TransportError
from diloco.membership import GREATEST, Cause, NextView, RoundIds, View, names_of, refusal
from diloco.protocol.effects import Outbox, RoundFailed, ViewBegan
from diloco.protocol.events import Ejected, Submitted
from diloco.protocol.members import Roster
from diloco.protocol.rounds import Rounds
from diloco.protocol.rules import Rules
from diloco.protocol.view_change import MOST_AHEAD, MOST_JOINERS, ViewChange
from diloco.protocol.wire import Accept, Adopted, Change, Excluded, Leaving, Propose, Refused

_TRY_AGAIN = Refused("a view change is in progress")
_MAY_BE_RUNNING = Refused("a member that was lost by silence may still be running")
_GUARD = 3.0  # times `silence_s`: no replica joins for so long after a member was lost by silence


class Views:
    """The current view, and the change to the next one.

    `end` begins a change for a reason, and `drop` and `lose` do so as a rank is lost. This rank's part ends by `leave`
    (it says so), `stop` (it hangs up), `exclude` (the others go on without it), or `close` (rounds end, connections
    stay).
    """

    def __init__(self, rules: Rules, roster: Roster, rounds: Rounds, outbox: Outbox) -> None:
        self.view = View(-1, (rules.replica,))  # the current view; a joiner is not in it yet
        self.change: ViewChange | None = None  # the change to the next view, if it has begun
        self.adopted_last: NextView | None = None  # what ended the previous view; None before the first change
        self.closed_to_joiners = ""  # why no replica can join at present; "" if any can
        self._first: View | None = None  # the view in which this rank began with all others; None: it joined
        self._rules = rules
        self._roster = roster
        self._rounds = rounds
        self._outbox = outbox
        # replica -> its ranks that have asked to join -> the ranks to which each of them is connected
        self._requests: dict[int, dict[int, frozenset[int]]] = {}
        self.replaced = False  # whether the others have stopped this process because another one has its place
        self._gone_early: set[int] = set()  # replicas that ended before this rank was a member
        self._ejected, self._why_ejected = frozenset[int](), ""  # replicas that are to be members no more
        self._informed: set[int] = set()  # replicas that know of it, as they have said
        # replicas that were left out and may be running -> until when nobody else joins, as they may go on
        self._apart_until: dict[int, float] = {}
        self.presumed_gone: set[int] = set()  # replicas that were left out because they seemed to have ended

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
    def waiting(self) -> str:
        """Why the change to the next view waits for members to be back; "": it does not, or there is none."""
        return "" if self.change is None else self.change.waiting

    @property
    def missing(self) -> frozenset[int]:
        """The members that a change which waits, or has waited, can't hear, or that have ended."""
        if self.change is None or not self.change.has_waited:
            return frozenset()
        return (self.change.mine.lost - self.change.mine.left).intersection(self.view.members)

    @property
    def heard(self) -> tuple[int, ...]:
        """The members of the view that this rank has not lost, itself included."""
        lost = frozenset() if self.change is None else self.change.mine.lost
        return tuple(each for each in self.view.members if each not in lost)

    @property
    def joining(self) -> frozenset[int]:
        """The replicas that become members by the current change, if there is one."""
        return frozenset() if self.change is None else self.change.mine.joining

    def others(self) -> list[int]:
        return [rank for rank in self._rules.ranks(self.view.members) if rank != self._rules.rank]

    # Requests of this rank's owner.

    def begin(self, view: View, *, member: bool) -> None:
        self.view = view
        if member:
            self._first = view
            self._open((), frozenset())
        self._outbox.queue.append(ViewBegan())

    def enter(self, following: NextView, connections: Mapping[int, int]) -> None:
        """Become a member of a view that the others agreed on. Ranks that were lost earlier are lost in this view."""
        self.view = following.view
        self._rounds.joined = following.from_step > 1  # at step 1 all replicas have the initial state
        self._rounds.from_step, self._rounds.step = following.from_step, following.from_step - 1
        self._roster.members.update(connections)
        self._open((), following.void)
        self._outbox.queue.append(ViewBegan(following))

    def leave(self) -> None:
        """Leave for good, with all ranks of this replica; the others continue, and rounds in flight end here."""
        if self.failure is None:
            step = self._rounds.step
            self._outbox.send(self.others(), Leaving(max(0, self.view.id), step))
            # the others hang up once they have received it
            me = self._rules.replica
            self.close(TransportError(f"replica {me} left after step {step} and takes part in no more rounds."))

    def close(self, failure: TransportError, commits: Container[RoundId] = ()) -> None:
        """Take part in no more rounds. Those in flight end with ``failure``, but for what others have committed."""
        self._end_change()
        self._rounds.close(failure, commits)

    def stop(self, why: str) -> None:
        """Take part in no more rounds for the reason ``why``, and hang up on all others."""
        me = self._rules.replica
        failure = f"{why} Replica {me} takes part in no more rounds; work not yet shared stays in its local parameters."
        self.close(ReplicaLostError(failure, replicas=[me]))
        self._hang_up_on(self.others())

    def hang_up_on_others(self) -> None:
        self._hang_up_on(rank for rank in self.others() if self._rules.replica_of(rank) != self._rules.replica)

    # The reasons to end the current view.

    def end(self, why: str, cause: Cause, **facts: Any) -> None:
        """End the current view for the reason ``why`` and the ``facts`` of `ViewChange.extend`.

        Ignored if this rank takes no part in the view.
        """
        if change := self._begin_change(why, cause):
            change.extend(**facts)
            self._follow()

    def _begin_change(self, why: str, cause: Cause) -> ViewChange | None:
        """Return the change to the next view, which begins now unless it has begun."""
        if self.failure is None and self.is_member and self.change is None:
            if self._ejected:  # however this rank notices that they go
                why, cause = self._why_ejected, "ejected"
            self.change = ViewChange(self.view, why, cause, self._rules, self._roster, self._rounds, self._outbox)
            self.change.extend(apart=self._ejected)
        return self.change

    def _end_change(self) -> None:
        if self.change is not None:
            self.change = None
            self._outbox.effects.timers[None] = None

    def lose(self, rank: int, why: str, cause: Cause) -> None:
        """Process that the reason is known for which the connection to a rank has ended.

        "ended": nothing listens there any more. A router that has lost its way may say so of a process that runs. So
        where all stop, the process may be running; where the others continue, it counts as ended, or else, of two
        sites, one that is killed would stop the other. See `TcpDirectory`.
        """
        gone = cause == "ended" and self._rules.continue_without_lost
        self._roster.in_doubt.discard(rank)
        replica = self._rules.replica_of(rank)
        rank_of = f"rank {rank} of " if replica == self._rules.replica else ""
        self.drop(rank, f"{rank_of}replica {replica} is lost: {why}", cause, gone=gone)

    def drop(self, rank: int, why: str, cause: Cause = "fault", *, gone: bool = False) -> None:
        """Declare a rank lost for the reason ``why``; ``gone``: its process is known to have ended."""
        replica = self._rules.replica_of(rank)
        self._requests.pop(replica, None)
        if not self.is_member and replica != self._rules.replica:
            if gone:
                self._gone_early.add(replica)
            return
        if replica not in self.joining.union(self.view.members) or self.failure is not None:
            return
        if replica == self._rules.replica:
            self.stop(f"{why}.")
        else:
            # report all current losses together: one of them alone may look like another replica's fault
            apart = {replica, *self._unconnected()}
            self.end(why, cause, gone={replica} if gone else (), apart=apart - {replica} if gone else apart)

    def meet_again(self, rank: int) -> None:
        """Process that a member's process is connected again. What was on its way over the old connection is lost."""
        replica = self._rules.replica_of(rank)
        change = self._begin_change(f"the connection to replica {replica} was interrupted", "interrupted")
        if change is None:
            return
        if self.adopted_last is not None and replica in self.adopted_last.joined:
            self._outbox.effects.welcomed.append(rank)
        if self._roster.reaches(replica):
            change.meet_again(replica)
        else:  # another rank of the replica is missing
            change.tell(rank)
        self._follow()

    def _unconnected(self) -> frozenset[int]:
        """Return the members that are not connected, but for those in doubt."""
        return self._roster.unconnected(self.view) - {self._rules.replica_of(rank) for rank in self._roster.in_doubt}

    def handle_failure(self, failed: RoundFailed) -> None:
        """End the view, as rounds could not take place in it."""
        if failed.view_id == self.view.id and (failed.anyway or not refusal(self.view, failed.late, self._rules)):
            self.end(failed.why, failed.cause, late=failed.late)

    def settle(self) -> None:
        """Do what is due in a view change after some time."""
        if self.change is not None:
            self.change.tick()
            self._follow()
            if self.waiting and self.change is not None:  # a new connection shows both ends that they hear each other
                reached = self._rules.ranks(filter(self._roster.reaches, self.missing))
                self._hang_up_on(filter(self._roster.is_connected, self.change.reporting.intersection(reached)))
        else:
            self._go_on_without_ejected(at_once=True)

    def eject(self, ejected: Ejected) -> None:
        """Accept no view with these replicas any more, and end this one once all others know it, or after a silence.

        If a member ended it earlier, the replicas could agree on the next view with members that don't know.
        """
        informed = set() if ejected.by is None else {self._rules.replica_of(ejected.by)}
        if ejected.replicas != self._ejected:
            self._ejected, self._why_ejected, self._informed = ejected.replicas, ejected.why, informed
        elif informed <= self._informed:
            return  # a member that repeats it would set the timer again and again
        self._informed |= informed
        self._go_on_without_ejected(at_once=self.change is not None)

    def _go_on_without_ejected(self, *, at_once: bool = False) -> None:
        if going := self._ejected.intersection(self.view.members):
            if at_once or self._informed.issuperset({*self.view.members} - going - {self._rules.replica}):
                self.end(self._why_ejected, "ejected", apart=going)
            else:
                self._outbox.effects.timers[None] = self._rules.silence_s

    # Messages about the current view.

    def receive_change(self, sender: int, received: Change) -> None:
        """Process a member's report."""
        last, report, replica = self.adopted_last, received.report, self._rules.replica_of(sender)
        if last is not None and received.view == last.previous.id:
            self._outbox.send([sender], Adopted(last))  # the sender is still in the view that has ended here
        elif received.view != self.view.id:
            pass
        elif report.step > self._rounds.greatest_step:
            limit = f"but no member can be past step {self._rounds.greatest_step}"
            self.drop(sender, f"replica {replica} reports step {report.step}, {limit}")
        elif (newcomers := len(report.joining.difference(self.view.members))) > MOST_JOINERS:
            claim = f"replica {replica} reports that {newcomers} replicas join"
            self.drop(sender, f"{claim}, more than one member admits")
        elif change := self._begin_change(received.why, received.cause):
            if report.ballot > change.mine.ballot + MOST_AHEAD:
                self.drop(sender, f"replica {replica} reports ballot {report.ballot}, far ahead of the others")
            else:
                change.receive_report(report)
                self._let_in()
                self._follow()

    def receive_ballot(self, sender: int, message: Propose | Accept) -> None:
        """Process that a member proposes what follows, or accepts a proposal."""
        if self.change is not None:
            self.change.receive(sender, message)
            self._follow()

    def receive_leaving(self, sender: int, leaving: Leaving) -> None:
        replica = self._rules.replica_of(sender)
        if replica == self._rules.replica:
            self.leave()  # and tell the others, which may lose this rank before the other rank's message arrives
        else:
            self.end(f"replica {replica} left after step {leaving.step}", "left", left=frozenset({replica}))

    def receive_adopted(self, following: NextView) -> None:
        """Follow a member that has adopted what follows the current view."""
        is_near = following.from_step - 1 <= self._rounds.greatest_step
        if is_near and following.previous == self.view and self._begin_change(following.reason, "other"):
            self._adopt(following)

    def receive_parting(self, parting: Excluded) -> None:
        """Stop, as a member continues, or has stopped, without this process."""
        self.replaced |= parting.view == GREATEST  # also if another member has parted for the other reason before
        self.exclude(parting.reason)

    def exclude(self, reason: str) -> None:
        """Stop, as the others continue or stop without this replica."""
        done = "continued" if self._rules.continue_without_lost else "stopped"
        self.stop(f"the others {done} without replica {self._rules.replica}: {reason}.")

    # Joining.

    def receive_join(self, rank: int, connected: frozenset[int]) -> None:
        """Process a rank's request to join. Its replica joins once all of its ranks have asked.

        Args:
            rank: the rank that asks.
            connected: the ranks to which it is connected. If a member that this rank hears is missing, or another
                joiner, the rank is asked to try again.
        """
        replica, members = self._rules.replica_of(rank), self.view.members
        joining = self.joining if self.change is None else self.change.still_joining
        is_replacing = replica in members  # a new process of a member, which joins right after the next view
        needed = {*self.heard} if is_replacing else {*self.heard} | joining
        is_too_late = self.change is not None and not self.change.accepts_joiners
        is_too_late = is_too_late and replica not in joining.union(members)
        is_full = not is_replacing and len(joining.difference(members, {replica})) >= MOST_JOINERS
        if self._roster.is_connected(rank):
            if self.view is not self._first:
                return  # it has joined already, by the request to another member
            self._roster.members[rank] = None  # restarted before this view began
        if self.failure is not None or not self.is_member:
            why = self.closed_to_joiners or str(self.failure or "this replica is still joining")
            self._outbox.send([rank], Refused(why, for_good=self.failure is not None))
        elif self._is_guarded(replica):
            self._outbox.send([rank], _MAY_BE_RUNNING)
        elif is_too_late or is_full or not connected.issuperset(self._rules.ranks(needed - {replica})):
            self._outbox.send([rank], Refused(self.closed_to_joiners) if self.closed_to_joiners else self._later)
        else:
            self._gone_early.discard(replica)
            requests = self._requests.setdefault(replica, {})
            requests[rank] = connected
            if self.closed_to_joiners and not (is_replacing and self.waiting):
                self._outbox.send([rank], Refused(self.closed_to_joiners))
                self._let_in()
                self._follow()
            elif len(requests) == self._rules.ranks_per_replica:
                if is_replacing:  # its old process has ended, whatever this rank knew of it
                    self.end(f"replica {replica} was restarted", "restarted", restarted=frozenset({replica}))
                else:
                    self._admit([replica])
                if self.waiting:
                    self._outbox.send(self._rules.ranks((replica,)), self._later)

    @property
    def _later(self) -> Refused:
        """The answer to a replica that can't become a member yet."""
        return Refused(f"the members wait: {self.waiting}", waits=True) if self.waiting else _TRY_AGAIN

    def _is_guarded(self, replica: int) -> bool:
        """Return whether a member other than ``replica`` was lost by silence so recently that nobody may join."""
        self._apart_until = {
            apart: until_s
            for apart, until_s in self._apart_until.items()
            if until_s > self._outbox.now_s and apart != replica
        }
        return bool(self._apart_until)

    def _is_connected_to(self, replica: int, replicas: Collection[int]) -> bool:
        """Return whether all ranks of a replica were connected to all of ``replicas`` when they last asked to join."""
        requests, needed = self._requests.get(replica, {}), self._rules.ranks(replicas)
        are_complete = len(requests) == self._rules.ranks_per_replica
        return are_complete and all(connected.issuperset(needed) for connected in requests.values())

    def _complete(self) -> list[int]:
        """Return the replicas of which all ranks have asked to join."""
        size = self._rules.ranks_per_replica
        return [replica for replica, requests in self._requests.items() if len(requests) == size]

    def _let_in(self) -> None:
        """While closed to joiners, let those join that have asked this rank, too, and that another member admits."""
        if self.change is not None and self.closed_to_joiners:
            newcomers, let_in = {*self.joining.difference(self.view.members)}, []
            for replica in sorted(self.change.admitted.intersection(self._complete())):
                if replica in newcomers or len(newcomers) < MOST_JOINERS:
                    newcomers.add(replica)
                    let_in.append(replica)
                    self._requests.pop(replica)
            self.change.extend(joining=let_in)

    def _admit(self, replicas: Collection[int]) -> None:
        for replica in replicas:
            self._requests.pop(replica)
        if replicas:
            ask = "ask" if len(replicas) > 1 else "asks"
            self.end(f"{names_of(replicas)} {ask} to join", "joins", joining=frozenset(replicas))

    # The next view.

    def _follow(self) -> None:
        """Adopt the next view, or stop, if that is decided."""
        change = self.change
        outcome = None if change is None else change.evaluate()
        if isinstance(outcome, NextView):
            self._adopt(outcome)
        elif change is not None and outcome is not None:
            lost = sorted(change.mine.lost.intersection(self.view.members))
            failure = _all_stop(change.why) if lost else f"{change.why}: {outcome}. Committed rounds stay committed."
            self._rounds.reason = change.why
            self.close(ReplicaLostError(failure, replicas=lost), change.committed)
            self._hang_up_on(self.others())

    def _adopt(self, following: NextView) -> None:
        change, rounds = self.change, self._rounds
        assert change is not None
        if self._rules.replica not in following.view.members:
            self.exclude(f"{change.why}; {following.reason}")
            return
        self._end_change()
        lost = [member for member in following.previous.members if member not in following.view.members]
        self.adopted_last, failure = following, None
        if lost and not self._rules.continue_without_lost:
            failure = ReplicaLostError(_all_stop(change.why), replicas=lost)
        rounds.failure = failure
        rounds.reason = reason = change.why if failure else f"{change.why}; {following.reason}"
        carried = rounds.end(following.commits, reason, failure, carried=following.carries_over)
        self._disconnect(lost, following)
        self.view = following.view
        self._apart_until |= dict.fromkeys(following.apart, self._outbox.now_s + _GUARD * self._rules.silence_s)
        self.presumed_gone.update({*lost}.difference(following.left, following.apart))
        self._outbox.effects.adopted.append((following, reason, change.cause))
        if following.joined:
            rounds.from_step = following.from_step
        self._open(carried, following.void)
        self._outbox.queue.append(ViewBegan(following, change.mine))

    def _open(self, carried: Sequence[Submitted], void: RoundIds) -> None:
        self._roster.set_members(self.view)
        self.presumed_gone.difference_update(self.view.members)
        # another process may take the number of one that has gone
        self._ejected = self._ejected.intersection(self.view.members)
        if self.failure is None:
            self._outbox.effects.view = self.view
        self._rounds.open(self.view, carried, void)

    def on_view(self, began: ViewBegan) -> None:
        """Handle members that can't be reached and replicas that ask to join, as a view has begun."""
        me, following, mine = self._rules.replica, began.following, began.mine
        members = frozenset(self.view.members)
        apart, gone, left = self._unconnected(), frozenset[int](), frozenset[int]()
        if mine is None:  # this rank was no member before, and may know of some that have ended
            gone = apart & (self._gone_early | self._roster.replaced(apart))
        elif following is not None and self.view is following.view:  # what it lost before has no connection to end now
            apart |= mine.apart & members
            gone, left = mine.gone & members, mine.left & members
        else:
            apart = frozenset()
        if apart | gone:
            why = f"replica {me} can't reach every member of view {self.view.id}: {names_of(apart | gone)}"
            self.end(why, "unreachable", apart=apart - gone, gone=gone, left=left)
        if following is None or mine is None:
            return
        asking = dict.fromkeys((*self._complete(), *sorted(mine.joining)))
        admitted: list[int] = []
        for replica in [each for each in asking if each not in self.view.members]:
            # a replica may not be connected to those that have just joined, or are about to
            if self.closed_to_joiners or not self._is_connected_to(replica, {*self.view.members, *admitted}):
                self._requests.pop(replica, None)
                self._outbox.send(self._rules.ranks((replica,)), _TRY_AGAIN)
            elif len(admitted) < MOST_JOINERS:
                admitted.append(replica)
        self._admit(admitted)
        if self.change is None:
            self._go_on_without_ejected()

    def _disconnect(self, lost: Sequence[int], following: NextView) -> None:
        for rank in self._rules.ranks(lost):
            if self._roster.is_connected(rank):
                if self._rules.replica_of(rank) not in following.left:  # a replica that left knows
                    self._outbox.send([rank], Excluded(following.previous.id, self._rounds.reason))
                self._hang_up_on([rank])
            self._roster.members.pop(rank, None)

    def _hang_up_on(self, ranks: Iterable[int]) -> None:
        for rank in [each for each in ranks if each in self._roster.connections]:
            self._roster.disconnect(rank)
            self._outbox.effects.hang_ups.append(rank)


def _all_stop(why: str) -> str:
    return f"{why}; all replicas stop when one is lost. Committed rounds stay committed."
