"""Weights by trained steps: the formula, exact in undisturbed runs, and the count across committed and void rounds."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.algorithm import (
    Send,
    SyncSchedule,
    contribution_weight,
)


@given(st.floats(1e-9, 1e9), st.integers(1, 10_000), st.integers(1, 10_000))
def test_the_weight_is_the_plain_formula(base: float, trained: int, scheduled: int) -> None:
    expected = Fraction(base) * trained / scheduled
    assert contribution_weight(base, float(trained), scheduled) == pytest.approx(float(expected), rel=1e-15)


@given(st.integers(1, 12), st.integers(1, 4), st.data())
def test_windows_are_the_steps_between_two_sends(inner_steps: int, num_fragments: int, data: Any) -> None:
    num_fragments = min(inner_steps, num_fragments)
    offsets = tuple(data.draw(st.integers(0, inner_steps - 1)) for _ in range(num_fragments))
    schedule = SyncSchedule(inner_steps=inner_steps, num_fragments=num_fragments, offsets=offsets)
    last = dict.fromkeys(range(num_fragments), 0)
    for step in range(1, 5 * inner_steps):
        for action in schedule.actions(step):
            if isinstance(action, Send):
                assert schedule.window_steps(action.fragment, action.outer_step) == step - last[action.fragment]
                last[action.fragment] = step
