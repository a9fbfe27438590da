"""The agreement of a view's members on the next view, and on the outcome of the rounds in flight.

Each member freezes: it casts no vote and decides no round of the old view any more. It reports to all others which
members it can't hear, and which rounds it has committed, voted for, or decided void. Members join the reports that they
receive, so those that hear each other end up knowing the same; who stays and what follows is a pure function of that
(`diloco.membership.next_view`). A member that holds the same report from every staying member is *ready*; once all are,
each adopts what follows. So every member of the next view hears every other one, in both directions.

A member may be lost after all were ready and before all have adopted. The others then adopt the agreed view as well,
and the view after it leaves out the lost member. For this, a ready member reports what it is ready for, and of several
such views the one that was agreed last stands. This is Paxos with the amount of knowledge as the ballot: any two sets
that may continue share a member, and its knowledge only grows.

Of n members, up to f may lie, with n > 2 f (`byzantine_quorum`). Members speak only for themselves (`believed`); an
earlier agreement stands if more than f members report it, or all that were to be ready for it and report now, and a
late member is excluded if more than f members report it as late.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from diloco.membership import (
    MAX_PAIRS,
    Agreed,
    NextView,
    Report,
    View,
    could_follow,
    names_of,
    next_view,
    staying_members,
)
from diloco.protocol.events import Outbox, Timer
from diloco.protocol.members import Roster
from diloco.protocol.rounds import Rounds
from diloco.protocol.rules import Rules
from diloco.protocol.wire import Change

T = TypeVar("T")

MOST_JOINERS = 32  # the most replicas that one member lets join by a change; all together, so many for each member
_LONGEST = 4  # times `silence_s`: after that this rank waits for no answer, even if the change still makes progress
_JOIN_WINDOW = 0.2  # times `silence_s`: how long others may still join by a change that has begun


class ViewChange:
    """One rank's part in the change from ``view`` to the next one. While it lasts, the rounds of the view are frozen.

    This rank sends its report to all when the change begins, when it is ready, and when it has learned more. Before it
    sends more, it waits until every staying member that had not reported as much has answered its last report. So one
    message to each other rank combines what many have reported. Members never wait for each other in a cycle: a member
    whose report already held as much is not waited for. `stop_waiting` ends the waiting, as a member may never answer.

    Args:
        why: the reason for the change as this rank learned it.
    """

    def __init__(self, view: View, why: str, rules: Rules, roster: Roster, rounds: Rounds, outbox: Outbox) -> None:
        self.view = view
        self.why = why
        unsteady = roster.unsteady(view, outbox.now_s)
        self.mine = replace(rounds.freeze(), step=rounds.step, unsteady=unsteady)  # what this rank knows
        self._rules = rules
        self._roster = roster
        self._rounds = rounds
        self._outbox = outbox
        self._received: dict[int, Report] = {}  # rank -> its last report, as received
        self._reports: dict[int, Report] = {rules.rank: self.mine}  # the same, of those that are believed as a whole
        self._unsettled: set[int] = set()  # ranks whose last report is not yet believed as a whole
        self._sent: Report | None = None  # the last report that this rank has sent
        self._awaited: set[int] = set()  # ranks that are to answer before this rank sends more
        self._stopped_waiting = False
        self._began_s = self._news_s = outbox.now_s  # when the change began, and when it last made progress
        self._staying: tuple[int, ...] | None = None  # the cached `staying`; None: to be computed
        # ranks whose reports may differ from `mine`, and ranks that may not be ready. Each report is checked once when
        # it arrives, and not again with every other report.
        self._differing, self._unready = [*rules.ranks(view.members)], [*rules.ranks(view.members)]
        outbox.effects.timers[Timer("settle", view.id)] = rules.silence_s / 2

    @property
    def staying(self) -> tuple[int, ...]:
        """The members of the old view that stay, as `staying_members` decides."""
        if self._staying is None:
            self._staying = staying_members(self.view, self.mine, self._rules.replica, self._rules.policy)
        return self._staying

    @property
    def is_left_out(self) -> bool:
        """Whether this rank's replica does not stay, as far as is known."""
        return self._rules.replica not in self.staying

    @property
    def accepts_joiners(self) -> bool:
        """Whether replicas may still join by this change; each one more prolongs it for all."""
        return self._outbox.now_s - self._began_s <= _JOIN_WINDOW * self._rules.silence_s

    def patience_s(self) -> float:
        """Return how many more seconds to wait for a change that makes progress; 0 or less if it may be held up."""
        until_s = min(self._news_s + self._rules.silence_s / 2, self._began_s + _LONGEST * self._rules.silence_s)
        return until_s - self._outbox.now_s

    def extend(self, unheard: Collection[int] = (), behind: Collection[int] = (), **facts: Any) -> NextView | None:
        """Add what this rank has observed. Return what to adopt now, or None.

        Args:
            unheard: replicas that it can't hear.
            behind: replicas that it hears, and whose contribution it has awaited for too long.
            facts: further fields of a `Report`.
        """
        before = self.mine
        self._extend(unheard, behind, Report(before.rank, before.view_id, **facts))
        if self.mine != before:
            self._news_s = self._outbox.now_s
        return self._settle()

    def absorb(self, report: Report) -> NextView | None:
        """Merge another rank's report. Return what to adopt now, or None.

        A rank's own steps and rounds never change during a change, so those of its first report stand.
        """
        self._awaited.discard(report.rank)
        before = self._received.get(report.rank)
        if before is None or (before.ready, before.known) != (report.ready, report.known):
            self._news_s = self._outbox.now_s
        first = before or report
        self._received[report.rank] = replace(
            report, step=first.step, commits=first.commits, void=first.void, voted=first.voted
        )
        self._unsettled.add(report.rank)
        return self._settle()

    def stop_waiting(self) -> bool:
        """Stop waiting for answers, as the change takes long; return False if there is nothing to stop."""
        if self._stopped_waiting:
            return False
        self._stopped_waiting = True
        self._send()
        return True

    def blame(self) -> frozenset[int]:
        """Return the other replicas that keep the change from ending, which has taken too long.

        They have not reported what this rank knows; if all have, they are ready for something else.
        """
        reports = {rank: self._reports.get(rank) for rank in self._rules.ranks(self.staying)}
        blamed = {rank for rank, report in reports.items() if report is None or report.known != self.mine.known}
        if not blamed and self.mine.agreed is not None:
            following = self.mine.agreed.following
            others = {rank: report.agreed for rank, report in reports.items() if report is not None}
            blamed = {rank for rank, agreed in others.items() if agreed is None or agreed.following != following}
        return frozenset(map(self._rules.replica_of, blamed)) - {self._rules.replica}

    # What is known.

    def _extend(self, unheard: Collection[int], behind: Collection[int], facts: Report) -> None:
        me, ended, before = self._rules.replica, self.mine.gone, self.mine
        pairs = frozenset((me, other) for other in unheard if other not in ended)
        late = frozenset((me, other) for other in behind if other not in ended)
        self._merge(replace(facts, unheard=pairs, behind=late))
        self._advance(before)

    def _merge(self, other: Report) -> None:
        mine, members = self.mine, frozenset(self.view.members)
        if mine.covers(other):  # true of most reports once all have been received
            return
        joining = _grown(mine.joining, other.joining - members, MOST_JOINERS * len(members))
        known, left = members | joining, mine.left | (other.left & members)
        self.mine = replace(
            mine,
            unheard=_grown(mine.unheard, (each for each in other.unheard if known.issuperset(each)), MAX_PAIRS),
            behind=mine.behind | frozenset(pair for pair in other.behind if members.issuperset(pair)),
            unsteady=mine.unsteady | frozenset(pair for pair in other.unsteady if members.issuperset(pair)),
            gone=mine.gone | (other.gone & known) | left,
            joining=joining,
            left=left,
        )

    def _evaluate(self) -> None:
        """Merge the received reports, as far as this rank believes them by now.

        What is known only grows, so a report that was believed as a whole is not evaluated again.
        """
        rules, rounds, before = self._rules, self._rounds, None
        while before != self.mine:
            before, accepted = self.mine, dict[int, Report]()
            for rank in sorted(self._unsettled):
                accepted[rank] = believed(
                    self._received[rank],
                    before,
                    self.view,
                    sender=rules.replica_of(rank),
                    me=rules.replica,
                    hears=self._hears,
                )
                self._reports.pop(rank, None)
                self._merge(accepted[rank])
            self._differing += accepted
            self._unready += accepted
            # a rank that is believed only partly knows something else, so it can't be ready with this one
            self._reports |= {rank: each for rank, each in accepted.items() if each.known == self._received[rank].known}
            self._unsettled = {rank for rank in accepted if accepted[rank] != self._received[rank]}
            self._advance(before)
            # accusations by others that this rank's own observation supports
            accused = {late for _, late in self.mine.behind} - {rules.replica}
            late = accused - {late for one, late in self.mine.behind if one == rules.replica}
            late = late and late & (rounds.overdue() | {each for each in late if rounds.spoilers.may_be(each)})
            unheard = {each for each in self.mine.joining - {rules.replica} if not self._roster.reaches(each)}
            unheard -= {other for one, other in self.mine.unheard if one == rules.replica}
            if late or unheard:
                self._extend(unheard, late, Report(rules.rank, self.view.id))

    def _hears(self, replica: int) -> bool:
        known = replica in self.view.members or replica in self.mine.joining
        return known and (self._rules.replica, replica) not in self.mine.unheard and self._roster.reaches(replica)

    # The decision.

    def _settle(self) -> NextView | None:
        """Return what to adopt once all staying members are ready, or once this left-out rank hears none of them."""
        self._evaluate()
        self._send()
        following = self._outcome()
        if self.is_left_out and not any(map(self._roster.is_connected, self._rules.ranks(self.staying))):
            me, mine = self._rules.replica, self.mine
            reason = f"{names_of(self.staying)} can't be reached and may be continuing without replica {me}"
            following = NextView(None, self.view, mine.step + 1, mine.commits, reason, void=mine.void)
        in_doubt = {self._rules.replica_of(rank) for rank in self._roster.in_doubt if rank in self._roster.members}
        if following is not None and following.view is None and in_doubt - self.mine.gone:
            return None  # a replica whose process turns out to have ended is no side that could be larger
        return following

    def _outcome(self) -> NextView | None:
        """Return what to adopt, or None while it is not decided.

        That the survivors may not continue is decided as soon as they all know the same.
        """
        if self.mine.ready and not self._all(self._unready, lambda report: report.ready):
            return None
        if (alike := self._alike()) is None:
            return None
        following = next_view(self.view, alike, self.staying, self._rules.policy)
        if following.view is None:
            return following
        same = all(report.agreed is not None and report.agreed.following == following for report in alike)
        return following if self.mine.ready and same else None

    def _advance(self, before: Report) -> None:
        if self.mine is not before and self.mine.known != before.known:
            self.mine = replace(self.mine, ready=False)
            if not self._still_stay(before):
                self._staying = None
            self._differing, self._unready = [*self._rules.ranks(self.staying)], [*self._rules.ranks(self.staying)]
        self._reports[self.mine.rank] = self.mine
        if not self.mine.ready and (alike := self._alike()) is not None:
            following = next_view(self.view, alike, self.staying, self._rules.policy)
            if following.view is not None:
                earlier = self.mine.agreed
                quorums = earlier.quorums if earlier is not None and earlier.following == following else frozenset()
                agreed = Agreed(sum(map(len, self.mine.known)), following, quorums | {self.staying})
                self.mine = self._reports[self.mine.rank] = replace(self.mine, ready=True, agreed=agreed)

    def _still_stay(self, before: Report) -> bool:
        """Return whether nothing new speaks against the members that stayed by the knowledge ``before``."""
        mine, stayed = self.mine, self._staying or ()
        same = (before.gone, before.unsteady) == (mine.gone, mine.unsteady) and not mine.behind
        apart = (pair for pair in mine.unheard - before.unheard if pair[0] in stayed and pair[1] in stayed)
        return same and self._rules.replica in stayed and not any(apart)

    def _all(self, ranks: list[int], passes: Callable[[Report], bool]) -> bool:
        """Return whether each staying rank of ``ranks`` has a report that ``passes``; remove the ranks that pass."""
        staying = self.staying
        while ranks:
            report = self._reports.get(ranks[-1])
            if (report is None or not passes(report)) and self._rules.replica_of(ranks[-1]) in staying:
                return False
            ranks.pop()
        return True

    def _alike(self) -> list[Report] | None:
        if self.is_left_out or not self._all(self._differing, lambda report: report.known == self.mine.known):
            return None
        return [self._reports[rank] for rank in self._rules.ranks(self.staying)]

    def _send(self) -> None:
        """Send this rank's report to all ranks that may be running, if it is new and no answers are awaited."""
        mine, rules = self.mine, self._rules
        if mine == self._sent:
            return

        def answers(rank: int) -> bool:
            replica = rules.replica_of(rank)
            return rank != rules.rank and replica in self.staying and (rules.replica, replica) not in mine.unheard

        if not (mine.ready or self._stopped_waiting) and any(map(answers, self._awaited)):
            return
        self._sent = mine
        others = filter(answers, rules.ranks(self.staying))
        self._awaited = {each for each in others if each not in self._received or not self._received[each].covers(mine)}
        there = rules.ranks(member for member in self.view.members if member not in mine.gone)
        self._outbox.send((rank for rank in there if rank != rules.rank), Change(mine, self.why))


def believed(report: Report, mine: Report, view: View, *, sender: int, me: int, hears: Callable[[int], bool]) -> Report:
    """Return the part of a report that this rank believes.

    Every member speaks for itself: which members it can't hear, whose contribution it awaits, that it leaves. What a
    report says of other replicas counts only if this rank does not hear them; else it waits for their own reports, or
    for the end of their connections. So a member that lies can only claim not to hear others; if it accuses two, it is
    the one to go.

    Args:
        report: the report as received.
        mine: what this rank knows already.
        view: the view that ends.
        sender: the replica of the report's rank.
        me: this replica.
        hears: whether all ranks of a replica are connected and not declared lost.

    >>> lie = Report(2, 0, unheard=frozenset({(0, 1), (2, 1)}), gone=frozenset({0, 1}))
    >>> what = believed(lie, Report(0, 0), View.of(3), sender=2, me=0, hears={1, 2}.__contains__)
    >>> sorted(what.unheard), sorted(what.gone)
    ([(2, 1)], [])
    """
    agreed = report.agreed
    if agreed is not None and agreed.known > sum(map(len, report.known)):
        agreed = None
    if agreed is not None and not could_follow(agreed.following, view, mine):
        agreed = None
    if mine.covers(report):  # the report holds nothing new
        return report if agreed is report.agreed else replace(report, agreed=agreed)

    def may_report_on(replica: int) -> bool:
        return replica == sender or (replica != me and not hears(replica))

    def own(pairs: frozenset[tuple[int, int]], known: frozenset[tuple[int, int]]) -> frozenset[tuple[int, int]]:
        return frozenset(pair for pair in pairs if pair in known or may_report_on(pair[0]))

    left = frozenset(each for each in report.left if each in mine.left or may_report_on(each))
    ended = mine.gone | left
    return replace(
        report,
        unheard=own(report.unheard, mine.unheard),
        behind=own(report.behind, mine.behind),
        unsteady=own(report.unsteady, mine.unsteady),
        gone=frozenset(each for each in report.gone if each in ended or (each != me and not hears(each))),
        left=left,
        agreed=agreed,
    )


def _grown(known: frozenset[T], more: Iterable[T], most: int) -> frozenset[T]:
    """Return both together, or ``known`` alone if that is more than a report may hold, as no honest members say."""
    both = known.union(more)
    return both if len(both) <= most else known
