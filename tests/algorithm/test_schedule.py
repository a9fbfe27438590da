"""The schedule is a pure function of the step, with properties for every small H, P and tau; dynamic local updates."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco.algorithm import Merge, Nesterov, Send, StepRate, SyncSchedule, steps_to_train, trains_at
from diloco.errors import ConfigurationError
from tests.replicas import Swarm, quadratic


def steps_of(schedule: SyncSchedule, kind: type, fragment: int, steps: int) -> list[int]:
    return [
        step
        for step in range(1, steps + 1)
        for action in schedule.actions(step)
        if isinstance(action, kind) and action.fragment == fragment
    ]


def test_the_papers_example() -> None:
    schedule = SyncSchedule(inner_steps=100, num_fragments=2)
    assert steps_of(schedule, Send, 0, 400) == [100, 200, 300, 400]
    assert steps_of(schedule, Send, 1, 400) == [150, 250, 350]


@pytest.mark.parametrize("inner_steps", range(1, 25))
def test_never_two_sends_of_a_fragment_in_flight_and_every_fragment_equally_often(inner_steps: int) -> None:
    """Replay the actions of three cycles for every P <= H and tau <= H."""
    for num_fragments in range(1, inner_steps + 1):
        offsets = SyncSchedule(inner_steps=inner_steps, num_fragments=num_fragments).fragment_offsets
        assert len(set(offsets)) == num_fragments, "spread evenly: no two fragments at one step"
        gaps = [b - a for a, b in zip(offsets, (*offsets[1:], inner_steps), strict=True)]
        assert max(gaps) - min(gaps) <= 1
        for overlap_steps in range(inner_steps + 1):
            schedule = SyncSchedule(inner_steps=inner_steps, num_fragments=num_fragments, overlap_steps=overlap_steps)
            in_flight: dict[int, tuple[int, int]] = {}
            sends = [0] * num_fragments
            # Fragment p's cycles of this window are those between H and 3H after its offset.
            for step in range(1, 4 * inner_steps):
                for action in schedule.actions(step):
                    if isinstance(action, Send):
                        assert action.fragment not in in_flight
                        in_flight[action.fragment] = (step, action.outer_step)
                        if step < offsets[action.fragment] + 3 * inner_steps:
                            assert action.outer_step == sends[action.fragment]
                            sends[action.fragment] += 1
                    else:
                        sent_at, outer_step = in_flight.pop(action.fragment)
                        assert (step - sent_at, action.outer_step) == (overlap_steps, outer_step)
            assert sends == [2] * num_fragments


def test_a_whole_round_late_is_merged_before_it_is_sent_again() -> None:
    schedule = SyncSchedule(inner_steps=4, num_fragments=2, overlap_steps=4)
    assert schedule.actions(4) == (Send(0, 0),)
    assert schedule.actions(8) == (Merge(0, 0), Send(0, 1))
    assert schedule.actions(10) == (Merge(1, 0), Send(1, 1))


def test_custom_offsets_may_coincide() -> None:
    schedule = SyncSchedule(inner_steps=5, num_fragments=2, offsets=(3, 3))
    assert schedule.actions(8) == (Send(0, 0), Send(1, 0), Merge(0, 0), Merge(1, 0))
    assert schedule.actions(5) == ()


@pytest.mark.parametrize(("steps", "rounds"), [(0, 0), (9, 0), (10, 1), (14, 1), (15, 2), (20, 3), (25, 4)])
def test_rounds_counts_the_sends(steps: int, rounds: int) -> None:
    schedule = SyncSchedule(inner_steps=10, num_fragments=2)
    assert schedule.rounds(steps) == rounds
    assert rounds == sum(isinstance(a, Send) for step in range(1, steps + 1) for a in schedule.actions(step))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"inner_steps": 0}, "inner_steps must be at least 1, got 0"),
        ({"inner_steps": 4, "num_fragments": 5}, "num_fragments must be from 1 to 4 .* got 5"),
        ({"inner_steps": 4, "num_fragments": 0}, "num_fragments must be from 1 to 4 .* got 0"),
        ({"inner_steps": 4, "overlap_steps": 5}, "overlap_steps must be from 0 to 4 .* got 5"),
        ({"inner_steps": 4, "overlap_steps": -1}, "overlap_steps must be from 0 to 4 .* got -1"),
        ({"inner_steps": 4, "num_fragments": 2, "offsets": (0,)}, "2 values from 0 to 3"),
        ({"inner_steps": 4, "num_fragments": 2, "offsets": (0, 4)}, "2 values from 0 to 3"),
    ],
)
def test_impossible_schedules_are_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        SyncSchedule(**arguments)  # type: ignore[arg-type]  # wrong on purpose


def test_the_busy_steps_are_those_with_actions() -> None:
    for schedule in (
        SyncSchedule(inner_steps=7, num_fragments=3, overlap_steps=5),
        SyncSchedule(inner_steps=1),
        SyncSchedule(inner_steps=9, num_fragments=2, offsets=(8, 8)),
    ):
        for steps in (0, 6, 40):
            assert schedule.busy_steps(steps) == tuple(step for step in range(steps + 1) if schedule.actions(step))


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
