"""Learning rates are pure functions of the step. tests/train/test_inner_optimizer tests that they never rise again."""

from __future__ import annotations

import pytest

from diloco.algorithm import ValueSchedule
from diloco.errors import ConfigurationError


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
