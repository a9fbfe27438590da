"""The agreement of a view's members on the next view, and on the outcome of the rounds in flight.

This is single-decree Paxos among the ranks of the view that ends, with a proposer that rotates; docs/design.md explains
it. Each rank freezes, and reports to all others, first-hand, whom it can't hear and what it knows of the rounds. The
proposer of a ballot computes what follows from the reports of all ranks that are to stay, and each of these accepts it
if it hears all of them. It is adopted once all that stay have accepted it; so every member of the next view hears every
other one, in both directions. (A value that may have been chosen before is proposed again, and adopted once as many as
may decide have accepted it, whoever hears whom.) Members may end, freeze or hear nothing, but they don't lie.

A rank that hears too few members to decide waits, for as long as it takes, and goes on when enough are back.

Why at most one value is chosen for a view. In brackets is a test of each rule, or the network of
tests/protocol/test_view_rules.py in which two values are chosen without it:

1. A report is a promise: whoever has reported a ballot accepts nothing of an earlier one [`late_proposal`].
2. A fresh value is chosen once all that it lets stay have accepted it; they may decide [`proposer_is_cut_off`].
3. A value proposed again is chosen once so many members have accepted it that they may decide [`proposer_is_cut_off`].
4. Any two sets that may decide share a member, unless all others of the view have ended, or `Policy.split` lets a side
   of a split network go on with half of the view or less (`refusal`) [test_two_sides_never_both_go_on_...].
5. So of the reports of its ballot a proposer sees each value that may have been chosen, and proposes the newest of
   these again, and a fresh value only if there is none [`proposer_is_cut_off`].
6. A member that was apart may have decided with others before it ended, so it is never gone [`ended_after_silence`],
   unless it reports on this view once more [test_who_was_apart_and_ends_before_it_reports_again_may_have_decided]. A
   new process of it shows that it has ended, but only while that is connected and asks to join, as it may become a
   member elsewhere [test_a_process_that_was_started_again_and_goes_elsewhere_shows_nothing].
7. Nobody joins soon after a member was lost by silence, as it may go on once all others end [`joined_after_silence`].
8. What a member has adopted was chosen, so whoever hears of it adopts it, too. Leaving this out costs time only, as the
   value is proposed again [test_who_is_still_in_a_view_that_has_ended_elsewhere_is_told_how].

Why a change ends, or waits at rest: a rank that has reported nothing by the end of a ballot is apart. A new connection
begins the ballot anew, so a rank that waits replaces an open one only if the other end has reported on this view. A
process that was let in reports nothing until it has a welcome, which is sent again on a new connection
[test_who_is_let_in_and_does_not_hear_of_it_...]. A rank that waits, and hears of a later view from a member, reports to
that once more [test_who_waits_and_hears_of_a_later_view_asks_what_has_ended_its_own]. Where members wait for others,
anybody may join [test_members_that_are_too_few_go_on_with_new_ones].
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from diloco.algorithm import RoundId
from diloco.membership import Accepted, Cause, NextView, Report, View, names_of, next_view, refusal, staying_members
from diloco.protocol.effects import Outbox
from diloco.protocol.members import Reports, Roster
from diloco.protocol.rounds import Rounds
from diloco.protocol.rules import Rules
from diloco.protocol.wire import Accept, Adopted, Change, Propose

MOST_JOINERS = 32  # the most replicas that one member lets join by a change
MOST_AHEAD = 4096  # no rank can be as many ballots ahead as this
_TURN = 2.0  # times `silence_s`: the time of a ballot; it grows by itself with every round of proposers
_TICKS = 12  # how often per turn a rank looks at the clock
_MOST_TURNS = 10  # where all stop when one is lost, a rank stops after so many without a next view
_JOIN_WINDOW = 0.2  # times `silence_s`: how long others may still join by a change that has begun
# Parts of a turn. A ballot succeeds if its proposer lives and no message takes longer than `_DELAY`: the others begin
# at most that much earlier or later, the proposer has their reports by `_UNREPORTED`, and its proposal and their
# acceptances have arrived before anybody gives it up.
_DELAY = 1 / 8
_SAME_JOINERS = 1 / _TICKS  # how long a proposer waits until all that report admit the same replicas
_UNREPORTED = 1 / 4  # a rank that has not reported the ballot after so long is apart from the proposer
_NOT_HEARD = 3 / 4  # a proposer that a rank has lost, and others have not, is given up after so long
_REUNION = 7 / 12  # of the first turn: how long a proposer waits for other lost members, once one of them is back
# times `silence_s`: by then a rank that waits has dialled, and reached, each member that runs
REDIAL = _REUNION * _TURN
assert 2 * _DELAY <= _UNREPORTED
assert _SAME_JOINERS < _UNREPORTED
assert _UNREPORTED + 3 * _DELAY <= _NOT_HEARD < 1
assert _REUNION + 3 * _DELAY <= 1


class ViewChange:
    """One rank's part in the change from ``view`` to the next one. While it lasts, the rounds of the view are frozen.

    Its owner passes on what it observes and receives, and then calls `evaluate`.
    """

    def __init__(
        self, view: View, why: str, cause: Cause, rules: Rules, roster: Roster, rounds: Rounds, outbox: Outbox
    ) -> None:
        self.view = view
        self.why, self.cause = why, cause  # the reason for the change as this rank learned it
        # what this rank knows, and its promise
        self.mine = replace(rounds.freeze(), step=rounds.step, unsteady=roster.unsteady(view, outbox.now_s))
        self._rules = rules
        self._roster = roster
        self._rounds = rounds
        self._outbox = outbox
        self._ranks = rules.ranks(view.members)
        self._unsent = True  # whether others lack what this rank has to report
        self.waiting = ""  # why no set of members that this rank hears may decide; "": one may
        # ranks of members that were apart and have reported nothing since: they may have decided without this rank, so
        # they never count as gone
        self._were_apart: set[int] = set()
        self.reporting: set[int] = set()  # ranks that have reported on this view, so they know that they are members
        self._reports = Reports()
        self._began_s = outbox.now_s
        self.has_waited = False
        self._reunion_s = -math.inf  # when the first member was back for which this rank has waited
        self._num_ballots = 0
        self._yielded = False
        self._why_failed = ""  # why the last ballot chose nothing
        self._proposal: Propose | None = None  # of the current ballot
        self._clear()
        self.tick()

    @property
    def accepts_joiners(self) -> bool:
        """Whether replicas may still join by this change; each one more prolongs it for all, unless it waits."""
        is_new = self._outbox.now_s - self._began_s <= _JOIN_WINDOW * self._rules.silence_s
        return bool(self.waiting) or (is_new and self.mine.ballot == 0)

    @property
    def still_joining(self) -> frozenset[int]:
        """The replicas that join by this change; while it waits, those that have ended keep nobody else out."""
        return self._joining if self.waiting else self.mine.joining

    @property
    def committed(self) -> frozenset[RoundId]:
        """The rounds that a member has committed, as far as is known."""
        return self._reports.union("commits")

    @property
    def admitted(self) -> frozenset[int]:
        """The replicas that other members let join."""
        return self._reports.union("joining")

    def tick(self) -> None:
        """Look at the clock, now and again after a part of a turn."""
        self._outbox.effects.timers[None] = _TURN * self._rules.silence_s / _TICKS
        self._ticked, self._failures = True, 0

    # What this rank observes and receives.

    def extend(
        self,
        *,
        joining: Collection[int] = (),
        apart: Collection[int] = (),
        gone: Collection[int] = (),
        left: Collection[int] = (),
        late: Collection[int] = (),
        restarted: Collection[int] = (),
    ) -> None:
        """Add what this rank has observed: replicas as in a `Report`, and members whose new processes ask to join."""
        members = frozenset(self.view.members)
        were_apart = {self._rules.replica_of(rank) for rank in self._were_apart}
        newcomers, mine = frozenset(joining) - members, self.mine
        if self.waiting and newcomers:
            for lost in mine.lost - members:  # it has come again, or others come in its place
                mine = mine.without(lost)
        joining = mine.joining | newcomers
        mine = replace(mine, joining=joining).extended(
            (members | joining) - {self._rules.replica},
            apart={*apart, *were_apart.intersection((*gone, *left))},
            gone=frozenset(gone) - were_apart,
            left=frozenset(left) - were_apart,
            late=late,
            restarted=restarted,
        )
        if mine != self.mine:
            self._were_apart.update(self._rules.ranks(mine.apart - self.mine.apart))
            self.mine, self._unsent, self.waiting = mine, True, ""

    def tell(self, rank: int) -> None:
        """Send the report to a rank, which answers what it has adopted if the view has ended there."""
        self._outbox.send([rank], Change(self.mine, self.why, self.cause))

    def meet_again(self, replica: int) -> None:
        """Note that a member's process is connected again, which has adopted nothing unless it says so."""
        if self.waiting:
            self._reunion_s = self._outbox.now_s
        self.mine, self._unsent, self.waiting = self.mine.without(replica), True, ""
        for rank in self._rules.ranks((replica,)):
            self._reports.forget(rank)
        if self._proposal is None and (self.mine.accepted is None or self.mine.accepted.ballot < self.mine.ballot):
            self._ballot_s, self._yielded = self._outbox.now_s, False
        else:
            self._promise(self.mine.ballot + 1)

    def _forget_restarted(self) -> None:
        """Count members as apart, not gone, whose new process is no longer connected: it may be a member elsewhere."""
        restarted = self.mine.joining.intersection(self.view.members)
        for replica in restarted - self._roster.replaced(restarted):
            self.mine = self.mine.without(replica)
            self.extend(apart={replica})

    def receive_report(self, report: Report) -> None:
        """Receive another rank's report."""
        self.reporting.add(report.rank)
        replica, before = self._rules.replica_of(report.rank), self._reports.last.get(report.rank)
        if replica in self.mine.lost or (before is not None and report.number <= before.number):
            return
        self._reports.keep(report)
        self._were_apart.discard(report.rank)
        if report.ballot > self.mine.ballot:
            self._promise(report.ballot)
        # accusations by others that this rank's own observation supports
        late, is_lost_there = report.late - self.mine.late, self._rules.replica in report.lost
        if late:
            late &= self._rounds.suspects()
        if late or is_lost_there:
            self.extend(late=late, apart={replica} if is_lost_there else ())

    def receive(self, sender: int, message: Propose | Accept) -> None:
        """Receive what is proposed or accepted in a ballot, by a rank that has reported the ballot before."""
        if message.ballot != self.mine.ballot or self._rules.replica_of(sender) in self.mine.lost:
            return
        if isinstance(message, Accept):
            self._accepts.add(sender)
        elif (
            sender == self._proposer
            and self._proposal is None
            and message.following.previous == self.view
            and message.following.from_step - 1 <= self._rounds.greatest_step
        ):
            self._proposal = message

    # What follows from that.

    def evaluate(self) -> NextView | str | None:
        """Report, propose and accept what is due. Return what to adopt, or None while that is open.

        If no set of members that this rank hears may decide, it waits, and says why in `waiting`; where all stop when
        one is lost, it returns why instead.
        """
        self._forget_restarted()
        while True:
            before = self.mine
            if not self.waiting:  # else no ballot can choose anything
                self._give_up_on_silent()
                # between two looks at the clock each proposer may fail once: where members hear few of the others,
                # every ballot would fail at once, for ever
                if self._failures < len(self.view.order) and (why := self._failure()):
                    self._why_failed, self._failures = why, self._failures + 1
                    self._promise(self.mine.ballot + 1)
            self._report()
            self.waiting = self._why_wait()
            self.has_waited = self.has_waited or bool(self.waiting)
            if self.waiting and not self._rules.continue_without_lost:
                return self.waiting
            self._propose()
            self._accept()
            if (following := self._chosen()) is not None:
                is_fresh = self._proposal is not None and not self._proposal.again
                self._send(Adopted(following), but=self._accepts if is_fresh else ())  # these adopt it themselves
                return following
            if self.mine is before:
                return None

    # The current ballot.

    @property
    def _first(self) -> int:
        """The replica whose first rank is the proposer."""
        return self.view.order[self.mine.ballot % len(self.view.order)]

    @property
    def _proposer(self) -> int:
        return self._rules.ranks((self._first,))[0]

    @property
    def _waited_s(self) -> float:
        return self._outbox.now_s - self._ballot_s

    @property
    def _turn_s(self) -> float:
        return _TURN * self._rules.silence_s * (1 + self._num_ballots // len(self.view.members))

    def _promise(self, ballot: int) -> None:
        """Begin a ballot: this rank will accept nothing of an earlier one."""
        self.mine, self._unsent = replace(self.mine, ballot=ballot), True
        self._num_ballots += 1
        self._clear()

    def _clear(self) -> None:
        """Begin a ballot, of which nothing is known."""
        self._ballot_s = self._outbox.now_s
        self._proposal = None
        self._accepts: set[int] = set()  # the ranks that have accepted it
        self._searched = 0  # the number of reports known when this rank as a proposer last searched for those that stay

    def _failure(self) -> str:
        """Return why the ballot will choose nothing, as far as this rank knows, or ""."""
        waited_s, turn_s, proposer = self._waited_s, self._turn_s, self._first
        if waited_s >= turn_s:
            return f"it took {turn_s:g} s"
        if proposer in self.mine.gone:
            return f"its proposer, replica {proposer}, has ended"
        if proposer in self.mine.lost and (waited_s >= _NOT_HEARD * turn_s or self._all_have_lost({proposer})):
            return f"its proposer, replica {proposer}, can't be heard"
        if lost := self.mine.lost.intersection(self._needed):
            return f"{names_of(lost)} can't be heard by replica {self._rules.replica}"
        return ""

    @property
    def _needed(self) -> tuple[int, ...]:
        """The replicas that all have to accept the proposal, if it is fresh and this one is among them."""
        if self._proposal is None or self._proposal.again:
            return ()
        staying = self._proposal.following.staying
        return staying if self._rules.replica in staying else ()

    def _give_up_on_silent(self) -> None:
        """Count members as apart that hold up a ballot, once its time is over.

        They have reported nothing so far, or don't accept a proposal that this rank has accepted.
        """
        if self._waited_s >= self._turn_s:
            silent, accepted = self._unreported(self._reports.last), self.mine.accepted
            if accepted is not None and accepted.ballot == self.mine.ballot:
                silent.update(map(self._rules.replica_of, {*self._rules.ranks(self._needed)} - self._accepts))
            self.extend(apart=silent)

    def _all_have_lost(self, replicas: Collection[int]) -> bool:
        """Return whether all that this rank hears report these as lost."""
        last = self._reports.last
        heard = [rank for rank in self._ranks if self._hears(self._rules.replica_of(rank))]
        return all(rank in last and last[rank].lost.issuperset(replicas) for rank in heard)

    # Reports.

    def _hears(self, replica: int) -> bool:
        return replica == self._rules.replica or (replica not in self.mine.lost and self._roster.reaches(replica))

    def _gone(self) -> frozenset[int]:
        """Return the members that have ended, as far as this rank, or one that it hears, knows.

        A member that this rank hears has not ended, whatever others report.
        """
        reported = {each for each in self._reports.union("gone", "left") - self.mine.gone if not self._hears(each)}
        reports = self._reports.last.items() if reported else ()
        heard = [report for rank, report in reports if self._hears(self._rules.replica_of(rank))]
        return self.mine.gone.union(each for each in reported if any(each in report.gone for report in heard))

    def _report(self) -> None:
        if self._unsent:
            self._unsent = False
            self.mine = replace(self.mine, number=self.mine.number + 1)
            self._reports.keep(self.mine)
            self._send(Change(self.mine, self.why, self.cause))

    def _send(self, message: Change | Propose | Accept | Adopted, but: Collection[int] = ()) -> None:
        """Send a message to all other ranks of the view that may be running."""
        ranks = self._rules.ranks(member for member in self.view.members if member not in self.mine.gone)
        self._outbox.send((rank for rank in ranks if rank != self._rules.rank and rank not in but), message)

    def _why_wait(self) -> str:
        """Return why no set of members that this rank hears may decide; "": one may, or it is too early to tell.

        It is too early until all that this rank hears have reported, and while a value that was accepted may still be
        adopted. Of those that it hears, the largest set counts in which all hear each other (`_best`). Where all stop
        when one is lost, the change has a longest time, too.
        """
        waited_s, turn_s, members = self._outbox.now_s - self._began_s, _TURN * self._rules.silence_s, self.view.members
        lost, joining, stops = (
            self.mine.lost.intersection(members),
            self._joining,
            not self._rules.continue_without_lost,
        )
        ticked, self._ticked = self._ticked, False
        if stops and waited_s >= _MOST_TURNS * turn_s:
            last = f" (the last ballot failed: {self._why_failed})" if self._why_failed else ""
            return f"the members did not agree on the next view within {_MOST_TURNS * turn_s:g} s{last}"
        if lost and (why := self._refusal(lost, joining)) and self._roster.members_in_doubt() <= self.mine.lost:
            return why if waited_s >= _UNREPORTED * turn_s or self._all_have_lost(lost) else ""
        if not ticked:  # the search takes long
            return self.waiting
        if self._unreported(self._reports.last):
            return ""
        if self._reports.has_accepted and (stops or self._value_to_keep(self._current_reports()) is not None):
            return ""  # it may be adopted by members that don't all hear each other
        gone = self._gone()
        if stops:  # members that this rank can't hear may still hear each other
            candidates = [member for member in members if member not in gone]
        else:
            candidates = [member for member in members if self._hears(member)]
        staying = self._best(candidates)
        reports = [report for rank, report in self._reports.last.items() if self._rules.replica_of(rank) in staying]
        here = [each.joining.difference(each.apart, each.gone.difference(members)) for each in reports]
        return self._refusal({*members}.difference(staying), joining.intersection(*here))  # see `next_view`

    @property
    def _joining(self) -> frozenset[int]:
        """The replicas whose processes are here to join, those included that take the place of a member."""
        return self.mine.joining.difference(self.mine.lost.difference(self.view.members))

    def _coming(self, proposal: Propose) -> Collection[int]:
        """Return the replicas that join with a proposal, or right after it.

        With one of an earlier ballot these include all that ask to join now. Otherwise, where members that had accepted
        it have ended, those that are left could never adopt it.
        """
        coming = proposal.following.coming
        return self._joining.union(coming) if proposal.again else coming

    def _refusal(self, lost: Collection[int], joining: Collection[int]) -> str:
        """Return why the members that are not ``lost`` may not decide, or "" if they may."""
        return refusal(self.view, lost, self._rules, gone=self._gone(), joining=joining)

    def _best(self, candidates: Collection[int]) -> tuple[int, ...]:
        """Return the largest set of ``candidates`` that may stay, as far as is known."""
        return staying_members(
            self.view, self._reports.last.values(), candidates, self._rules.ranks_per_replica, self._rules
        )

    def _unreported(self, reports: Mapping[int, Report]) -> set[int]:
        """Return the members that have reported nothing, of those that this rank has not lost."""
        unreported = {self._rules.replica_of(rank) for rank in self._ranks if rank not in reports}
        return unreported - self.mine.lost - {self._rules.replica}

    def _current_reports(self) -> dict[int, Report]:
        """Return the reports of the current ballot by the ranks that this one has not lost."""
        ballot, lost, replica_of = self.mine.ballot, self.mine.lost, self._rules.replica_of
        return {
            rank: report
            for rank, report in self._reports.last.items()
            if report.ballot == ballot and replica_of(rank) not in lost
        }

    # Proposals.

    def _propose(self) -> None:
        """Propose what follows, if this rank is the proposer, once nothing is left to wait for.

        That is, in this order: the reports of all that it hears (for a quarter of a turn; who has not reported by then
        is apart), members that are about to be back, as the first one is (`REDIAL`), connections whose end has no
        known reason yet, and that all admit the same joiners (`_SAME_JOINERS`). A proposer that some would leave out
        passes its turn once to one that hears more. What may have been chosen before is proposed without these waits.
        """
        if self._proposal is not None or self._proposer != self._rules.rank:
            return
        view, rules, reports = self.view, self._rules, self._current_reports()
        if unreported := self._unreported(reports):
            if self._waited_s >= _UNREPORTED * self._turn_s and not self.waiting:
                self.extend(apart=unreported)
            return
        if (value := self._value_to_keep(reports)) is not None:
            self._set_proposal(Propose(self.mine.ballot, value, again=True))
            return
        # longer turns make nobody dial later
        is_reunion = self._outbox.now_s - self._reunion_s < REDIAL * self._rules.silence_s
        if is_reunion and any(not report.apart.isdisjoint(view.members) for report in reports.values()):
            return  # the others are about to be back, too
        if not self._roster.members_in_doubt() <= self.mine.lost:
            return
        lost = frozenset().union(*(report.lost for report in reports.values()))
        admit_others = len({report.joining - lost for report in reports.values()}) > 1
        if admit_others and self._waited_s < _SAME_JOINERS * self._turn_s:
            return
        if self._searched == self._reports.number:
            return
        self._searched, gone = self._reports.number, self._gone()
        heard = {each for each in view.members if self._hears(each) and reports.keys() >= {*rules.ranks((each,))}}
        running = [member for member in view.members if member not in gone]
        if not self._yielded and not heard.issuperset(self._best(running)):
            self._yielded = True  # a member that hears all of them proposes a better view
            self._promise(self.mine.ballot + 1)
            return
        staying = self._best(heard)
        ranks = rules.ranks(staying)
        following = next_view(view, [reports[rank] for rank in ranks], staying, rules, heard) if ranks else None
        if following is not None:
            self._set_proposal(Propose(self.mine.ballot, following))

    def _set_proposal(self, proposal: Propose) -> None:
        self._proposal = proposal
        self._send(proposal)

    def _value_to_keep(self, reports: Mapping[int, Report]) -> NextView | None:
        """Return the newest proposal that somebody may have adopted, as far as these reports tell."""
        accepted = [report.accepted for report in reports.values() if report.accepted is not None]
        accepted.sort(key=lambda proposal: proposal.ballot, reverse=True)
        values = (proposal.following for proposal in accepted)
        return next((value for value in values if self._may_be_chosen(value, reports)), None)

    def _may_be_chosen(self, following: NextView, reports: Mapping[int, Report]) -> bool:
        """Return whether somebody may have adopted a proposal.

        Whoever has accepted it says so, unless it is lost. All that stay had to accept it; if it was proposed again, a
        quorum of the old members had to.
        """
        naming = {
            rank: report.accepted.again
            for rank, report in reports.items()
            if report.accepted is not None and report.accepted.following == following
        }
        denying = {*filter(self._hears, {self._rules.replica_of(rank) for rank in reports if rank not in naming})}
        if not any(naming.values()) and not denying.isdisjoint(following.staying):
            return False
        # those that have adopted it may have counted any number of replicas that were about to join
        return not refusal(self.view, denying, self._rules, joining=range(self._rules.min_replicas))

    def _accept(self) -> None:
        proposal, mine, ballot = self._proposal, self.mine, self.mine.ballot
        if proposal is None or (mine.accepted is not None and mine.accepted.ballot == ballot):
            return
        following, staying = proposal.following, proposal.following.staying
        if self._refusal({*self.view.members}.difference(staying), self._coming(proposal)):
            return
        if not proposal.again and self._rules.replica in staying:
            has_heard_all = self._reports.last.keys() >= {*self._rules.ranks(staying)}
            if not has_heard_all or not all(map(self._hears, staying)):
                return
        self.mine = replace(mine, accepted=Accepted(ballot, following, proposal.again))
        self._accepts.add(self._rules.rank)
        self._send(Accept(self.view.id, ballot))

    def _chosen(self) -> NextView | None:
        """Return what is proposed once it can be adopted."""
        proposal, ranks_of = self._proposal, self._rules.ranks
        if proposal is None:
            return None
        following = proposal.following
        if proposal.again:
            missing = {each for each in self.view.members if not self._accepts.issuperset(ranks_of((each,)))}
            return None if self._refusal(missing, self._coming(proposal)) else following
        return following if self._accepts.issuperset(ranks_of(following.staying)) else None
