"""How members agree on the next view, on a network that delivers as it likes and loses what it likes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.membership.ballot import Vote, tally
from diloco.membership.change import Change, NextView, Report
from diloco.membership.quorum import Policy
from diloco.membership.view import View
from tests.membership.network import Limits, Network, explore

NUMBERS = st.lists(st.integers(0, 1 << 16), max_size=150)
LIMITS = st.builds(Limits, st.integers(0, 2), st.integers(0, 2), st.integers(0, 3), st.booleans())


class Member:
    """A rank that has every round voted on, and does what `Change` says when others are lost. No I/O.

    Each step begins one round, ``(0, step)``. ``rounds`` says what became of it here: committed or void.
    """

    STEPS = 4

    def __init__(self, rank: int, network: Network, view: View, size: int, policy: Policy) -> None:
        self.rank, self.network, self.view, self.size, self.policy = rank, network, view, size, policy
        self.num_ranks = len(view.members) * size
        self.step = 0
        self.from_step = 0
        self.rounds: dict[int, bool] = {}
        self.votes: dict[int, dict[int, Vote]] = {}
        self.change: Change | None = None
        self.adopted: list[NextView] = []
        self.stopped = ""
        self._waiting: list[int] = []
        self._early: list[tuple[int, Any]] = []

    def act(self) -> bool:
        if self.step == self.STEPS or self.stopped:
            return False
        self.step += 1
        self._begin(self.step)
        return True

    def heard(self, sender: int, message: Any) -> None:
        kind, view_id, content = message
        if self.stopped:
            return
        if kind == "excluded":
            if view_id >= self.view.id:
                self._stop("excluded")
        elif view_id > self.view.id:
            self._early.append((sender, message))
        elif kind == "vote" and view_id == self.view.id:
            self._count(sender, *content)
        elif kind == "change" and view_id == self.view.id:
            self._extend(lost=content.lost, gone=content.gone, joining=content.joining, report=content)
        elif kind == "change" and self.adopted and view_id == self.adopted[-1].previous.id:
            self.network.send(self.rank, sender, ("adopted", view_id, self.adopted[-1]))
        elif kind == "adopted" and view_id == self.view.id and self.change is not None:
            self._adopt(content)

    def lose(self, rank: int, *, gone: bool) -> None:
        lost = frozenset({rank // self.size})
        if lost <= set(self.view.members) and not self.stopped:
            self._extend(lost=lost, gone=lost if gone else frozenset())

    def _begin(self, step: int) -> None:
        if self.change is not None:
            self._waiting.append(step)
        elif step < self.from_step:
            self.rounds[step] = False
        else:
            vote = Vote(True, f"average of {step}")
            for rank in self._ranks(self.view.members):
                self.network.send(self.rank, rank, ("vote", self.view.id, (step, vote)))
            self._count(self.rank, step, vote)

    def _count(self, sender: int, step: int, vote: Vote) -> None:
        if self.change is None and step not in self.rounds:
            votes = self.votes.setdefault(step, {})
            votes[sender] = vote
            committed = tally([*self._ranks(self.view.members), self.rank], votes).committed
            if committed is not None:
                self.rounds[step] = committed

    def _extend(
        self, *, report: Report | None = None, lost: frozenset[int], gone: frozenset[int], joining: Any = frozenset()
    ) -> None:
        grown = self.change is None
        if self.change is None:
            commits = {(0, step): "" for step, committed in self.rounds.items() if committed}
            mine = Report(self.rank, self.view.id, lost, gone, joining, self.step, commits)
            self.change = Change(mine, self.view, self.size, self.policy, "somebody is lost")
        if report is not None:
            grown = self.change.absorb(report) or grown
        else:
            grown = self.change.extend(lost=lost, gone=gone, joining=joining) or grown
        if grown:
            for rank in self.change.survivors:
                self.network.send(self.rank, rank, ("change", self.view.id, self.change.mine))
        if self.rank // self.size in self.change.mine.lost:
            self._stop("the others say that I am lost")
        elif (following := self.change.outcome()) is not None:
            self._adopt(following)

    def _adopt(self, following: NextView) -> None:
        assert self.change is not None
        mine, self.change = self.change.mine, None
        self.adopted.append(following)
        for step in range(1, self.step + 1):
            if step not in self._waiting:
                self.rounds.setdefault(step, (0, step) in following.commits)
        members = () if following.view is None else following.view.members
        for rank in self._ranks([member for member in following.previous.members if member not in members]):
            self.network.send(self.rank, rank, ("excluded", following.previous.id, None))
            self.network.hang_up(self.rank, rank)
        if following.view is None:
            self._stop(following.reason)
            return
        self.view, self.from_step, self.votes = following.view, following.from_step, {}
        waiting, self._waiting = self._waiting, []
        for step in waiting:
            self._begin(step)
        early, self._early = self._early, []
        for sender, message in early:
            self.heard(sender, message)
        if still := mine.lost & set(members):
            self._extend(lost=still, gone=mine.gone & still)

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


def check_agreement(members: Sequence[Member]) -> None:
    """What must hold whatever happened."""
    going_on = [member for member in members if not member.stopped]
    assert all(member.change is None for member in going_on), "somebody waits for ever"
    assert len({member.view for member in going_on}) <= 1, "two histories"
    for member in going_on:
        assert member.step == member.STEPS
        assert sorted(member.rounds) == list(range(1, member.STEPS + 1)), "a round was never decided"
        assert member.rounds == going_on[0].rounds, "a round is applied by all or by none"
        assert _facts(member.adopted) == _facts(going_on[0].adopted)


def _facts(
    adopted: Sequence[NextView],
) -> list[tuple[View | None, int, Mapping[tuple[int, int], str], tuple[int, ...]]]:
    return [(each.view, each.from_step, each.commits, each.joined) for each in adopted]


@settings(max_examples=200, deadline=None)
@given(NUMBERS, st.integers(2, 5), st.integers(1, 3), st.integers(1, 2))
def test_processes_that_end_leave_survivors_that_agree_and_go_on(
    numbers: list[int], replicas: int, ends: int, size: int
) -> None:
    """Property: wherever they end, also in the middle of a broadcast; everybody knows that they have ended."""
    survivors = run(Limits(ends=ends), numbers, replicas=replicas, size=size)
    check_agreement(survivors)
    whole = [m for m in survivors if sum(o.rank // size == m.rank // size for o in survivors) == size]
    assert not [member.stopped for member in whole if member.stopped]
    for member in whole:
        assert member.view.members == tuple(sorted({each.rank // size for each in whole}))


@settings(max_examples=200, deadline=None)
@given(NUMBERS, st.integers(2, 5), LIMITS, st.integers(1, 2))
def test_silent_machines_and_cut_connections_never_make_two_histories(
    numbers: list[int], replicas: int, limits: Limits, size: int
) -> None:
    """Property: who goes on agrees on the view, on every view before it, and on every round."""
    check_agreement(run(limits, numbers, replicas=replicas, size=size))


@settings(max_examples=100, deadline=None)
@given(NUMBERS, st.integers(1, 4))
def test_fewer_than_asked_for_never_go_on(numbers: list[int], least: int) -> None:
    survivors = run(Limits(ends=2), numbers, replicas=4, least=least)
    check_agreement(survivors)
    assert all(len(member.view.members) >= least for member in survivors if not member.stopped)
    assert all(member.stopped for member in survivors) == (len(survivors) < least)


def change(*, rank: int = 0, replicas: int = 3, size: int = 1, **known: Any) -> Change:
    mine = Report(rank, 0, **{"lost": frozenset({2}), **known})
    return Change(mine, View.of(replicas), size, Policy(), "replica 2 is lost")


def test_nothing_is_adopted_before_all_survivors_say_the_same() -> None:
    ours = change(step=4, gone=frozenset({2}))
    assert ours.survivors == (0, 1)
    assert ours.outcome() is None
    assert not ours.absorb(Report(1, 0, lost=frozenset({2}), step=7)), "nothing that I did not know"
    assert ours.outcome() is None, "replica 1 may not know yet that 2 has ended"
    ours.absorb(Report(1, 0, lost=frozenset({2}), gone=frozenset({2}), step=7))
    following = ours.outcome()
    assert following is not None
    assert (following.view, following.from_step) == (View(1, (0, 1)), 8)
    assert ours.absorb(Report(1, 0, lost=frozenset({1, 2}), gone=frozenset({2}), step=7)), "this is news, for all"


def test_every_rank_of_a_surviving_replica_must_report() -> None:
    ours = change(size=2)
    assert ours.survivors == (0, 1, 2, 3)
    for rank in (1, 2):
        ours.absorb(Report(rank, 0, lost=frozenset({2})))
        assert ours.outcome() is None
    ours.absorb(Report(3, 0, lost=frozenset({2}), commits={(1, 2): "digest"}))
    following = ours.outcome()
    assert following is not None
    assert following.commits == {(1, 2): "digest"}


def test_what_any_survivor_committed_is_committed_and_what_only_the_lost_one_did_is_not() -> None:
    ours = change(commits={(0, 1): "a"})
    ours.absorb(Report(1, 0, lost=frozenset({2}), commits={(1, 1): "b"}))
    ours.absorb(Report(2, 0, lost=frozenset(), commits={(2, 1): "c"}))
    following = ours.outcome()
    assert following is not None
    assert following.commits == {(0, 1): "a", (1, 1): "b"}


def test_a_joiner_that_is_lost_again_neither_joins_nor_counts_as_a_loss() -> None:
    ours = change(lost=frozenset(), joining=frozenset({3}))
    for rank in (1, 2):
        ours.absorb(Report(rank, 0, joining=frozenset({3})))
    following = ours.outcome()
    assert following is not None
    assert (following.view, following.joined) == (View(1, (0, 1, 2, 3)), (3,))
    assert ours.extend(lost=frozenset({3})), "the others must hear of it"
    assert ours.outcome() is None
    for rank in (1, 2):
        ours.absorb(Report(rank, 0, joining=frozenset({3}), lost=frozenset({3})))
    following = ours.outcome()
    assert following is not None
    assert (following.view, following.joined) == (View(1, (0, 1, 2)), ())


def test_whoever_is_lost_itself_adopts_nothing() -> None:
    ours = change(rank=2)
    for rank in (0, 1):
        ours.absorb(Report(rank, 0, lost=frozenset({2})))
    assert ours.outcome() is None
    stranger = change()
    assert not stranger.extend(lost=frozenset({7}), gone=frozenset())
