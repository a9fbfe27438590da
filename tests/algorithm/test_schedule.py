"""The schedule is a pure function of the step, with properties for every small H, P and tau; dynamic local updates."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.algorithm import Send, StepRate, SyncSchedule, ValueSchedule, steps_to_train, trains_at
from diloco.errors import ConfigurationError


def steps_of(schedule: SyncSchedule, fragment: int, steps: int) -> list[int]:
    sent = [(step, action) for step in range(1, steps + 1) for action in schedule.actions(step)]
    return [step for step, action in sent if isinstance(action, Send) and action.fragment == fragment]


@pytest.mark.parametrize("inner_steps", [*range(1, 13), 17])
def test_never_two_sends_of_a_fragment_in_flight_and_every_fragment_equally_often(inner_steps: int) -> None:
    """Replay the actions of three cycles for every P <= H and tau <= H; for tau = H merges come before sends."""
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


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 40), st.data())
def test_figures_of_a_schedule_are_those_of_its_actions(
    inner_steps: int, num_fragments: int, steps: int, data: st.DataObject
) -> None:
    num_fragments = min(inner_steps, num_fragments)
    schedule = SyncSchedule(
        inner_steps=inner_steps,
        num_fragments=num_fragments,
        overlap_steps=data.draw(st.integers(0, inner_steps)),
        offsets=tuple(data.draw(st.integers(0, inner_steps - 1)) for _ in range(num_fragments)),
    )
    assert schedule.busy_steps(steps) == tuple(step for step in range(steps + 1) if schedule.actions(step))
    for fragment in range(num_fragments):
        sent = steps_of(schedule, fragment, steps)
        assert schedule.rounds_of(fragment, steps) == len(sent)
        assert [schedule.sent_at(fragment, k) for k in range(len(sent))] == sent
        windows = [b - a for a, b in zip([0, *sent], sent, strict=False)]
        assert [schedule.window_steps(fragment, k) for k in range(len(sent))] == windows


@given(st.dictionaries(st.integers(0, 9), st.floats(1e-300, 1e300), min_size=1), st.integers(1, 10_000))
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
    steps, length = (data.draw(st.integers(1, inner_steps)) for _ in range(2))
    assert sum(trains_at(first + t, steps, inner_steps) for t in range(inner_steps)) == steps
    trained = sum(trains_at(first + t, steps, inner_steps) for t in range(length))
    assert abs(trained - Fraction(length * steps, inner_steps)) < 1, "every range has its share of trained steps"


@pytest.mark.parametrize("impossible", [0.0, -1.0, float("nan"), float("inf")])
def test_the_rate_is_that_of_the_last_steps_and_passes_over_times_that_no_step_can_take(impossible: float) -> None:
    rate = StepRate()
    for seconds in [1.0] * 50 + [0.1] * 50:
        rate.add(seconds)
        rate.add(impossible)
    assert rate.steps_per_s == pytest.approx(10.0, rel=0.06)


def test_wsd_stays_then_falls_in_a_straight_line() -> None:
    schedule = ValueSchedule(peak=1.0, kind="wsd", total_steps=10, decay_steps=4)
    assert [schedule(step) for step in range(5, 11)] == [1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    with pytest.raises(ConfigurationError, match="warm-up can't be longer than"):
        ValueSchedule(peak=1.0, kind="cosine", total_steps=5, warmup_steps=6)
    with pytest.raises(ConfigurationError, match="1 to 3"):
        ValueSchedule(peak=1.0, kind="wsd", total_steps=5, warmup_steps=2, decay_steps=4)
