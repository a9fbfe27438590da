"""The largest set of members that hear each other, compared with trying all sets."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.membership.next_view import largest_set, reachable_from, staying_members
from diloco.membership.quorum import Policy
from diloco.membership.reports import Report
from diloco.membership.view import View

PAIRS = st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 7), unique=True), PAIRS)
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


@given(st.sets(st.integers(0, 7), min_size=3), st.data())
def test_a_single_bad_pair_costs_one_of_the_two(members: set[int], data: st.DataObject) -> None:
    one, other = data.draw(st.permutations(sorted(members)))[:2]
    assert largest_set(sorted(members), [(one, other)]) == tuple(sorted(members - {max(one, other)}))


@given(st.sets(st.integers(0, 7), min_size=4), st.data())
def test_one_that_accuses_two_is_the_one_to_go(members: set[int], data: st.DataObject) -> None:
    one, *others = data.draw(st.permutations(sorted(members)))
    assert largest_set(sorted(members), [(one, other) for other in others[:2]]) == tuple(sorted(members - {one}))


@pytest.mark.parametrize(("replicas", "sayers", "goes"), [(4, 1, 3), (4, 2, 0), (5, 2, 3), (5, 3, 0)])
def test_of_a_bad_pair_the_one_goes_of_whom_more_than_could_lie_heard_nothing_lately(
    replicas: int, sayers: int, goes: int
) -> None:
    said = frozenset((replica, 0) for replica in range(1, 1 + sayers))
    report = Report(1, 0, unheard=frozenset({(3, 0)}), unsteady=said | {(0, 3), (0, 1), (0, 2)})
    staying = staying_members(View.of(replicas), report, 1, Policy())
    assert staying == tuple(replica for replica in range(replicas) if replica != goes)


def test_many_bad_pairs_of_many_members_take_no_time() -> None:
    """Whether each member has one bad pair, two halves can't hear each other, or neighbours in a ring can't."""
    pairs = [(m, m + 1) for m in range(0, 64, 2)]
    assert largest_set(range(64), pairs) == tuple(range(0, 64, 2))
    halves = [(one, other) for one in range(32) for other in range(32, 64)]
    assert largest_set(range(64), halves) == tuple(range(32))
    ring = [(m, (m + 1) % 64) for m in range(64)]
    assert largest_set(range(64), ring) == tuple(range(0, 64, 2))


@given(st.sets(st.integers(0, 7), min_size=1), PAIRS)
def test_whoever_is_within_reach_reaches_back(members: set[int], unheard: set[tuple[int, int]]) -> None:
    reach = {member: reachable_from(member, members, unheard) for member in members}
    assert all(member in reach[other] for member in members for other in reach[member])
