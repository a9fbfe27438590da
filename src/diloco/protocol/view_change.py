"""The change to the next view, as seen by one rank: what it knows is told to the others as it grows."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from diloco.membership.change import Change
from diloco.membership.reports import News, NextView, Report
from diloco.membership.view import View
from diloco.protocol.actions import CancelTimer, SetTimer, Timer
from diloco.protocol.contributions import Contributions
from diloco.protocol.events import Outbox
from diloco.protocol.hearsay import believed, blamed_replicas
from diloco.protocol.messages import ChangeReport, change_message
from diloco.protocol.roster import Roster
from diloco.protocol.rules import Policies, Rules

__all__ = ["ViewChange"]

_LONGEST = 4  # times `settle_s`: after that a change is hurried, even if something new still comes
_JOIN_WINDOW = 0.2  # times `settle_s`: for so long others may join by a change that has begun


class ViewChange:
    """Idle until something happens to the view; from then on the rounds of the view are frozen.

    What this rank knows is told to all at first, when it is ready, and when it has grown; but not before everybody who
    stays, and had not said as much, has answered what this rank told last. So one message to each other rank holds what
    many have said. Nobody waits for one who waits for it: who had heard before it spoke is not waited for.
    `stop_waiting` ends the waiting, as somebody may never answer.
    """

    def __init__(
        self, rules: Rules, policies: Policies, roster: Roster, contributions: Contributions, outbox: Outbox
    ) -> None:
        self.known: Change | None = None  # what is known; None while no change is in progress
        # the last view that this rank declared itself ready for, and that others may have adopted; or None
        self.agreed: View | None = None
        self._rules = rules
        self._policies = policies
        self._roster = roster
        self._contributions = contributions
        self._outbox = outbox
        self._received: dict[int, Report] = {}  # rank -> its last report, as it came
        self._unsettled: set[int] = set()  # ranks of whose last report not all is believed yet
        self._sent: Report | None = None  # what this rank has said last
        self._awaited: set[int] = set()  # ranks that are to answer before it says more
        self._stopped_waiting = False
        self._began_s = self._news_s = 0.0  # when the change began, and when it last got on

    @property
    def accepts_joiners(self) -> bool:
        """Whether who asks to join may do so by this change, if there is one: each one more prolongs it for all."""
        return self.known is None or self._outbox.now_s - self._began_s <= _JOIN_WINDOW * self._rules.settle_s

    def patience_s(self) -> float:
        """How much longer a change is waited for that gets on; 0 or less: somebody may be holding it up."""
        until_s = min(self._news_s + self._rules.settle_s / 2, self._began_s + _LONGEST * self._rules.settle_s)
        return until_s - self._outbox.now_s

    def extend(self, why: str, **news: Unpack[News]) -> NextView | None:
        """Something happened, ``why`` in words, so the view ends; ignored if this rank does not take part.

        Returns:
            What to adopt now, if anything.
        """
        rounds = self._contributions.rounds
        if self._contributions.failure is not None or rounds is None:
            return None
        change = self._begin(why)
        if change.extend(**news):
            self._news_s = self._outbox.now_s
        return self._settle(change)

    def absorb(self, said: ChangeReport) -> NextView | None:
        """Another rank reports what it knows; returns what to adopt now, if anything.

        What it says of its own steps and rounds never changes, so the first of it stands.
        """
        if self._contributions.failure is not None or self._contributions.rounds is None:
            return None
        change = self._begin(said.why)
        self._awaited.discard(said.report.rank)
        before = self._received.get(said.report.rank)
        if before is None or (before.ready, before.known) != (said.report.ready, said.report.known):
            self._news_s = self._outbox.now_s
        first = before or said.report
        self._received[said.report.rank] = replace(
            said.report, step=first.step, commits=first.commits, void=first.void, voted=first.voted
        )
        self._unsettled.add(said.report.rank)
        return self._settle(change)

    def stop_waiting(self) -> bool:
        """Wait for nobody's answer any more, as the change takes long; False if this rank does not wait already."""
        if self.known is None or self._stopped_waiting:
            return False
        self._stopped_waiting, self._sent = True, None  # who has told others something else is to be found
        self._send(self.known)
        return True

    def blame(self) -> frozenset[int]:
        """Replicas that keep the change from its end, which has taken too long."""
        if self.known is None:
            return frozenset()
        change = self.known
        return blamed_replicas(change.mine, change.reports_of_staying(), change.unproven, me=self._rules.replica)

    def end(self) -> None:
        """The change is over."""
        if self.known is not None:
            self._outbox.actions.append(CancelTimer(Timer("settle", self.known.view.id)))
        self.known = self._sent = None
        self._received.clear()
        self._unsettled.clear()
        self._awaited.clear()
        self._stopped_waiting = False

    def _begin(self, why: str) -> Change:
        if self.known is not None:
            return self.known
        rounds = self._contributions.rounds
        assert rounds is not None
        unsteady = self._roster.unsteady(rounds.view, self._outbox.now_s)
        mine = replace(rounds.freeze(), step=self._contributions.step, unsteady=unsteady)
        size, votes = self._rules.ranks_per_replica, rounds.signed_votes()
        self._began_s = self._news_s = self._outbox.now_s
        self.known = Change(mine, rounds.view, size, self._policies.quorum, why, votes)
        self._outbox.actions.append(SetTimer(Timer("settle", rounds.view.id), self._rules.settle_s / 2))
        return self.known

    def _evaluate(self, change: Change) -> None:
        """Take in what has been said, as far as it is believed by now.

        What is known only grows, so what was believed stays so: a report that was, as a whole, is not weighed again.
        """
        rounds, rules = self._contributions.rounds, self._rules
        assert rounds is not None

        def is_heard(replica: int) -> bool:
            known = replica in change.view.members or replica in change.mine.joining
            return known and (rules.replica, replica) not in change.mine.unheard and self._is_connected(replica)

        before = None
        while before != change.mine:
            before, told = change.mine, dict[int, Report]()
            for rank in sorted(self._unsettled):
                report = self._received[rank]
                if report.shown:
                    report = replace(report, shown=frozenset(filter(rounds.is_vote, report.shown)))
                told[rank] = believed(report, before, sender=rules.replica_of(rank), me=rules.replica, hears=is_heard)
            change.absorb(
                *told.values(), in_part={rank for rank in told if told[rank].known != self._received[rank].known}
            )
            self._unsettled = {rank for rank in told if told[rank] != self._received[rank]}
            # what others say, and this rank sees as well
            mine = {late for one, late in change.mine.behind if one == rules.replica}
            late = {late for _, late in change.mine.behind} - mine - {rules.replica}
            if late:
                spoilt = {each for each in late if self._contributions.conduct.may_be_spoiler(each)}
                late &= rounds.late_contributors() | rounds.late_voters() | spoilt
            pairs = {(rules.replica, each) for each in change.mine.joining if not self._is_connected(each)}
            unheard = {each for _, each in pairs - change.mine.unheard} - {rules.replica}
            if late or unheard:
                change.extend(behind=frozenset(late), unheard=frozenset(unheard))

    def _is_connected(self, replica: int) -> bool:
        """Whether all ranks of a replica are connected: the members, where they are some."""
        return all(
            self._roster.is_connected(rank) if self._roster.has(rank) else rank in self._roster.connections
            for rank in self._rules.ranks((replica,))
        )

    def _settle(self, change: Change) -> NextView | None:
        """What to adopt, if all who stay are ready, or if none of them hears this rank any more."""
        self._evaluate(change)
        self._send(change)
        following = change.outcome()
        if change.is_left_out and not any(map(self._roster.is_connected, self._rules.ranks(change.staying))):
            following = change.alone()
        in_doubt = {self._rules.replica_of(rank) for rank in self._roster.in_doubt if self._roster.has(rank)}
        if following is not None and following.view is None and in_doubt - change.mine.gone:
            return None  # one whose process turns out to have ended is no side that could be larger
        return following

    def _send(self, change: Change) -> None:
        """Say what this rank knows to all who may be there, if it is news and no answers are awaited."""
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
        heard = {rank: report.own_digest for rank, report in self._received.items()} if self._stopped_waiting else {}
        self._outbox.send(change.audience, change_message(replace(mine, heard=heard), change.why))
