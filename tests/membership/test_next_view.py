"""The largest set of members that hear each other, compared with trying all sets."""

from __future__ import annotations

import random
import time
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.membership import (
    Agreed,
    NextView,
    Policy,
    Report,
    View,
    largest_set,
    next_view,
    staying_members,
)

PAIRS = st.sets(st.tuples(st.integers(0, 11), st.integers(0, 11)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 11), unique=True), PAIRS)
def test_it_is_the_first_of_all_sets_by_size_then_by_order(order: list[int], unheard: set[tuple[int, int]]) -> None:
    apart = {frozenset(pair) for pair in unheard}
    sets = [
        chosen
        for size in range(len(order) + 1)
        for chosen in combinations(order, size)
        if not any(frozenset(pair) in apart for pair in combinations(chosen, 2))
    ]
    best = min(sets, key=lambda chosen: (-len(chosen), [order.index(each) for each in chosen]))
    assert largest_set(order, unheard) == tuple(sorted(best))


@pytest.mark.parametrize(("replicas", "sayers", "goes"), [(4, 1, 3), (4, 2, 0), (5, 2, 3), (5, 3, 0)])
def test_of_a_bad_pair_the_one_goes_of_whom_more_than_could_lie_heard_nothing_lately(
    replicas: int, sayers: int, goes: int
) -> None:
    said = frozenset((replica, 0) for replica in range(1, 1 + sayers))
    report = Report(1, 0, unheard=frozenset({(3, 0)}), unsteady=said | {(0, 3), (0, 1), (0, 2)})
    staying = staying_members(View.of(replicas), report, 1, Policy())
    assert staying == tuple(replica for replica in range(replicas) if replica != goes)


@pytest.mark.parametrize(("size", "share", "least"), [(128, 0.1, 20), (256, 0.1, 32), (256, 0.5, 8), (256, 1.0, 1)])
def test_more_bad_pairs_than_can_be_searched_take_little_time(size: int, share: float, least: int) -> None:
    """The control thread sends no heartbeat meanwhile: 10 ms for 128 members with a tenth of all pairs broken.

    The result depends on the members and pairs alone, so it is the same everywhere.
    """
    chance = random.Random(size)
    unheard = [pair for pair in combinations(range(size), 2) if chance.random() < share]
    began_s = time.process_time()
    staying = largest_set(range(size), unheard)
    assert time.process_time() - began_s < (0.01 if size == 128 else 0.1)
    assert len(staying) >= least
    inside = {*staying}
    assert not any(inside.issuperset(pair) for pair in unheard)
    for each in set(range(size)) - inside:
        assert any(each in pair and not inside.isdisjoint(pair) for pair in unheard)
    chance.shuffle(unheard)
    assert largest_set(range(size), [pair[::-1] for pair in unheard]) == staying


EARLIER = NextView(View(1, (0, 1, 2)), View.of(5), 1, {}, "replicas 3, 4 are lost")
FIRST = frozenset({(0, 1, 2)})


def followed_by(names: dict[int, frozenset[tuple[int, ...]]], staying: tuple[int, ...], replicas: int = 5) -> View:
    """Return the next view if the members ``names`` report that they were ready for `EARLIER`, with which others."""
    lost = frozenset((member, other) for member in staying for other in range(replicas) if other not in staying)
    reports = [
        Report(member, 0, lost, agreed=Agreed(1, EARLIER, names[member]) if member in names else None)
        for member in staying
    ]
    following = next_view(View.of(replicas), reports, staying, Policy()).view
    assert following is not None
    return following


def test_an_agreement_stands_unless_one_of_those_who_were_to_be_ready_denies_it() -> None:
    """Also if it was taken over by a later quorum, whose members it may leave out."""
    assert followed_by({2: FIRST}, (2, 3, 4)) == EARLIER.view
    assert followed_by({1: FIRST, 2: FIRST}, (1, 2, 3)) == EARLIER.view
    assert followed_by({1: FIRST}, (1, 2, 3)) == View(1, (1, 2, 3)), "2 was never ready, so nobody has adopted it"
    assert followed_by({3: frozenset({(1, 2, 3)})}, (0, 3, 4)) == EARLIER.view
    assert followed_by({1: FIRST | {(1, 3, 4)}}, (0, 1, 3)) == View(1, (0, 1, 3)), "denied in both"
    assert followed_by({1: FIRST | {(1, 2, 4)}}, (0, 1, 3)) == EARLIER.view, "0 denies the first one only"


def test_one_liar_neither_forges_an_agreement_nor_hides_one_from_members_that_would_be_enough_without_it() -> None:
    for quorum in ((2,), (2, 3), (0, 2, 3), (0, 1, 2), (0, 1, 2, 3, 4)):
        assert followed_by({2: frozenset({quorum})}, (1, 2, 3, 4)) == View(1, (1, 2, 3, 4)), quorum
    everybody = frozenset({(0, 1, 2, 3, 4, 5, 6)})
    assert followed_by({1: everybody, 2: everybody, 3: everybody}, (1, 2, 3, 4, 5), 7) == EARLIER.view


def test_sides_that_may_both_go_on_are_bound_by_what_more_than_could_lie_have_agreed_on() -> None:
    """Under ``go-on`` the others of an agreement continue on their own side."""
    policy = Policy(1, split="go-on")
    for names in (1, 2):
        reports = [
            Report(member, 0, agreed=Agreed(1, EARLIER, FIRST) if member < 1 + names else None) for member in (1, 2, 3)
        ]
        following = next_view(View.of(5), reports, (1, 2, 3), policy)
        assert (following == EARLIER) == (names == 2)
