"""The agreement of a view's members on the next view, and on the outcome of the rounds in flight.

This is single-decree Paxos among the ranks of the view that ends, with a proposer that rotates; docs/design.md explains
it. Each rank freezes, and reports to all others, first-hand, whom it can't hear and what it knows of the rounds. The
proposer of a ballot names the reports of all ranks that are to stay, by digest, and what follows from them. Each of
these recomputes and accepts it. It is adopted once all that stay have accepted it; so every member of the next view
hears every other one, in both directions.

Of n members, up to f may lie, with n > 2 f (`byzantine_quorum`). If two members don't hear each other, one of the two
goes; so a liar can end its own membership, or that of one other member.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from diloco.algorithm import RoundId
from diloco.membership import Accepted, NextView, Report, View, next_view, refusal, staying_members
from diloco.protocol.effects import Outbox
from diloco.protocol.members import Reports, Roster
from diloco.protocol.rounds import Rounds
from diloco.protocol.rules import Rules
from diloco.protocol.wire import Accept, Adopted, Change, Propose, digest_of

MOST_JOINERS = 32  # the most replicas that one member lets join by a change
MOST_AHEAD = 4096  # no rank can be as many ballots ahead as this
_TURN = 2.0  # times `silence_s`: the time of a ballot; it grows by itself with every round of proposers
_TICKS = 12  # how often per turn a rank looks at the clock
_MOST_TURNS = 10  # a rank stops after so much time without a next view
_JOIN_WINDOW = 0.2  # times `silence_s`: how long others may still join by a change that has begun
# parts of a turn, of which a message takes at most 1 / 18: after which a rank is mute; for which a rank may accept
# something else than another one has; and for which one that could adopt waits for those that may have
_MUTE, _LATE, _WAIT = 1 / 4, 11 / 24, 2 / 3


class ViewChange:
    """One rank's part in the change from ``view`` to the next one. While it lasts, the rounds of the view are frozen.

    Its owner passes on what it observes and receives, and then calls `evaluate`.
    """

    def __init__(self, view: View, why: str, rules: Rules, roster: Roster, rounds: Rounds, outbox: Outbox) -> None:
        self.view = view
        self.why = why  # the reason for the change as this rank learned it
        # what this rank knows, and its promise
        self.mine = replace(rounds.freeze(), step=rounds.step, unsteady=roster.unsteady(view, outbox.now_s))
        self._rules = rules
        self._roster = roster
        self._rounds = rounds
        self._outbox = outbox
        self._ranks = rules.ranks(view.members)
        self._unsent = True  # whether others lack what this rank has to report
        self._reports = Reports(self._ranks)
        self._began_s = outbox.now_s
        self._num_ballots = 0
        self._hurried: Counter[int] = Counter()  # by replica: how often it ended a ballot that had just begun
        self._yielded = False
        self._clear()
        self.tick()

    @property
    def accepts_joiners(self) -> bool:
        """Whether replicas may still join by this change; each one more prolongs it for all."""
        return self._outbox.now_s - self._began_s <= _JOIN_WINDOW * self._rules.silence_s and self.mine.ballot == 0

    @property
    def committed(self) -> frozenset[RoundId]:
        """The rounds that a member has committed, as far as is known."""
        return self._reports.union("commits")

    @property
    def admitted(self) -> frozenset[int]:
        """The replicas that other members let join."""
        return self._reports.union("joining")

    def tick(self) -> None:
        """Look at the clock, also again after a part of a turn."""
        self._outbox.effects.timers[None] = _TURN * self._rules.silence_s / _TICKS
        self._ticked = True

    # What this rank observes and receives.

    def extend(self, *, joining: Collection[int] = (), **facts: Collection[int]) -> None:
        """Add what this rank has observed: replicas as in a `Report`."""
        members = frozenset(self.view.members)
        joining = self.mine.joining.union(joining) - members
        mine = replace(self.mine, joining=joining).extended((members | joining) - {self._rules.replica}, **facts)
        if mine != self.mine:
            self.mine, self._unsent = mine, True

    def receive_report(self, report: Report) -> bool:
        """Receive another rank's report. Return False if the rank ends ballots as no honest one does."""
        replica, before = self._rules.replica_of(report.rank), self._reports.last.get(report.rank)
        if replica in self.mine.lost or (before is not None and report.number <= before.number):
            return True
        if report.ballot > self.mine.ballot:
            self._hurried[replica] += self._waited_s < self._turn_s / 3
            if self._hurried[replica] > 2 * len(self.view.members) + 8:
                return False  # without following it, or others would say the same of this rank
        self._reports.keep(report)
        if report.ballot > self.mine.ballot:
            self._raise(report.ballot)
        # accusations by others that this rank's own observation supports
        late = report.behind - self.mine.behind
        late = late and late & self._rounds.suspects()
        if late or self._rules.replica in report.lost:
            self.extend(behind=late, apart={replica} if self._rules.replica in report.lost else ())
        return True

    def receive(self, sender: int, message: Propose | Accept) -> None:
        """Receive what is proposed or accepted in a ballot, by a rank that has reported the ballot before."""
        if message.ballot != self.mine.ballot or self._rules.replica_of(sender) in self.mine.lost:
            return
        if isinstance(message, Accept):
            self._accepts_s.setdefault(self._accepts.setdefault(sender, message.digest), self._outbox.now_s)
        elif (
            sender == self._proposer
            and self._proposal is None
            and message.following.previous == self.view
            and message.following.from_step - 1 <= self._rounds.greatest_step
        ):
            self._set_proposal(message)

    def receive_adopted(self, sender: int, following: NextView) -> None:
        """Receive what a rank says that it has adopted. It takes no part in this change any more."""
        self._reports.adopted.setdefault(sender, following)

    # What follows from that.

    def evaluate(self) -> NextView | str | None:
        """Report, propose and accept what is due. Return what to adopt, or None while it is open.

        If no set of members that this rank hears may decide, it stops: then return why.
        """
        while True:
            before = self.mine
            if self._is_over():
                self._raise(self.mine.ballot + 1)
            self._report()
            if why := self._refused():
                return why
            self._propose()
            self._accept()
            if (following := self._chosen()) is not None:
                told = self._accepts if self._proposal and self._proposal.reports else ()  # and adopt it themselves
                self._send(Adopted(following), but=told)
                return following
            if self.mine is before:
                return None

    def is_plausible(self, following: NextView) -> bool:
        """Return whether this rank may accept or adopt what it has not computed itself.

        As far as it knows, enough members stay, they and those that do not accuse each other, only replicas join that
        have asked, and if it stays itself, only rounds are committed for which it has voted.
        """
        mine, size, staying = self.mine, self._rules.ranks_per_replica, {*following.staying}
        lost = {*self.view.members} - staying
        if following.previous != self.view or self._refusal(lost, following.joined):
            return False
        if mine.accepted is not None and mine.accepted.following == following:
            return True
        reports, held = [mine, *self._reports.last.values()], mine.held
        accused = frozenset().union(*[each.lost | each.left | each.behind for each in reports])
        accused |= {self._rules.replica_of(each.rank) for each in reports if not each.lost.isdisjoint(staying)}
        if not lost <= accused or not {*following.joined} <= self._reports.union("joining") | mine.joining:
            return False
        return self._rules.replica in lost or all(
            len(digests) == size and held.get(key) == digests[self._rules.position]
            for key, digests in following.commits.items()
        )

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

    def _raise(self, ballot: int) -> None:
        self.mine, self._unsent = replace(self.mine, ballot=ballot), True
        self._num_ballots += 1
        self._clear()

    def _clear(self) -> None:
        """Begin a ballot, of which nothing is known."""
        self._ballot_s = self._outbox.now_s
        self._proposal: Propose | None = None
        self._digest = ""  # of what is proposed
        self._is_refused = False  # whether that does not follow from the reports that it names
        self._accepts: dict[int, str] = {}  # rank -> the digest of what it has accepted
        self._accepts_s: dict[str, float] = {}  # by digest: when the first one of another rank came
        self._accepted_s = self._full_s = math.inf  # when this rank had accepted, and when all that stay had
        self._searched = 0  # the number of reports known when this rank as a proposer last searched for those that stay

    def _is_over(self) -> bool:
        """Return whether this rank expects nothing more of the ballot. Whoever has held it up is apart."""
        digests = {*self._accepts.values()} | ({self._digest} if self._proposal is not None else set())
        replica_of, is_split = self._rules.replica_of, len(digests) > 1
        is_mine = self._proposer == self._rules.rank
        if is_split and is_mine:  # which has sent the same to all
            self.extend(apart={replica_of(rank) for rank, digest in self._accepts.items() if digest != self._digest})
        lost, waited_s, turn_s, proposal = self.mine.lost, self._waited_s, self._turn_s, self._proposal
        since_s = self._outbox.now_s - self._accepted_s
        staying = proposal.following.staying if proposal is not None and proposal.reports else ()
        stays = self._rules.replica in staying
        if waited_s >= turn_s and stays and self.mine.accepted and self.mine.accepted.ballot == self.mine.ballot:
            self.extend(apart={replica_of(rank) for rank in self._rules.ranks(staying) if rank not in self._accepts})
        return (
            waited_s >= turn_s
            or self._first in self.mine.gone
            or (self._first in lost and (waited_s >= 0.75 * turn_s or self._all_have_lost({self._first})))
            or (proposal is None and self._is_late({""}) and self._first not in lost)
            or (stays and not lost.isdisjoint(staying))
            # somebody lies, as for the next one; but if the proposer does not, it adopts what this rank has accepted
            or (is_split and (is_mine or waited_s >= turn_s / 2 or since_s >= turn_s / 8))
            or self._is_refused
        )

    def _is_late(self, digests: Collection[str]) -> bool:
        """Return whether another rank has accepted something else than ``digests`` so long ago that it may adopt it.

        A proposer that waits for a mute rank proposes before that, and who adopts waits for longer.
        """
        others_s = [s for digest, s in self._accepts_s.items() if digest not in digests]
        return bool(others_s) and self._outbox.now_s - min(others_s) >= _LATE * self._turn_s

    def _all_have_lost(self, replicas: Collection[int]) -> bool:
        """Return whether all that this rank hears, but those that have adopted something, report these as lost."""
        last, adopted = self._reports.last, self._reports.adopted
        heard = [each for each in self._ranks if each not in adopted and self._hears(self._rules.replica_of(each))]
        return all(rank in last and last[rank].lost.issuperset(replicas) for rank in heard)

    # Reports.

    def _hears(self, replica: int) -> bool:
        return replica == self._rules.replica or (replica not in self.mine.lost and self._roster.reaches(replica))

    def _ended(self) -> frozenset[int]:
        """Return the members that have ended, as far as a rank says and this one does not know better."""
        told = self._reports.union("gone", "left")
        return self.mine.gone.union(each for each in told if not self._hears(each))

    def _report(self) -> None:
        if self._unsent:
            self._unsent = False
            self.mine = replace(self.mine, number=self.mine.number + 1)
            self._reports.keep(self.mine)
            self._send(Change(self.mine, self.why))

    def _send(self, message: Change | Propose | Accept | Adopted, but: Collection[int] = ()) -> None:
        """Send a message to all other ranks of the view that may be running."""
        there = self._rules.ranks(each for each in self.view.members if each not in self.mine.gone)
        self._outbox.send((rank for rank in there if rank != self._rules.rank and rank not in but), message)

    def _refused(self) -> str:
        """Return why this rank stops, or "". It first waits until all that it hears know the same."""
        waited_s, turn_s, members = self._outbox.now_s - self._began_s, _TURN * self._rules.silence_s, self.view.members
        lost, reason, ticked, self._ticked = self.mine.lost.intersection(members), "", self._ticked, False
        joining = self.mine.joining - self.mine.lost
        if waited_s >= _MOST_TURNS * turn_s:
            reason = f"the members did not agree on the next view within {_MOST_TURNS * turn_s:g} s"
        elif lost and (refusal := self._refusal(lost, joining)) and self._roster.doubtful() <= self.mine.lost:
            reason = refusal if waited_s >= turn_s / 4 or self._all_have_lost(lost) else ""
        elif ticked and not self._silent(self._reports.last) and not self._reports.has_accepted:
            # whom this rank can't hear may hear others, but no more than that
            ended = self._ended()
            best = self._best([each for each in members if each not in ended])
            reason = self._refusal({*members}.difference(best), joining)
        return reason

    def _refusal(self, lost: Collection[int], joining: Collection[int]) -> str:
        """Return why the members that are not ``lost`` may not decide, or "" if they may."""
        return refusal(self.view, lost, self._rules, gone=self._ended(), joining=joining)

    def _best(self, there: Collection[int]) -> tuple[int, ...]:
        """Return those of ``there`` that stay at best, as far as is known."""
        return staying_members(
            self.view, self._reports.last.values(), there, self._rules.ranks_per_replica, self._rules
        )

    def _silent(self, reports: Mapping[int, Report]) -> set[int]:
        """Return the members that have reported nothing, of those that this rank has not lost."""
        known = reports.keys() | self._reports.adopted.keys()
        silent = {self._rules.replica_of(rank) for rank in self._ranks if rank not in known}
        return silent - self.mine.lost - {self._rules.replica}

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
        if self._proposal is not None or self._proposer != self._rules.rank:
            return
        view, rules, reports = self.view, self._rules, self._current_reports()
        if silent := self._silent(reports):
            if self._waited_s >= _MUTE * self._turn_s:
                self.extend(apart=silent)
            return
        if (standing := self._standing(reports)) is not None:
            self._set_proposal(Propose(self.mine.ballot, standing, {}), send=True)
            return
        broken = frozenset().union(*(report.lost for report in reports.values()))
        if not self._roster.doubtful() <= self.mine.lost or (
            len({report.joining - broken for report in reports.values()}) > 1 and self._waited_s < self._turn_s / _TICKS
        ):
            return
        if self._searched == self._reports.number:
            return
        self._searched, ended = self._reports.number, self._ended()
        there = {each for each in view.members if self._hears(each) and reports.keys() >= {*rules.ranks((each,))}}
        if not self._yielded and not there.issuperset(self._best([each for each in view.members if each not in ended])):
            self._yielded = True  # a member that hears them proposes better
            self._raise(self.mine.ballot + 1)
            return
        staying = self._best(there)
        ranks = rules.ranks(staying)
        following = next_view(view, [reports[rank] for rank in ranks], staying, rules, there) if ranks else None
        if following is not None:
            digests = {rank: digest_of(reports[rank].content) for rank in ranks}
            self._set_proposal(Propose(self.mine.ballot, following, digests), send=True)

    def _set_proposal(self, proposal: Propose, *, send: bool = False) -> None:
        self._proposal, self._digest = proposal, digest_of(proposal.following)
        if send:
            self._send(proposal)

    def _standing(self, reports: Mapping[int, Report]) -> NextView | None:
        """Return the newest proposal that somebody may have adopted, as all that could tell otherwise have reported."""
        accepted = [report.accepted for report in reports.values() if report.accepted is not None]
        accepted.sort(key=lambda each: each.ballot, reverse=True)
        named = [*self._reports.adopted.values(), *(each.following for each in accepted)]
        return next((each for each in named if self._may_stand(each, reports)), None)

    def _may_stand(self, following: NextView, reports: Mapping[int, Report]) -> bool:
        """Return whether somebody may have adopted a proposal.

        Whoever has accepted it says so, unless it is lost. All that stay had to accept it; if it was proposed again, a
        quorum of the old members.
        """
        naming = {
            rank: report.accepted.again
            for rank, report in reports.items()
            if report.accepted is not None and report.accepted.following == following
        }
        naming |= dict.fromkeys(self._reports.adopters(following), True)
        denying = {self._rules.replica_of(rank) for rank in reports if rank not in naming}
        denying = {each for each in denying if self._hears(each)}
        if not any(naming.values()) and not denying.isdisjoint(following.staying):
            return False
        return not refusal(self.view, denying, self._rules, joining=following.joined)

    def _accept(self) -> None:
        proposal, mine, me, ballot = self._proposal, self.mine, self._rules.replica, self.mine.ballot
        if proposal is None or (mine.accepted is not None and mine.accepted.ballot == ballot):
            return
        if self._is_late({self._digest}):
            return
        following = proposal.following
        if mine.accepted is not None and mine.accepted.following != following and not self._may_switch(mine.accepted):
            return
        if proposal.reports and me in following.staying:
            if not self._is_computed(proposal):
                return
        elif self._refusal({*self.view.members}.difference(following.staying), following.joined) or (
            not proposal.reports and not self.is_plausible(following)
        ):
            return
        self.mine = replace(mine, accepted=Accepted(ballot, following, again=not proposal.reports))
        self._accepts[self._rules.rank], self._accepted_s = self._digest, self._outbox.now_s
        self._send(Accept(self.view.id, ballot, self._digest))

    def _is_computed(self, proposal: Propose) -> bool:
        """Return whether a proposal in which this rank stays follows from the reports that it names."""
        following, rules = proposal.following, self._rules
        ranks = rules.ranks(following.staying)
        if proposal.reports.keys() != {*ranks}:
            return False
        known = {rank: self._reports.find(rank, proposal.reports[rank]) for rank in ranks}
        reports = [report for report in known.values() if report is not None]
        if len(reports) < len(ranks):
            if self._waited_s >= self._turn_s / 3:  # they have reported something else to this rank
                self.extend(apart={rules.replica_of(rank) for rank, report in known.items() if report is None})
            return False
        if not all(map(self._hears, following.staying)):
            return False
        if next_view(self.view, reports, following.staying, rules) != following:
            self.extend(apart={self._first})
            self._is_refused = True
            return False
        return not self._refusal({*self.view.members}.difference(following.staying), following.joined)

    def _may_switch(self, accepted: Accepted) -> bool:
        """Return whether nobody can have adopted what this rank has accepted, or whoever has had time to say so."""
        if self._reports.adopters(accepted.following):
            return False
        reports, has_time_passed = self._current_reports(), self._waited_s >= self._turn_s / 2
        return has_time_passed or not (self._silent(reports) or self._may_stand(accepted.following, reports))

    def _chosen(self) -> NextView | None:
        """Return what is proposed once it can be adopted."""
        proposal, rules = self._proposal, self._rules
        if proposal is None or len({*self._accepts.values()}) > 1:
            return None
        following = proposal.following
        some = {rank for rank, digest in self._accepts.items() if digest == self._digest}
        some.update(self._reports.adopters(following))
        if not proposal.reports:
            lost = {each for each in self.view.members if not some.issuperset(rules.ranks((each,)))}
            return None if self._refusal(lost, following.joined) else following
        if not some.issuperset(rules.ranks(following.staying)):
            return None
        self._full_s = min(self._full_s, self._outbox.now_s)
        # those that hear the proposer say whether it has proposed something else to them
        there = self._ranks if self._waited_s < _MUTE * self._turn_s else self._current_reports()
        rest = {rules.replica_of(rank) for rank in there if rank not in some and not self._misses_proposals(rank)}
        if any(map(self._hears, rest)) and self._outbox.now_s - self._full_s < _WAIT * self._turn_s:
            return None
        return following

    def _misses_proposals(self, rank: int) -> bool:
        return rank in self._reports.last and self._first in self._reports.last[rank].lost
