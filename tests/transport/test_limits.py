"""Bounds on what others may ask for, as values: connections by origin, and bytes per second."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from diloco.transport import ConnectionLimit, TokenBucket


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_there_are_never_more_connections_than_there_are_places(arrivals: list[tuple[int, bool]]) -> None:
    """Property: the newest is let in, no origin exceeds its share, and the largest one loses its oldest to others."""
    limit, inside = ConnectionLimit[int](5, most_of_one=3), dict[int, str]()
    for number, (origin, leaves) in enumerate(arrivals):
        if leaves and inside:
            limit.leave(gone := min(inside))
            del inside[gone]
        of_one = [each for each in inside.values() if each == str(origin)]
        inside[number] = str(origin)
        out = limit.enter(number, [str(origin)])
        counts = Counter(inside.values())
        assert (out is None) == (len(of_one) < 3 and len(inside) <= 5)
        if out is not None:
            assert out != number
            assert inside[out] == str(origin) if len(of_one) == 3 else counts[inside[out]] == max(counts.values())
            del inside[out]
        assert len(inside) <= 5


@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5000)), min_size=1, max_size=50),
    st.floats(1, 1e6),
    st.integers(1, 10_000),
)
def test_no_more_leaves_than_the_bucket_allows(asked: list[tuple[float, int]], rate: float, burst: int) -> None:
    """Between any two departures, whenever they were requested; first come, first served."""
    bucket, now_s, left = TokenBucket(rate, burst), 0.0, []
    for pause_s, size in asked:
        now_s += pause_s
        left.append((now_s + bucket.take(now_s, size), size))
    for first in range(len(left)):
        total = 0
        for last in range(first, len(left)):
            total += left[last][1]
            span_s = left[last][0] - left[first][0]
            assert total <= (burst + left[first][1] + rate * span_s) * (1 + 1e-6) + 1e-3
    assert [when for when, _ in left] == sorted(when for when, _ in left)
