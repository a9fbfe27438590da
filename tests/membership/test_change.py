"""How members agree on the next view, on a network that delivers as it likes and loses what it likes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
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

    Each step begins one round, ``(0, step)``. ``rounds`` says what became of it here: by whom it is committed, or None
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
        if lost <= set(self.view.members) and not self.stopped:
            self._extend(lost=lost, gone=lost if gone else frozenset())

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
        elif (0, step) in self.void:
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
            committed = tally([*self._ranks(self.view.members), self.rank], votes).committed
            if committed is not None:
                self._decide(step, committed)

    def _decide(self, step: int, committed: bool) -> None:
        self.rounds[step] = self.view.members if committed else None
        if not committed:
            self.void |= {(0, step)}

    def _extend(self, *, report: Report | None = None, **known: Any) -> None:
        grown = self.change is None
        if self.change is None:
            commits = {(0, step): "" for step, members in self.rounds.items() if members == self.view.members}
            mine = Report(self.rank, self.view.id, step=self.step, commits=commits, void=self.void)
            self.change = Change(mine, self.view, self.size, self.policy, "somebody is lost")
        if (self.change.absorb(report) if report is not None else self.change.extend(**known)) or grown:
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
        undecided = self._undecided()
        for step in undecided:
            if (0, step) in following.commits:
                self._decide(step, committed=True)
            elif (0, step) in following.void or not following.carries_over:
                self._decide(step, committed=False)
        members = () if following.view is None else following.view.members
        for rank in self._ranks([member for member in following.previous.members if member not in members]):
            self.network.send(self.rank, rank, ("excluded", following.previous.id, None))
            self.network.hang_up(self.rank, rank)
        if following.view is None:
            self._stop(following.reason)
            return
        self.view, self.votes, self.void = following.view, {}, self.void | following.void
        waiting, self._waiting = [*(step for step in undecided if step not in self.rounds), *self._waiting], []
        for step in waiting:
            self._begin(step)
        early, self._early = self._early, []
        for sender, message in early:
            self.heard(sender, message)
        if still := mine.lost & set(members):
            self._extend(lost=still, gone=mine.gone & still, left=mine.left)

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


@settings(max_examples=300, deadline=None)
@given(NUMBERS, st.integers(2, 5), LIMITS, st.integers(1, 4), st.integers(1, 2))
def test_a_round_that_somebody_gives_up_is_void_for_all_and_every_other_one_is_not(
    numbers: list[int], replicas: int, limits: Limits, gives_up: int, size: int
) -> None:
    """Property: also for those who hear of it by a report, and who begin it only in a later view."""
    limits = Limits(limits.ends, limits.machines, limits.cuts, limits.abrupt, own={"gives up": gives_up})
    check_agreement(run(limits, numbers, replicas=replicas, size=size), whole=False)


@settings(max_examples=200, deadline=None)
@given(NUMBERS, st.integers(2, 5), st.integers(1, 4), st.integers(1, 2))
def test_who_leaves_never_counts_as_silent(numbers: list[int], replicas: int, leaves: int, size: int) -> None:
    """Property: however few are left, they go on."""
    members = run(Limits(own={"leaves": leaves}), numbers, replicas=replicas, size=size)
    check_agreement(members)
    assert {member.stopped for member in members} <= {"", "left", "excluded"}
    for member in members:
        if not member.stopped:
            left = {replica for following in member.adopted for replica, _ in following.left}
            assert left == {other.rank // size for other in members if other.stopped}


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
    assert not stranger.extend(lost=frozenset({7}), gone=frozenset({7}), left=frozenset({(7, 1)}))


def test_what_a_leaver_committed_is_committed_once_all_know_it() -> None:
    """Whoever heard of the leaving from another survivor only does not know what the leaver had committed."""
    left, commits = frozenset({(2, 7)}), frozenset({(0, 1, "a")})
    ours = change(lost=frozenset())
    assert ours.extend(left=left, left_commits=commits)
    gone = frozenset({2})
    ours.absorb(Report(1, 0, lost=gone, gone=gone, left=left))
    assert ours.outcome() is None
    ours.absorb(Report(1, 0, lost=gone, gone=gone, left=left, left_commits=commits, commits={(1, 1): "b"}))
    following = ours.outcome()
    assert following is not None
    assert following.commits == {(0, 1): "a", (1, 1): "b"}
    theirs = change(lost=frozenset(), rank=1)
    assert theirs.absorb(Report(0, 0, lost=gone, gone=gone, left=left, left_commits=commits))
    assert theirs.mine.left_commits == commits


def test_what_any_survivor_decided_void_is_void_and_everything_else_goes_on_unless_somebody_joins() -> None:
    ours = change(void=frozenset({(0, 1)}))
    ours.absorb(Report(1, 0, lost=frozenset({2}), void=frozenset({(1, 1)})))
    ours.absorb(Report(2, 0, void=frozenset({(2, 1)})))
    following = ours.outcome()
    assert following is not None
    assert following.void == {(0, 1), (1, 1)}
    assert following.carries_over
    assert not replace(following, joined=(3,)).carries_over
    assert not replace(following, view=None).carries_over


def test_who_leaves_is_lost_and_gone_with_its_greatest_step_and_all_must_know() -> None:
    ours = change(lost=frozenset(), replicas=2)
    assert ours.extend(left=frozenset({(1, 7)}))
    assert (ours.mine.lost, ours.mine.gone) == ({1}, {1})
    ours.extend(left=frozenset({(1, 8)}))  # another rank of it
    following = ours.outcome()
    assert following is not None
    assert (following.view, following.left) == (View(1, (0,)), ((1, 8),))
    assert following.reason == "replica 1 has left; replica 0 goes on"
    three = change(lost=frozenset({2}), gone=frozenset({2}))
    three.extend(left=frozenset({(2, 7)}))
    three.absorb(Report(1, 0, lost=frozenset({2}), gone=frozenset({2})))
    assert three.outcome() is None, "replica 1 does not know yet that 2 has left"
