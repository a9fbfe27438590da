"""Which side may continue: never two that might not know of each other, and never fewer replicas than required."""

from collections.abc import Collection
from dataclasses import dataclass

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from diloco.errors import ConfigurationError
from diloco.membership import Policy, View, refusal


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


@given(splits())
def test_two_sides_never_both_go_on(split: Split) -> None:
    """Property: whatever each side knows, as long as only members that have ended count as gone."""
    assert sum(not split.refusal(side) for side in range(len(split.sides))) <= 1


@given(splits())
def test_more_than_half_go_on_and_so_does_who_knows_that_all_others_have_ended(split: Split) -> None:
    side, members = split.sides[0], set(split.view.members)
    if 2 * len(side) > len(members) or members - side <= split.known_gone[0]:
        assert not split.refusal(0)


@given(splits(), st.integers(1, 9))
def test_fewer_than_min_replicas_never_go_on(split: Split, least: int) -> None:
    for side, members in enumerate(split.sides):
        enough = len(members) >= least or len(members) == len(split.view.members)
        words = "" if enough else f"{len(members)} of at least {least} replicas are left"
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


@pytest.mark.parametrize("members", [(), (1, 0), (0, 0), (2, 1, 0)])
def test_a_view_names_each_replica_once_in_ascending_order(members: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="at least one replica, each once, in ascending order"):
        View(0, members)
