"""The limit on connections: no origin takes the places of the others."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from diloco.transport import ConnectionLimit


def test_a_flood_from_one_origin_keeps_nobody_out() -> None:
    limit = ConnectionLimit[str](64, most_of_one=64)
    flood = [f"flood {n}" for n in range(64)]
    assert [limit.enter(each, ["liar"]) for each in flood] == [None] * 64
    assert limit.enter("flood 64", ["liar"]) == "flood 64"
    for n in range(32):
        assert limit.enter(f"honest {n}", [f"peer {n}"]) == flood[n], "the oldest connection of the flood"


def test_who_leaves_makes_room() -> None:
    limit = ConnectionLimit[int](2, most_of_one=1)
    assert limit.enter(1, ["a"]) is None
    assert limit.enter(2, ["a"]) == 2
    limit.leave(2)
    limit.leave(1)
    assert limit.enter(3, ["a"]) is None


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_there_are_never_more_than_there_are_places(arrivals: list[tuple[int, bool]]) -> None:
    """Property: no origin exceeds its share, and the one with the fewest connections loses none to others."""
    limit, inside = ConnectionLimit[int](5, most_of_one=3), dict[int, str]()
    for number, (origin, leaves) in enumerate(arrivals):
        if leaves and inside:
            limit.leave(gone := min(inside))
            del inside[gone]
        of_one = [each for each in inside.values() if each == str(origin)]
        inside[number] = str(origin)
        out = limit.enter(number, [str(origin)])
        counts = Counter(inside.values())
        assert (out == number) == (len(of_one) == 3)
        assert (out is None) == (len(of_one) < 3 and len(inside) <= 5)
        if out is not None:
            assert out == number or counts[inside[out]] == max(counts.values())
            del inside[out]
        assert len(inside) <= 5
