"""How members agree on the next view, on a network that delivers as it likes and loses what it likes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.membership.change import Change, Report
from diloco.membership.quorum import Policy
from diloco.membership.view import View
from tests.membership.members import check_agreement, run
from tests.membership.network import LIMITS, NUMBERS, Limits


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
