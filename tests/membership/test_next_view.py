"""Who stays and what follows: the largest set of members that hear each other, and the next view by their reports."""

import random
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from itertools import combinations, permutations, product
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from diloco.errors import ConfigurationError
from diloco.membership import Policy, Report, View, largest_set, next_view, refusal, staying_members, yields

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
def test_of_a_bad_pair_the_one_goes_from_which_half_of_all_heard_nothing_lately(
    replicas: int, sayers: int, goes: int
) -> None:
    reports = [report(0, unsteady={1, 2, 3}), report(3, apart={0})]
    reports += [report(replica, unsteady={0}) for replica in range(1, 1 + sayers) if replica != 3]
    if sayers >= 3:
        reports[1] = report(3, apart={0}, unsteady={0})
    staying = staying_members(View.of(replicas), reports, range(replicas), 1, Policy())
    assert staying == tuple(replica for replica in range(replicas) if replica != goes)


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_those_stay_who_may_go_on_whatever_the_join_order_and_whoever_hears_whom(replicas: int) -> None:
    """Exhaustive. Regression: of two halves the one with the member that joined first stayed, and had to stop."""
    pairs = [*combinations(range(replicas), 2)]
    for order, count in product(permutations(range(replicas)), range(len(pairs) + 1)):
        view = View(0, tuple(range(replicas)), order)
        for broken in combinations(pairs, count):
            reports = [
                report(each, apart={one ^ two ^ each for one, two in broken if each in (one, two)}) for each in order
            ]
            sets = [
                chosen
                for size in range(1, replicas + 1)
                for chosen in combinations(range(replicas), size)
                if not {*combinations(chosen, 2)}.intersection(broken)
            ]
            staying = staying_members(view, reports, range(replicas), 1, Policy())
            assert staying in sets
            may_go_on = [each for each in sets if not refusal(view, {*view.members}.difference(each), Policy())]
            assert (staying in may_go_on) == bool(may_go_on), (order, broken)


def test_of_two_halves_the_one_that_may_go_on_stays_also_if_its_lowest_number_is_unsteady() -> None:
    reports = [report(each, apart={2, 3} if each < 2 else {0, 1}, unsteady={0} if each else set()) for each in range(4)]
    assert staying_members(View.of(4), reports, range(4), 1, Policy()) == (0, 1)


@pytest.mark.parametrize(("size", "share", "least"), [(128, 0.1, 20), (256, 0.1, 32), (256, 0.5, 8), (256, 1.0, 1)])
def test_more_bad_pairs_than_can_be_searched_take_little_time(size: int, share: float, least: int) -> None:
    """The control thread sends no heartbeat meanwhile: 10 ms for 128 members with a tenth of all pairs broken.

    The result depends on the members and pairs alone, so it is the same everywhere.
    """
    chance = random.Random(size)
    unheard = [pair for pair in combinations(range(size), 2) if chance.random() < share]
    began_s = time.process_time()
    staying = largest_set(range(size), unheard)
    slower = 5 if sys.gettrace() else 1  # coverage follows each line
    assert time.process_time() - began_s < (0.01 if size == 128 else 0.1) * slower
    assert len(staying) >= least
    inside = {*staying}
    assert not any(inside.issuperset(pair) for pair in unheard)
    for each in set(range(size)) - inside:
        assert any(each in pair and not inside.isdisjoint(pair) for pair in unheard)
    chance.shuffle(unheard)
    assert largest_set(range(size), [pair[::-1] for pair in unheard]) == staying


def report(rank: int, **said: Any) -> Report:
    return Report(rank, 0, **{name: frozenset(each) if isinstance(each, set) else each for name, each in said.items()})


@pytest.mark.parametrize(
    ("said", "members"),
    [
        ([{"apart": {2}}, {}], (0, 1)),
        ([{"gone": {2}}, {"apart": {2}}], (0, 1)),
        ([{"left": {2}}, {}], (0, 1)),
        ([{"late": {2}}, {"late": {2}}], (0, 1)),
        ([{"late": {2}}, {}], None),  # not half of all
        ([{}, {}], None),  # nobody accuses 2
        ([{"apart": {1, 2}}, {}], None),  # 0 and 1 don't hear each other
        ([{"apart": {2}, "joining": {7}}, {"joining": {7, 8}}], (0, 1, 7)),
        ([{"apart": {2}, "joining": {7}}, {"joining": {7}, "apart": {7}}], (0, 1)),
    ],
)
def test_members_follow_if_they_hear_each_other_and_accuse_whoever_goes(
    said: list[dict[str, Any]], members: tuple[int, ...] | None
) -> None:
    reports = [report(rank, **each) for rank, each in enumerate(said)]
    following = next_view(View.of(3), reports, (0, 1), Policy())
    assert (following and following.view.members) == members


@pytest.mark.parametrize(("alive", "follows"), [((), True), ((0,), True), ((0, 1), False)])
def test_whom_the_caller_hears_has_not_ended_whatever_others_say(alive: tuple[int, ...], follows: bool) -> None:
    said = report(0, gone={1, 2})
    assert (next_view(View.of(3), [said], (0,), Policy(), alive) is not None) == follows


ONE, NO = (0, 1), (0, 2)


@pytest.mark.parametrize(
    ("said", "commits", "void"),
    [
        ([{"voted": {ONE: "a"}}, {"commits": {ONE: "a"}}], {ONE: ("a",)}, set()),
        ([{"voted": {ONE: "a"}}, {"voted": {ONE: "a"}}], {ONE: ("a",)}, set()),
        ([{"voted": {ONE: "a"}}, {"voted": {ONE: "b"}}], {}, set()),
        ([{"voted": {ONE: "a"}}, {}], {}, set()),
        ([{"commits": {ONE: "a"}}, {}], {}, set()),  # a commit for which the other has not voted
        ([{"voted": {ONE: "a"}, "void": {ONE, NO}}, {"voted": {ONE: "a"}}], {}, {ONE, NO}),
        ([{"voted": {ONE: "a"}, "void": {ONE}}, {"commits": {ONE: "a"}}], {ONE: ("a",)}, set()),
    ],
)
def test_a_round_is_committed_if_all_who_stay_have_voted_for_it(
    said: list[dict[str, Any]], commits: dict[Any, Any], void: set[Any]
) -> None:
    reports = [report(rank, **{"gone": {2}, **each}) for rank, each in enumerate(said)]
    following = next_view(View.of(3), reports, (0, 1), Policy())
    assert following is not None
    assert (following.commits, following.void) == (commits, void)


def test_digests_are_compared_at_each_position_of_a_replica() -> None:
    shards = [report(rank, voted={ONE: "ab"[rank % 2]}) for rank in range(4)]
    following = next_view(View.of(2), shards, (0, 1), Policy())
    assert following is not None
    assert following.commits == {ONE: ("a", "b")}
    other = next_view(View.of(2), [*shards[:3], report(3, voted={ONE: "c"})], (0, 1), Policy())
    assert other is not None
    assert not other.commits


# Which side may continue: never two that might not know of each other, and never fewer replicas than required.


@dataclass(frozen=True)
class Split:
    """A partitioned view: its members by side, and which of the ended ones each side knows."""

    view: View
    sides: tuple[frozenset[int], ...]
    known_gone: tuple[frozenset[int], ...]

    def refusal(self, side: int, policy: Policy | None = None, joining: Collection[int] = ()) -> str:
        lost = {*self.view.members} - self.sides[side]
        return refusal(self.view, lost, policy or Policy(), gone=self.known_gone[side], joining=joining)


@st.composite
def splits(draw: st.DrawFn) -> Split:
    """Return splits in which every member is on one of two sides, lives elsewhere, or has ended, as a side may know."""
    members = sorted(draw(st.sets(st.integers(0, 12), min_size=1, max_size=9)))
    where = {member: draw(st.sampled_from(["left", "right", "ended", "elsewhere"])) for member in members}
    ended = [member for member in members if where[member] == "ended"]
    sides = [frozenset(member for member in members if where[member] == side) for side in ("left", "right")]
    assume(any(sides))
    known = [frozenset(member for member in ended if draw(st.booleans())) for _ in range(2)]
    return Split(View(3, tuple(members)), tuple(filter(None, sides)), tuple(known))


@given(splits(), st.integers(1, 9))
def test_two_sides_never_both_go_on_nor_fewer_than_min_replicas(split: Split, least: int) -> None:
    """Property: whatever each side knows, as long as only members that have ended count as gone.

    More than half go on, and so does who knows that all others have ended.
    """
    assert sum(not split.refusal(side) for side in range(len(split.sides))) <= 1
    for side, members in enumerate(split.sides):
        lost = {*split.view.members} - members
        if len(members) > len(lost) or lost <= split.known_gone[side]:
            assert not split.refusal(side)
        words = "" if len(members) >= least or not lost else f"{len(members)} of at least {least} replicas are left"
        assert split.refusal(side, Policy(least)) == (split.refusal(side) or words)


@given(st.sets(st.integers(0, 6), min_size=1), st.sets(st.integers(7, 12)))
def test_joiners_count_for_min_replicas_but_make_no_majority(members: set[int], joining: set[int]) -> None:
    view = View(0, tuple(sorted(members)))
    assert not refusal(view, (), Policy(len(members | joining)), joining=joining)
    if len(members) > 2:
        assert refusal(view, members - {max(members)}, Policy(), joining=joining)


@given(splits(), st.integers(1, 9), st.sets(st.integers(13, 15)))
def test_of_sides_that_go_on_by_themselves_one_does_where_more_than_half_are_asked_for(
    split: Split, least: int, joining: set[int]
) -> None:
    """Property: also if others join one of them."""
    policy = Policy(least, split="go-on")
    going_on = []
    for side, members in enumerate(split.sides):
        lost = frozenset(split.view.members) - members
        silent, more = lost - split.known_gone[side], joining if side else set()
        enough = not lost or len(members) >= least or (not silent and len(members | more) >= least)
        assert (not split.refusal(side, policy, more)) == enough
        if enough and silent:
            going_on.append(members)
    assert len(going_on) <= 1 or 2 * least <= len(split.view.members)


def test_of_two_sides_that_have_gone_on_exactly_one_yields() -> None:
    for sides in product((0, 1, None), repeat=6):  # of each replica, or none
        one, other = ({each for each, side in enumerate(sides) if side == number} for number in (0, 1))
        if one and other:
            assert yields(one, other) != yields(other, one)
            assert yields(one, other) or len(one) >= len(other)


@pytest.mark.parametrize("members", [(), (1, 0), (0, 0), (2, 1, 0)])
def test_a_view_names_each_replica_once_in_ascending_order(members: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="at least one replica, each once, in ascending order"):
        View(0, members)
