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
    TrainedSteps,
    check_base_weight,
    contribution_weight,
)
from diloco.errors import CheckpointError, ConfigurationError


@given(st.floats(1e-9, 1e9), st.integers(1, 10_000), st.integers(1, 10_000))
def test_the_weight_is_the_plain_formula(base: float, trained: int, scheduled: int) -> None:
    expected = Fraction(base) * trained / scheduled
    assert contribution_weight(base, float(trained), scheduled) == pytest.approx(float(expected), rel=1e-15)


@pytest.mark.parametrize("weight", [0.0, -1.0, 1e19, 1e-19, float("nan"), float("inf")])
def test_what_no_base_weight_can_be_is_refused(weight: float) -> None:
    with pytest.raises(ConfigurationError, match=r"weight must be a number from 1e-18 to 1e\+18, got .*\."):
        check_base_weight(weight)


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


@given(st.lists(st.sampled_from(["step", "skip", "send", "commit", "void"]), max_size=60))
def test_the_count_is_the_steps_that_no_mean_has_taken(happened: list[str]) -> None:
    """Compare with a list of all steps, from which each step is removed once a mean contains it."""
    steps = TrainedSteps(1)
    open_steps: list[float] = []
    sent = 0
    for each in happened:
        if each in ("step", "skip"):
            steps.add(1.0 if each == "step" else 0.0)
            open_steps.append(1.0 if each == "step" else 0.0)
        elif each == "send":
            sent = len(open_steps)
            assert steps.submit(0) == sum(open_steps)
        elif each == "commit":
            steps.commit(0)
            open_steps, sent = open_steps[sent:], 0
        else:
            sent = 0
            steps.submit(0)  # a contribution after a void round contains all steps again
            sent = len(open_steps)
        again = TrainedSteps(1)
        again.load_state_dict(steps.state_dict())
        assert again.submit(0) == sum(open_steps)


def test_fragments_are_counted_apart() -> None:
    steps = TrainedSteps(2)
    steps.add(1.0)
    steps.submit(0)
    steps.commit(0)
    steps.add(0.5)
    assert (steps.submit(0), steps.submit(1)) == (0.5, 1.5)
    steps.forget(1)
    assert (steps.submit(0), steps.submit(1)) == (0.5, 0.0)


@pytest.mark.parametrize("trained", [-0.1, 1.1, float("nan"), float("inf")])
def test_what_no_part_of_a_step_can_be_is_refused(trained: float) -> None:
    steps = TrainedSteps(1)
    with pytest.raises(ConfigurationError, match=r"trained must be from 0 \(.*\) to 1 \(.*\), got .*not counted"):
        steps.add(trained)
    assert steps.submit(0) == 0.0


@pytest.mark.parametrize(
    "state",
    [
        None,
        {"since": [1.0]},
        {"since": [1.0], "handed_in": [1.0, 2.0]},
        {"since": [-1.0], "handed_in": [0.0]},
        {"since": ["1"], "handed_in": [0.0]},
        {"since": [float("inf")], "handed_in": [0.0]},
    ],
)
def test_a_state_that_is_none_is_refused(state: Any) -> None:
    steps = TrainedSteps(1)
    steps.add(1.0)
    with pytest.raises(CheckpointError, match=r"two lists, 'since' and 'handed_in', of 1 numbers.*Nothing was loaded"):
        steps.load_state_dict(state)
    assert steps.submit(0) == 1.0
