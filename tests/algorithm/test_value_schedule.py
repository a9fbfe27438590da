"""Learning rates are pure functions of the step and never rise again."""

from __future__ import annotations

import itertools
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.algorithm.numbers import ValueSchedule
from diloco.errors import ConfigurationError


@given(
    kind=st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    warmup=st.integers(0, 20),
    rest=st.integers(1, 50),
    ratio=st.floats(0, 1),
)
def test_rises_to_the_peak_then_never_rises_and_ends_where_it_should(
    kind: Literal["constant", "linear", "cosine", "wsd"], warmup: int, rest: int, ratio: float
) -> None:
    total = warmup + rest
    schedule = ValueSchedule(
        peak=2.0,
        kind=kind,
        total_steps=total,
        warmup_steps=warmup,
        final_ratio=ratio,
        decay_steps=max(1, rest // 3),
    )
    values = [schedule(step) for step in range(total + 30)]
    assert values[:warmup] == sorted(values[:warmup])
    assert values[max(0, warmup - 1)] == pytest.approx(2.0)
    after = values[warmup:]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(after))
    end = 2.0 if kind == "constant" else 2.0 * ratio
    assert values[total:] == [pytest.approx(end)] * 30


def test_wsd_stays_then_falls_in_a_straight_line() -> None:
    schedule = ValueSchedule(peak=1.0, kind="wsd", total_steps=10, decay_steps=4)
    assert [schedule(step) for step in range(5, 11)] == [1.0, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="warm-up can't be longer than"):
        ValueSchedule(peak=1.0, kind="cosine", total_steps=5, warmup_steps=6)
    with pytest.raises(ConfigurationError, match="1 to 3"):
        ValueSchedule(peak=1.0, kind="wsd", total_steps=5, warmup_steps=2, decay_steps=4)
    with pytest.raises(ConfigurationError, match="finite"):
        ValueSchedule(peak=float("nan"))
