"""Which of the searching replicas founds a view: at most one, and none while others may be continuing."""

import random
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.membership import Candidate, Policy, View, founded_view, missing_members, refusal

POLICY = Policy()


def elect(*looking: Candidate, policy: Policy = POLICY) -> dict[int, View]:
    """Return the views that are founded, by founder, after as many turns as there are candidates; all hear all."""
    searching, founded = [replace(each) for each in looking], dict[int, View]()
    for _ in range(len(searching) + 2):
        for me in searching:
            others = [each for each in searching if each is not me]
            if me.number not in founded and (view := founded_view(me, others, policy)) is not None:
                founded[me.number] = view
    return founded


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
    views = [*elect(*looking).values()]
    assert len(views) <= 1
    newest = max((each.last for each in looking if each.last is not None), key=lambda view: view.id)
    absent = frozenset(newest.members) - {each.number for each in looking}
    assert bool(views) == (not refusal(newest, absent, Policy()))
    for view in views:
        (founder,) = view.members
        assert view.id == newest.id + 1
        held = {each.number: each.held_step for each in looking if each.number in newest.members}
        assert founder == min(number for number, step in held.items() if step == max(held.values()))


def test_a_minority_waits_until_enough_of_the_newest_view_look() -> None:
    view = View(4, (0, 1, 2))
    one, two = Candidate(1, 10, view), Candidate(2, 10, view)
    assert not elect(one)
    assert missing_members(one, ()).startswith(" Of the newest view, replicas 0, 2 are missing. ")
    assert elect(one, two) == {1: View(5, (1,))}
    assert not elect(one, Candidate(2, 10, View(5, (0, 2)))), "0 may continue without them"
    assert elect(one, policy=Policy(1, split="go-on")) == {1: View(5, (1,))}
    of_two = Candidate(1, 30, View(4, (0, 1)))
    assert not elect(of_two)
    assert elect(of_two, Candidate(0, 20)) == {1: View(5, (1,))}, "the process of 0 has ended"
    assert elect(of_two, Candidate(0, 40)) == {0: View(5, (0,))}


@pytest.mark.parametrize("replicas", [3, 4, 5, 6, 7])
@pytest.mark.parametrize("ahead", [True, False])
def test_one_that_was_started_again_does_not_count_as_the_member_that_it_was(replicas: int, ahead: bool) -> None:
    """The rest may have continued because it had ended. If nobody else is missing, none has."""
    view, most = View(4, tuple(range(replicas))), replicas // 2 + 1
    restarted = Candidate(replicas - 1, 30 if ahead else 0)
    there = [Candidate(number, 20, view) for number in range(replicas - 1)]
    founder = restarted.number if ahead else 0
    assert not elect(*there[1:most], restarted)
    assert elect(*there[:most], restarted) == elect(*there, restarted) == {founder: View(5, (founder,))}


def test_what_one_had_agreed_to_binds_it_also_where_the_others_may_not_know_it() -> None:
    """0 and 1 may have adopted it. Otherwise, if nobody has, it does not replace the view that all were members of."""
    view, agreed = View(4, (0, 1, 2, 3, 4)), View(5, (0, 1, 2))
    two, three, four = Candidate(2, 10, view, agreed), Candidate(3, 10, view), Candidate(4, 10, view)
    assert not elect(two, three, four)
    assert elect(two, three, four, Candidate(1, 10, view)) == {1: View(6, (1,))}
    assert not elect(Candidate(2, 10, view, View(5, (2, 3, 4))), three), "two of three, but two of five"


@pytest.mark.parametrize(
    "stranger",
    [
        Candidate(9, 5, View(1 << 53, (9, 10, 11))),
        Candidate(9, 1 << 53),
        Candidate(9, 5, View(4, (0, 1, 2)), View(1 << 52, (9,)), View(1 << 52, (9,))),
        Candidate(2, 5, View(1 << 53, (2, 9, 10))),
        Candidate(2, 5, View(4, (0, 1, 2)), View(1 << 53, (2, 9))),
    ],
    ids=str,
)
def test_nobody_keeps_the_others_from_founding_by_what_does_not_exist(stranger: Candidate) -> None:
    """The last two are members: two of three are enough without them."""
    view = View(4, (0, 1, 2))
    zero, one = (Candidate(number, 10, view) for number in (0, 1))
    for _ in range(2):
        assert founded_view(one, [stranger, zero], POLICY) is None
        founded = founded_view(zero, [stranger, one], POLICY)
    assert founded == View(5, (0,))


def test_of_replicas_that_were_in_no_view_only_those_found_that_may() -> None:
    """Who was told of others waits for them, also with the newest step or the lowest number."""
    told, founder = Candidate(0, 90, founds=False), Candidate(1, 10)
    assert not elect(told, Candidate(2, founds=False))
    assert elect(told, founder) == {1: View(0, (1,))}
    lost = Candidate(2, 10, View(4, (0, 2)))
    assert elect(told, lost) == {0: View(5, (0,))}, "it was a member, by whose vote it goes on"


def test_one_that_has_finished_is_not_waited_for() -> None:
    """It alone can't end the search of two others, and they need not wait for it."""
    view = View(4, (0, 1, 2))
    one = Candidate(1, 10, view)
    assert founded_view(one, (), POLICY, left={0}) is None, "2 may be continuing"
    assert founded_view(one, (), POLICY, left={0, 2}) == View(5, (1,))


def test_a_vote_is_bound_to_a_founder_until_that_one_votes_otherwise() -> None:
    view = View(4, (0, 1, 2))
    one, two = Candidate(1, 10, view), Candidate(2, 10, view)
    assert founded_view(two, [one], POLICY) is None
    assert two.vote == View(5, (1,))
    zero = Candidate(0, 10, view)
    for others in ([zero], [zero, Candidate(1, 10, view, vote=View(5, (1,)))], [zero, one]):
        assert founded_view(two, others, POLICY) is None
        assert two.vote == View(5, (1,)), "1 may be founding"
    founded_view(two, [zero, Candidate(1, 10, view, vote=View(5, (0,)))], POLICY)
    assert two.vote == View(6, (0,)), "later than what it voted for before"
    founded_view(two, [Candidate(0, 5), one], POLICY)
    assert two.vote == View(6, (0,)), "the process of 0 has ended, but the new one may be founding"
    founded_view(two, [Candidate(0, 5, vote=View(7, (1,))), one], POLICY)
    assert two.vote == View(7, (1,))


def test_a_vote_for_a_process_that_was_started_again_binds_as_any_other() -> None:
    """Regression: 3 and 2 founded, and both could go on: 3 with 1, and 2 with 0, which heard 3 before it founded."""
    view = View(4, (0, 1, 2, 3))
    zero, one, two = (Candidate(number, 40 if number == 2 else 10, view) for number in range(3))
    three = Candidate(3, 30)
    founded_view(zero, [one, three], POLICY)
    founded_view(one, [zero, three], POLICY)
    was = replace(three)
    assert founded_view(three, [zero, one], POLICY) == View(5, (3,))
    founded_view(zero, [was, two], POLICY)
    assert [founded_view(two, [zero, was], POLICY) for _ in range(2)] == [None, None]


def test_who_founds_is_a_member_of_every_view_that_others_may_be_in() -> None:
    """Regression: 0 founded by the vote of 1, and 2 after it, as all others of its view had ended once 1 was restarted.

    Both could go on: a number can come to both views if it is restarted twice.
    """
    view, agreed = View(4, (0, 1, 2)), View(5, (1, 2))
    zero, one, two = Candidate(0, 10, view), Candidate(1, 10, view, agreed), Candidate(2, 13, agreed)
    founded_view(one, [zero], POLICY)
    assert one.vote == View(6, (1,))
    assert founded_view(zero, [one], POLICY) is None
    assert founded_view(two, [Candidate(1, 10)], POLICY) == View(6, (2,))


def test_a_vote_holds_against_a_view_that_one_who_was_not_heard_had_adopted() -> None:
    """Regression: its number was that of the founded view, so the vote no longer counted and another one founded."""
    view, agreed = View(4, (0, 1, 2, 3)), View(5, (1, 2, 3))
    zero, one, three = (Candidate(n, 10 + n, view, agreed if n else None) for n in (0, 1, 3))
    two = Candidate(2, 10, agreed)

    def search(*there: Candidate) -> list[View]:
        found = [founded_view(me, [each for each in there if each is not me], POLICY) for me in there * 3]
        return [each for each in found if each is not None]

    assert search(zero, one, three) == [View(6, (3,))] * 3
    assert not search(zero, one, two)
    founded_view(one, [three], POLICY)
    assert one.agreed == agreed, "what it was ready for binds it also after a vote"


def test_two_that_voted_for_each_other_vote_for_a_third_later() -> None:
    """Regression: each waited until the other one voted for the third, so nobody founded any more.

    They had heard of different views: only 0 had heard of one without it.
    """
    view = View(4, (0, 1, 2, 3))
    zero, one, two = (Candidate(number, step, view) for number, step in enumerate((12, 11, 12)))
    three = Candidate(3, 10, view, View(5, (1, 2, 3)))
    founded_view(zero, [one, three], POLICY)
    founded_view(one, [zero, two], POLICY)
    assert [each.vote and each.vote.members for each in (zero, one)] == [(1,), (0,)]
    assert elect(zero, one, two, three) == {2: View(8, (2,))}


def test_of_two_that_voted_for_each_other_one_founds_if_each_sees_only_what_the_other_was() -> None:
    """Regression: both took back their votes at the same moment, and founded."""
    view = View(4, (0, 1, 2, 3))
    zero, one, two = (Candidate(number, 12 - number, view) for number in range(3))
    three = Candidate(3, 10, view, View(5, (1, 2, 3)))
    founded_view(zero, [one, three], POLICY)
    founded_view(one, [zero, two], POLICY)
    founded_view(two, [zero, one], POLICY)
    was = replace(zero)
    founded = [founded_view(zero, [one, two], POLICY), founded_view(one, [was, three], POLICY)]
    assert [view and view.members for view in founded] == [(0,), None]


def test_a_vote_for_one_that_the_founder_ignores_holds_it_up_until_it_votes_again() -> None:
    """3 ignores 0, which is no member of its view, but for which 1 has voted. What 0 voted for is too old to free 1."""
    view, agreed = View(4, (0, 1, 2, 3)), View(5, (1, 2, 3))
    zero, one, three = Candidate(0, 11, view), Candidate(1, 10, view), Candidate(3, 12, agreed)
    two = Candidate(2, 10, view, agreed)
    founded_view(zero, [one, two, three], POLICY)
    founded_view(one, [zero], POLICY)
    assert (zero.vote, one.vote) == (View(6, (3,)), View(7, (0,)))
    assert elect(zero, one, two, three) == {3: View(8, (3,))}


@pytest.mark.parametrize("restarts", [0, 1, 2])
@pytest.mark.parametrize("replicas", [3, 4, 5, 6, 7])
def test_whoever_hears_whom_and_whenever_no_two_found_and_in_the_end_one_does(replicas: int, restarts: int) -> None:
    """With links that come and go, searches in any order, and answers as old as the last vote of who hears them.

    Processes may be started again before they found. Once all links are whole and answers are new, one founds.
    """
    for seed in range(150 if restarts == 0 else 100):
        assert len(searches(replicas, random.Random(seed), restarts)) == 1, seed


def searches(replicas: int, chance: random.Random, restarts: int) -> dict[int, View]:
    """Return the views that are founded, by founder."""
    view = View(4, tuple(range(replicas)))
    following = View(5, tuple(sorted(chance.sample(range(replicas), replicas // 2 + 1))))
    ready = {number: chance.choice([(view, following), (following,)]) for number in following.members}
    searching = [Candidate(n, chance.randrange(3), *ready.get(n, (view,))) for n in range(replicas)]
    said = {each.number: [replace(each)] for each in searching}  # all that each has announced, the newest last
    known = dict.fromkeys(product(said, said), 0)  # (a, b): the place there of the oldest that a can still hear of b
    founded: dict[int, View] = {}

    def search(number: int, share: float, *, at_once: bool) -> None:
        heard, me = [], searching[number]
        for other in said:
            if other != me.number and chance.random() < share:
                newest = len(said[other]) - 1
                known[me.number, other] = newest if at_once else chance.randint(known[me.number, other], newest)
                heard.append(said[other][known[me.number, other]])
        before = me.vote
        if me.last is None and not any(each.last for each in heard):
            return  # a network that hides all members from a restarted process makes two histories
        if (view := founded_view(me, heard, POLICY)) is not None:
            founded[me.number] = view
        if me.vote != before:
            said[me.number].append(replace(me))
            known.update({(me.number, other): len(said[other]) - 1 for other in said})

    for _ in range(10 * replicas):
        if (me := chance.choice(searching)).number not in founded:
            if restarts and chance.random() < 0.1:
                restarts -= 1
                searching[me.number] = Candidate(me.number, chance.randint(-1, me.held_step))
                said[me.number].append(replace(searching[me.number]))
                known.update({(me.number, other): len(said[other]) - 1 for other in said})
            search(me.number, 0.5, at_once=False)
    for number in () if founded else [*said] * replicas:
        if not founded:
            search(number, 1.0, at_once=True)
    return founded
