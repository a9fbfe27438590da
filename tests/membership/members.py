"""Members that have every round voted on and change their view together, and what must hold of those who go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diloco.membership.ballot import Vote, tally
from diloco.membership.change import Change
from diloco.membership.quorum import Policy
from diloco.membership.reports import NextView, Report
from diloco.membership.view import View
from tests.membership.network import Limits, Network, explore


class Member:
    """A rank that has every round voted on, and does what `Change` says when others are lost. No I/O.

    Each step begins one round, ``(step, 0)``. ``rounds`` says what became of it here: by whom it is committed, or None
    for a void one. It may give up a round, and leave.
    """

    STEPS = 4

    def __init__(self, rank: int, network: Network, view: View, size: int, policy: Policy) -> None:
        self.rank, self.network, self.view, self.size, self.policy = rank, network, view, size, policy
        self.num_ranks = len(view.members) * size
        self.step = 0
        self.rounds: dict[int, tuple[int, ...] | None] = {}
        self.votes: dict[int, dict[int, Vote]] = {}
        self.change: Change | None = None
        self.adopted: list[NextView] = []
        self.stopped = ""
        self.void: frozenset[tuple[int, int]] = frozenset()
        self._waiting: list[int] = []
        self._early: list[tuple[int, Any]] = []

    def act(self) -> bool:
        if self.stopped or self.step == self.STEPS:
            return not self.stopped and self._act_late()
        self.step += 1
        self._begin(self.step)
        return True

    def _act_late(self) -> bool:
        """Cast the votes that were due, where nothing else happened."""
        due = [step for step in self._undecided() if self.rank not in self.votes[step]] if self.change is None else []
        for step in due:
            if step not in self.rounds:
                self._vote(step, Vote(True, f"average of {step}"))
        return bool(due)

    def heard(self, sender: int, message: Any) -> None:
        kind, view_id, content = message
        if self.stopped:
            return
        if kind == "excluded":
            if view_id >= self.view.id:
                self._stop("excluded")
        elif view_id > self.view.id and kind != "leaving":
            self._early.append((sender, message))
        elif kind == "vote" and view_id == self.view.id:
            self._count(sender, *content)
        elif kind == "change" and view_id == self.view.id:
            self._extend(report=content)
        elif kind == "change" and self.adopted and view_id == self.adopted[-1].previous.id:
            self.network.send(self.rank, sender, ("adopted", view_id, self.adopted[-1]))
        elif kind == "adopted" and view_id == self.view.id and self.change is not None:
            self._adopt(content)
        elif kind == "leaving" and sender // self.size in self.view.members:
            if sender // self.size == self.rank // self.size:
                self.suffer("leaves", 0)
            else:
                self._extend(left=frozenset({(sender // self.size, content)}))

    def lose(self, rank: int, *, gone: bool) -> None:
        lost = frozenset({rank // self.size})
        if rank // self.size == self.rank // self.size:
            self._stop("a rank of my own replica is lost")
        elif lost <= set(self.view.members) and not self.stopped:
            self._extend(unheard=lost, gone=lost if gone else frozenset())

    def may(self, what: str) -> bool:
        return not self.stopped and (what == "leaves" or bool(self._undecided()))

    def suffer(self, what: str, number: int) -> None:
        if what == "leaves":
            for rank in self._ranks(self.view.members):
                self.network.send(self.rank, rank, ("leaving", self.view.id, self.step))
            self._stop("left")
        elif self.change is None:
            step = self._undecided()[number % len(self._undecided())]
            if self.rank not in self.votes[step]:  # gives up a round for which it has not voted
                self._vote(step, Vote(False, reason="gave up"))

    def _undecided(self) -> list[int]:
        return [step for step in self.votes if step <= self.step and step not in self.rounds]

    def _begin(self, step: int) -> None:
        if self.change is not None:
            self._waiting.append(step)
        elif (step, 0) in self.void:
            self.rounds[step] = None
        else:
            self.votes.setdefault(step, {})
            if (self.rank + step) % 3:  # others give up before they vote, if they do
                self._vote(step, Vote(True, f"average of {step}"))

    def _vote(self, step: int, vote: Vote) -> None:
        for rank in self._ranks(self.view.members):
            self.network.send(self.rank, rank, ("vote", self.view.id, (step, vote)))
        self._count(self.rank, step, vote)

    def _count(self, sender: int, step: int, vote: Vote) -> None:
        votes = self.votes.setdefault(step, {})
        if self.change is None and step not in self.rounds and sender not in votes:
            votes[sender] = vote
            said = tally([*self._ranks(self.view.members), self.rank], votes, me=self.rank)
            if said.committed is not None:
                self._decide(step, said.committed)
            elif said.disputed:
                self.void |= {(step, 0)}
                self._extend()

    def _decide(self, step: int, committed: bool) -> None:
        self.rounds[step] = self.view.members if committed else None
        if not committed:
            self.void |= {(step, 0)}

    def _extend(self, *, report: Report | None = None, **known: Any) -> None:
        grown = self.change is None
        if self.change is None:
            commits = {(step, 0): "" for step, members in self.rounds.items() if members == self.view.members}
            voted = {(step, 0): "" for step in self._undecided() if self.rank in self.votes[step]}
            mine = Report(self.rank, self.view.id, step=self.step, commits=commits, void=self.void, voted=voted)
            self.change = Change(mine, self.view, self.size, self.policy, "somebody is lost")
        if (self.change.absorb(report) if report is not None else self.change.extend(**known)) or grown:
            for rank in self.change.audience:
                self.network.send(self.rank, rank, ("change", self.view.id, self.change.mine))
        if (following := self.change.outcome()) is not None:
            self._adopt(following)
        elif self.change.is_left_out and not self._hears_any_of(self.change.staying):
            self._stop("nobody who stays is heard")

    def _hears_any_of(self, members: Sequence[int]) -> bool:
        return any(self.network.connection(self.rank, rank) is not None for rank in self._ranks(members))

    def _adopt(self, following: NextView) -> None:
        assert self.change is not None
        mine, staying, self.change = self.change.mine, self.change.staying, None
        me = self.rank // self.size
        self.adopted.append(following)
        undecided = self._undecided()
        for step in undecided:
            if (step, 0) in following.commits:
                self._decide(step, committed=True)
            elif (step, 0) in following.void or not following.carries_over:
                self._decide(step, committed=False)
        members = () if following.view is None else following.view.members
        for rank in self._ranks([member for member in members if member not in staying]):
            self.network.send(self.rank, rank, ("adopted", following.previous.id, following))
        for rank in self._ranks([member for member in following.previous.members if member not in members]):
            self.network.send(self.rank, rank, ("excluded", following.previous.id, None))
            self.network.hang_up(self.rank, rank)
        if following.view is None or me not in following.view.members:
            self._stop(following.reason)
            return
        self.view, self.votes, self.void = following.view, {}, self.void | following.void
        waiting, self._waiting = [*(step for step in undecided if step not in self.rounds), *self._waiting], []
        for step in waiting:
            self._begin(step)
        early, self._early = self._early, []
        for sender, message in early:
            self.heard(sender, message)
        pairs = {other for one, other in mine.unheard if one == me}
        still = frozenset(member for member in members if member != me and (member in pairs or not self._hears(member)))
        if gone := mine.gone & set(members) | still:
            self._extend(unheard=still, gone=mine.gone & gone, left=mine.left)

    def _hears(self, member: int) -> bool:
        ranks = range(member * self.size, (member + 1) * self.size)
        return all(self.network.connection(self.rank, rank) is not None for rank in ranks)

    def _stop(self, why: str) -> None:
        self.stopped, self.change = why, None
        for rank in range(self.num_ranks):
            self.network.hang_up(self.rank, rank)

    def _ranks(self, members: Sequence[int]) -> list[int]:
        ranks = [rank for member in members for rank in range(member * self.size, (member + 1) * self.size)]
        return [rank for rank in ranks if rank != self.rank]


def run(limits: Limits, numbers: Sequence[int], *, replicas: int, size: int = 1, least: int = 1) -> list[Member]:
    """The members that have not ended, when all has come to rest."""
    network = Network(range(replicas * size), limits)
    members = {rank: Member(rank, network, View.of(replicas), size, Policy(least)) for rank in range(replicas * size)}
    network.nodes.update(members)
    explore(network, numbers)
    return [members[rank] for rank in sorted(network.alive)]


def check_agreement(members: Sequence[Member], *, whole: bool = True) -> None:
    """What must hold whatever happened; ``whole``: nobody gave up a round."""
    going_on = [member for member in members if not member.stopped]
    assert all(member.change is None for member in going_on), "somebody waits for ever"
    assert len({member.view for member in going_on}) <= 1, "two histories"
    for member in going_on:
        assert member.step == member.STEPS
        assert whole is False or None not in member.rounds.values(), "nobody voted against it"
        assert sorted(member.rounds) == list(range(1, member.STEPS + 1)), "a round was never decided"
        assert member.rounds == going_on[0].rounds, "a round is applied by all or by none"
        assert _facts(member.adopted) == _facts(going_on[0].adopted)


def _facts(
    adopted: Sequence[NextView],
) -> list[tuple[View | None, int, Mapping[tuple[int, int], str], tuple[int, ...]]]:
    return [(each.view, each.from_step, each.commits, each.joined) for each in adopted]
