"""Curves of bounded size."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.watch import Series


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan) | st.none(), max_size=300), st.sampled_from([2, 8, 16]))
def test_no_extreme_and_no_point_is_lost(values: list[float | None], most: int) -> None:
    series = Series(("step",), ("loss",), most)
    for step, value in enumerate(values):
        series.add({"step": step}, {"loss": value})
    rows = series.rows()
    assert len(rows) <= most
    assert [row[0] for row in rows] == sorted({row[0] for row in rows})
    if values:
        assert rows[-1][0] == len(values) - 1
        assert len(rows) >= min(len(values), most // 2)
    seen = [value for value in values if value is not None and math.isfinite(value)]
    lows = [row[2] for row in rows if row[2] is not None]
    highs = [row[3] for row in rows if row[3] is not None]
    if not seen:
        assert not lows
        return
    assert math.isclose(min(lows), min(seen), rel_tol=1e-5, abs_tol=1e-300)
    assert math.isclose(max(highs), max(seen), rel_tol=1e-5, abs_tol=1e-300)


def test_short_runs_are_shown_as_they_are() -> None:
    series = Series(("step",), ("loss",), 4)
    for step in range(4):
        series.add({"step": step}, {"loss": float(step)})
    assert series.rows() == [(float(step), float(step), float(step), float(step)) for step in range(4)]
    assert series.stride == 1


def test_what_has_no_value_is_no_zero() -> None:
    series = Series(("step",), ("mfu",))
    series.add({"step": 1}, {})
    assert series.rows() == [(1, None, None, None)]


def test_a_bucket_is_the_mean_of_its_points_wherever_they_were_merged() -> None:
    series = Series(("step",), ("loss",), 2)
    for step in range(1, 9):
        series.add({"step": step}, {"loss": float(step)})
    assert series.rows() == [(4, 2.5, 1, 4), (8, 6.5, 5, 8)]
