"""Which of the searching replicas founds a view: at most one, and none while others may be continuing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diloco.membership.bootstrap import BootstrapElection, Candidate
from diloco.membership.quorum import Policy, decide
from diloco.membership.view import View

NOW_S = 60.0


def founds(me: Candidate, *others: Candidate, policy: Policy | None = None, waited_s: float = NOW_S) -> View | None:
    election = BootstrapElection(me=me, alone=False, window_s=3.0, policy=policy or Policy())
    return election.founds(others, waited_s)


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    """Return replicas that have lost views of one history at different times."""
    numbers = draw(st.lists(st.integers(0, 6), min_size=1, max_size=6, unique=True))
    views = [View(0, tuple(range(7)))]
    for _ in range(draw(st.integers(0, 3))):
        staying = tuple(sorted(draw(st.sets(st.sampled_from(views[-1].members), min_size=1))))
        views.append(View(views[-1].id + 1, staying))
    known = {number: [view for view in views if number in view.members] for number in numbers}
    return [Candidate(number, draw(st.integers(0, 3)), draw(st.sampled_from(known[number]))) for number in numbers]


@given(candidates())
def test_at_most_one_founds_and_only_if_nobody_else_can_be_going_on(looking: list[Candidate]) -> None:
    """Property: among replicas that all hear each other."""
    founded = {each.number: founds(each, *(other for other in looking if other is not each)) for each in looking}
    views = [view for view in founded.values() if view is not None]
    assert len(views) <= 1
    newest = max((each.last for each in looking if each.last is not None), key=lambda view: view.id)
    absent = frozenset(newest.members) - {each.number for each in looking}
    may = decide(newest, lost=absent, gone=(), joining=(), policy=Policy()).members is not None
    assert bool(views) == may
    for view in views:
        (founder,) = view.members
        assert view.id == newest.id + 1
        held = {each.number: each.held_step for each in looking}
        assert founder == min(number for number, step in held.items() if step == max(held.values()))


def test_a_minority_waits_until_enough_of_the_newest_view_look() -> None:
    view = View(4, (0, 1, 2))
    assert founds(Candidate(1, 10, view)) is None
    assert founds(Candidate(1, 10, view), Candidate(2, 10, view)) == View(5, (1,))
    assert founds(Candidate(1, 10, view), Candidate(2, 10, View(5, (0, 2)))) is None, "0 may continue without them"
    assert founds(Candidate(1, 10, view), policy=Policy(1, split="go-on")) == View(5, (1,))


def test_one_that_was_started_again_counts_as_the_member_that_it_was() -> None:
    mine = Candidate(1, 30, View(4, (0, 1)))
    assert founds(mine) is None
    assert founds(mine, Candidate(0, 20)) == View(5, (1,))
    assert founds(Candidate(0, 20), mine) is None, "the other one is ahead"
    assert founds(Candidate(0, 40), mine) == View(5, (0,))


def test_nobody_founds_before_others_could_be_heard() -> None:
    view = View(0, (0, 1))
    assert founds(Candidate(0, 5, view), Candidate(1, 5, view), waited_s=2.9) is None
    alone = BootstrapElection(me=Candidate(0), alone=True, window_s=3.0, policy=Policy())
    assert alone.founds((), 0.0) == View(0, (0,))
    assert alone.founds((), NOW_S, had_members=True) is None, "a fresh start is no replacement"
