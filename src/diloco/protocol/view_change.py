"""The change to the next view as seen by one rank, which reports what it knows as its knowledge grows."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from diloco import membership
from diloco.membership import News, NextView, Report, View, believed
from diloco.protocol.actions import CancelTimer, SetTimer, Timer
from diloco.protocol.events import Outbox
from diloco.protocol.roster import Roster
from diloco.protocol.rounds import Rounds
from diloco.protocol.rules import Rules
from diloco.protocol.wire import Change

__all__ = ["ViewChange"]

# times `silence_s`: after that this rank stops waiting for answers, even if the change still makes progress
_LONGEST = 4
_JOIN_WINDOW = 0.2  # times `silence_s`: how long others may still join by a change that has begun


class ViewChange:
    """A view change, idle until something happens to the view. From then on the rounds of the view are frozen.

    This rank sends its report to all when the change begins, when it is ready, and when it has learned more. Before it
    sends more, it waits until every staying member that had not reported as much has answered its last report. So one
    message to each other rank combines what many have reported. Members never wait for each other in a cycle: a member
    whose report already held as much is not waited for. `stop_waiting` ends the waiting, as a member may never answer.
    """

    def __init__(self, rules: Rules, roster: Roster, rounds: Rounds, outbox: Outbox) -> None:
        self.known: membership.Change | None = None  # what is known; None while no change is in progress
        # the last view that this rank declared itself ready for, and that others may have adopted; or None
        self.agreed: View | None = None
        self._rules = rules
        self._roster = roster
        self._rounds = rounds
        self._outbox = outbox
        self._received: dict[int, Report] = {}  # rank -> its last report, as received
        self._unsettled: set[int] = set()  # ranks whose last report is not yet believed as a whole
        self._sent: Report | None = None  # the last report that this rank has sent
        self._awaited: set[int] = set()  # ranks that are to answer before this rank sends more
        self._stopped_waiting = False
        self._began_s = self._news_s = 0.0  # when the change began, and when it last made progress

    @property
    def accepts_joiners(self) -> bool:
        """Whether replicas may still join by the current change, if there is one; each one more prolongs it for all."""
        return self.known is None or self._outbox.now_s - self._began_s <= _JOIN_WINDOW * self._rules.silence_s

    def patience_s(self) -> float:
        """Return how many more seconds to wait for a change that makes progress; 0 or less if it may be held up."""
        until_s = min(self._news_s + self._rules.silence_s / 2, self._began_s + _LONGEST * self._rules.silence_s)
        return until_s - self._outbox.now_s

    def extend(self, why: str, **news: Unpack[News]) -> NextView | None:
        """Record what happened and begin the change, or do nothing if this rank takes part in no view.

        Returns:
            What to adopt now, or None.
        """
        if self._rounds.failure is not None or self._rounds.view is None:
            return None
        change = self._begin(why)
        if change.extend(**news):
            self._news_s = self._outbox.now_s
        return self._settle(change)

    def absorb(self, received: Change) -> NextView | None:
        """Merge another rank's report. Return what to adopt now, or None.

        A rank's own steps and rounds never change during a change, so those of its first report stand.
        """
        if self._rounds.failure is not None or self._rounds.view is None:
            return None
        change = self._begin(received.why)
        self._awaited.discard(received.report.rank)
        before = self._received.get(received.report.rank)
        if before is None or (before.ready, before.known) != (received.report.ready, received.report.known):
            self._news_s = self._outbox.now_s
        first = before or received.report
        self._received[received.report.rank] = replace(
            received.report, step=first.step, commits=first.commits, void=first.void, voted=first.voted
        )
        self._unsettled.add(received.report.rank)
        return self._settle(change)

    def stop_waiting(self) -> bool:
        """Stop waiting for answers, as the change takes long; return False if there is nothing to stop."""
        if self.known is None or self._stopped_waiting:
            return False
        self._stopped_waiting = True
        self._send(self.known)
        return True

    def end(self) -> None:
        """Reset, as the change has ended."""
        if self.known is not None:
            self._outbox.actions.append(CancelTimer(Timer("settle", self.known.view.id)))
        self.known = self._sent = None
        self._received.clear()
        self._unsettled.clear()
        self._awaited.clear()
        self._stopped_waiting = False

    def _begin(self, why: str) -> membership.Change:
        if self.known is not None:
            return self.known
        view, size = self._rounds.view, self._rules.ranks_per_replica
        assert view is not None
        unsteady = self._roster.unsteady(view, self._outbox.now_s)
        mine = replace(self._rounds.freeze(), step=self._rounds.step, unsteady=unsteady)
        self._began_s = self._news_s = self._outbox.now_s
        self.known = membership.Change(mine, view, size, self._rules.policy, why)
        self._outbox.actions.append(SetTimer(Timer("settle", view.id), self._rules.silence_s / 2))
        return self.known

    def _evaluate(self, change: membership.Change) -> None:
        """Merge the received reports, as far as this rank believes them by now.

        What is known only grows, so a report that was believed as a whole is not evaluated again.
        """
        rounds, rules = self._rounds, self._rules

        def is_heard(replica: int) -> bool:
            known = replica in change.view.members or replica in change.mine.joining
            return known and (rules.replica, replica) not in change.mine.unheard and self._is_connected(replica)

        before = None
        while before != change.mine:
            before, accepted = change.mine, dict[int, Report]()
            for rank in sorted(self._unsettled):
                report = self._received[rank]
                accepted[rank] = believed(
                    report, before, change.view, sender=rules.replica_of(rank), me=rules.replica, hears=is_heard
                )
            change.absorb(
                *accepted.values(),
                in_part={rank for rank in accepted if accepted[rank].known != self._received[rank].known},
            )
            self._unsettled = {rank for rank in accepted if accepted[rank] != self._received[rank]}
            # accusations by others that this rank's own observation supports
            mine = {late for one, late in change.mine.behind if one == rules.replica}
            late = {late for _, late in change.mine.behind} - mine - {rules.replica}
            if late:
                spoilt = {each for each in late if rounds.spoilers.may_be(each)}
                late &= rounds.late_contributors() | rounds.late_voters() | spoilt
            pairs = {(rules.replica, each) for each in change.mine.joining if not self._is_connected(each)}
            unheard = {each for _, each in pairs - change.mine.unheard} - {rules.replica}
            if late or unheard:
                change.extend(behind=frozenset(late), unheard=frozenset(unheard))

    def _is_connected(self, replica: int) -> bool:
        """Return whether all ranks of a replica are connected; if they are members, as the members' processes."""
        return all(
            self._roster.is_connected(rank) if self._roster.has(rank) else rank in self._roster.connections
            for rank in self._rules.ranks((replica,))
        )

    def _settle(self, change: membership.Change) -> NextView | None:
        """Return what to adopt once all staying members are ready, or once this left-out rank hears none of them."""
        self._evaluate(change)
        self._send(change)
        following = change.outcome()
        if change.is_left_out and not any(map(self._roster.is_connected, self._rules.ranks(change.staying))):
            following = change.alone()
        in_doubt = {self._rules.replica_of(rank) for rank in self._roster.in_doubt if self._roster.has(rank)}
        if following is not None and following.view is None and in_doubt - change.mine.gone:
            return None  # a replica whose process turns out to have ended is no side that could be larger
        return following

    def _send(self, change: membership.Change) -> None:
        """Send this rank's report to all ranks that may be running, if it is new and no answers are awaited."""
        mine, rules = change.mine, self._rules
        if mine == self._sent:
            return

        def answers(rank: int) -> bool:
            replica = rules.replica_of(rank)
            return rank != rules.rank and replica in change.staying and (rules.replica, replica) not in mine.unheard

        if not (mine.ready or self._stopped_waiting) and any(map(answers, self._awaited)):
            return
        self._sent = mine
        if mine.agreed is not None:
            self.agreed = mine.agreed.following.view
        others = filter(answers, rules.ranks(change.staying))
        self._awaited = {each for each in others if each not in self._received or not self._received[each].covers(mine)}
        self._outbox.send(change.audience, Change(mine, change.why))
