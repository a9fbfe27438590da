"""The schedule is a pure function of the step. Its properties hold for every small H, P and tau."""

from __future__ import annotations

import pytest

from diloco.algorithm import Merge, Send, SyncSchedule
from diloco.errors import ConfigurationError


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
