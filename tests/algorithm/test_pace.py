"""Dynamic local updates: the paper's formula, even spacing, and convergence with a slow replica."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco.algorithm import Nesterov, StepRate, SyncSchedule, steps_to_train, trains_at
from diloco.errors import ConfigurationError
from tests.replicas import Swarm, quadratic

SPEEDS = st.dictionaries(st.integers(0, 9), st.floats(1e-300, 1e300), min_size=1)


@given(SPEEDS, st.integers(1, 10_000))
def test_the_share_is_the_papers_formula(steps_per_s: dict[int, float], inner_steps: int) -> None:
    """Evaluate Asynchronous Local-SGD, section 4.2, in exact numbers, with at least one step and the bound of eight."""
    *others, fastest = sorted(steps_per_s.values())
    fastest = min(fastest, 8 * others[-1]) if others else fastest
    for replica, speed in steps_per_s.items():
        exact = min(Fraction(speed) / Fraction(fastest), Fraction(1)) * inner_steps
        steps = steps_to_train(replica, steps_per_s, inner_steps)
        near = {max(1, int(exact * (1 + side * Fraction(1, 1 << 50)))) for side in (-1, 0, 1)}
        assert steps in near, "rounding may change the result only next to a whole number"
        assert 1 <= steps <= inner_steps
        assert speed < fastest or steps == inner_steps


@given(st.integers(1, 60), st.data(), st.integers(0, 10_000))
def test_as_many_of_any_window_are_trained_and_evenly(inner_steps: int, data: st.DataObject, first: int) -> None:
    steps = data.draw(st.integers(1, inner_steps))
    length = data.draw(st.integers(1, inner_steps))
    assert sum(trains_at(first + t, steps, inner_steps) for t in range(inner_steps)) == steps
    trained = sum(trains_at(first + t, steps, inner_steps) for t in range(length))
    assert abs(trained - Fraction(length * steps, inner_steps)) < 1, "every range has its share of trained steps"


@pytest.mark.parametrize(("steps", "inner_steps"), [(0, 4), (5, 4), (-1, 4)])
def test_a_share_that_is_none_is_refused(steps: int, inner_steps: int) -> None:
    with pytest.raises(ConfigurationError, match=r"must be from 1 to 4, got"):
        trains_at(0, steps, inner_steps)


class TestStepRate:
    def test_the_last_steps_count_most(self) -> None:
        rate = StepRate()
        for seconds in [1.0] * 50 + [0.1] * 50:
            rate.add(seconds)
        assert rate.steps_per_s == pytest.approx(10.0, rel=0.06)

    @pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
    def test_what_no_step_can_take_is_passed_over(self, seconds: float) -> None:
        rate = StepRate()
        for each in (1.0, *[0.5] * 6):
            rate.add(each)
            rate.add(seconds)
        assert rate.steps_per_s == pytest.approx(2.0)


def paced(shares: list[int], steps: int, *, shared: bool = False) -> Swarm:
    """A swarm in which each replica trains its share of the scheduled steps."""
    schedule = SyncSchedule(inner_steps=8)
    swarm = Swarm(len(shares), schedule, outer=Nesterov(learning_rate=0.5, momentum=0.5))
    gradient = quadratic(shared=shared)
    for step in range(steps):
        members = zip(swarm.models, swarm.inner, swarm.replicas, shares, strict=True)
        for number, (model, inner, diloco, share) in enumerate(members):
            trains = trains_at(step, share, 8)
            if trains:
                gradient(number, step, model)
                inner.step()
                inner.zero_grad()
            diloco.begin(1.0 if trains else 0.0)
        for diloco in swarm.replicas:
            diloco.finish()
    return swarm


@pytest.mark.parametrize("shares", [[8, 8, 8], [8, 5, 1], [8, 1, 1]])
def test_converges_to_the_target_with_slow_replicas_too(shares: list[int]) -> None:
    swarm = paced(shares, 400, shared=True)

    generator = torch.Generator().manual_seed(0)
    target = torch.cat([torch.randn(p.shape, generator=generator).flatten() for p in swarm.models[0].parameters()])
    torch.testing.assert_close(swarm.global_params(0), target, atol=0.15, rtol=0)
