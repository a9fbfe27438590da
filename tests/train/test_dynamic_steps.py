"""Dynamic steps in a session: when speeds are announced, which steps are skipped, and what is unaffected."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.algorithm import trains_at
from diloco.config import load_configuration
from diloco.data import build_corpus
from diloco.events import Event, RoundCommitted, RoundSent
from diloco.membership import View
from diloco.train import DynamicSteps, InProcessFleet, RunSettings, Session, make_pace, make_transport, resolve
from tests.runs import SMALL


class Others:
    """Members with the view, speeds and time limits that a test sets."""

    def __init__(self, members: tuple[int, ...] = (0, 1), speeds: Mapping[int, float] | None = None) -> None:
        self.view = View(0, members)
        self.known = dict(speeds or {})
        self.told: list[float] = []
        self.seen: dict[str, Any] = {}
        self.left_s: float | None = None
        self.asked: list[int] = []

    def time_left_s(self, overlap_steps: int) -> float | None:
        self.asked.append(overlap_steps)
        return self.left_s

    def announce_speed(self, steps_per_s: float) -> None:
        self.told.append(steps_per_s)

    def speeds(self) -> Mapping[int, float]:
        return self.known

    def note(self, **seen: Any) -> None:
        self.seen |= seen


def measured(others: Others, step_s: float = 1.0, inner_steps: int = 10) -> DynamicSteps:
    pace = DynamicSteps(0, inner_steps, others)
    for _ in range(6):
        pace.trained(step_s)
    return pace


def test_a_slow_replica_trains_its_share() -> None:
    pace = measured(Others(speeds={1: 2.5}))
    assert [step for step in range(20) if pace.trains(step)] == [2, 4, 7, 9, 12, 14, 17, 19]
    assert pace.fraction == 0.4


@pytest.mark.parametrize("speeds", [{}, {1: 0.5}, {1: 1.0}, {0: 9.0}])
def test_nobody_faster_means_every_step(speeds: Mapping[int, float]) -> None:
    """A report from others about this replica's own speed is ignored."""
    pace = measured(Others(speeds=speeds))
    assert all(pace.trains(step) for step in range(20))


def test_every_step_is_trained_until_the_own_speed_is_known() -> None:
    others = Others(speeds={1: 1e9})
    pace = DynamicSteps(0, 10, others)
    for step in range(5):
        pace.trained(1.0)
        pace.announce(step)
        assert pace.trains(step)
    assert others.told == []
    pace.trained(1.0)
    assert sum(pace.trains(step) for step in range(10)) == 1, "and at least one of H always"


def test_speeds_are_told_once_in_h_steps_and_when_the_members_change() -> None:
    others = Others()
    pace = measured(others)
    told_at = []
    for step in range(1, 40):
        if step == 25:
            others.view = View(1, (0, 1, 2))
        before = len(others.told)
        pace.announce(step)
        if len(others.told) > before:
            told_at.append(step)
    assert told_at == [1, 11, 21, 25, 35]
    assert others.seen == {"pace": 1.0}


def test_how_many_train_a_step_counts_those_not_heard_of_as_training() -> None:
    pace = measured(Others((0, 1, 2), {1: 0.5}), inner_steps=4)
    assert [pace.members_training(step, trained=True) for step in range(4)] == [2, 3, 2, 3]
    assert [pace.members_training(step, trained=False) for step in range(4)] == [1, 2, 1, 2]


@pytest.mark.parametrize(("left_s", "trains"), [(None, True), (0.0, False), (1.9, False), (2.0, True), (30.0, True)])
def test_with_grace_a_step_is_trained_if_it_is_over_in_time(left_s: float | None, trains: bool) -> None:
    others = Others(speeds={1: 9.0})
    pace = DynamicSteps(0, 10, others, shares=False, grace_steps=3)
    others.left_s = 0.0
    assert pace.trains(0), "it trains until its own speed is known"
    for _ in range(6):
        pace.trained(2.0)
    others.left_s = left_s
    assert [pace.trains(step) for step in range(1, 11)] == [trains] * 10
    assert set(others.asked) == {3}
    assert pace.fraction == 1.0, "its share is not reduced by being slow"


def test_without_grace_nobody_asks_how_much_time_is_left() -> None:
    others = Others()
    others.left_s = 0.0
    assert measured(others).trains(0)
    assert not others.asked


@pytest.mark.parametrize(
    ("words", "slow_one_trains", "late_one_trains"),
    [
        ("", None, None),
        ("--network.straggler skip", None, None),
        ("--network.straggler grace", True, False),
        ("--swarm.dynamic-steps", False, True),
        ("--swarm.dynamic-steps --network.straggler grace", False, False),
    ],
)
def test_settings_say_why_a_step_may_be_left_out(
    data: Path, words: str, slow_one_trains: bool | None, late_one_trains: bool | None
) -> None:
    configuration = load_configuration(
        [*SMALL.split(), str(data), "--transport", "hivemind", "--run", "r", *words.split()]
    )
    others = Others(speeds={1: 1e6})
    pace = make_pace(resolve(configuration, num_layers=2), 0, others)
    if slow_one_trains is None:
        assert pace is None
        return
    assert pace is not None
    for _ in range(6):
        pace.trained(1.0)
    assert all(pace.trains(step) for step in range(4)) == slow_one_trains
    others.known, others.left_s = {}, 0.0
    assert all(pace.trains(step) for step in range(4)) == late_one_trains
    assert set(others.asked) <= {2}, "tau of the run"


def test_who_is_late_leaves_out_the_rest_of_its_window_and_its_work_weighs_less(data: Path) -> None:
    """Once the straggler is level with the others after a send, it trains every step as before."""
    events: list[Event] = []
    session = session_of(data, events)
    others = Others((0,))
    pace = session.pace = DynamicSteps(0, 4, others, shares=False, grace_steps=1)
    for _ in range(6):
        pace.trained(1.0)
    results = []
    for step in range(12):
        others.left_s = 0.0 if step in (5, 6, 7) else None
        results.append(session.step())
    assert [result.trained for result in results] == [step not in (5, 6, 7) for step in range(12)]
    sent = {(event.fragment, event.outer_step): event.weight for event in events if isinstance(event, RoundSent)}
    assert (sent[0, 0], sent[0, 1], sent[0, 2]) == (1.0, 0.25, 1.0)
    assert session.totals.sequences == 2 * 9, "no replica trained the skipped sequences"


def session_of(data: Path, events: list[Event] | None = None) -> Session:
    configuration = load_configuration(
        [*SMALL.split(), str(data), "--replicas", "1", "--model.arguments.vocab-size", "257"]
    )
    settings: RunSettings = resolve(configuration, num_layers=2)
    fleet = InProcessFleet(make_transport(settings))
    corpus = build_corpus(settings.data)
    return Session(settings, corpus, fleet, torch.device("cpu"), [].append if events is None else events.append)


class AtShare(DynamicSteps):
    """A replica with a fixed share of the steps, independent of its measured speed."""

    def __init__(self, steps: int) -> None:
        super().__init__(0, 4, Others((0,)))
        self.steps = steps

    def steps_of(self, replica: int) -> int:
        return self.steps


def test_a_step_that_is_left_out_only_advances_the_schedule(data: Path) -> None:
    events: list[Event] = []
    session = session_of(data, events)
    session.pace = AtShare(1)
    results = [session.step() for _ in range(12)]
    trained = [result.trained for result in results]
    assert trained == [step == 0 or trains_at(step, 1, 4) for step in range(12)], "the very first one is always trained"
    assert {result.pace for result in results} == {0.25}
    assert session.totals.steps == 12
    whole = session_of(data)
    rates = [whole.step().learning_rate for _ in range(12)]
    assert [r.learning_rate for r in results if r.trained] == [rates[t] for t in range(12) if trained[t]]
    assert session.replicas[0].sampler.state_dict() == whole.replicas[0].sampler.state_dict()
    sent = [(event.fragment, event.outer_step, event.weight) for event in events if isinstance(event, RoundSent)]
    assert sent[0] == (0, 0, 0.5), "steps 1 and 4 of 4"
    assert {weight for _, outer_step, weight in sent if outer_step} == {0.25}
    assert len([event for event in events if isinstance(event, RoundCommitted)]) == len(sent) - 1
    assert session.totals.sequences == 2 * sum(trained)


def test_a_step_that_is_left_out_moves_no_parameter_and_no_moment(data: Path) -> None:
    session = session_of(data)
    session.step()
    session.pace = AtShare(1)
    before = [parameter.detach().clone() for parameter in session.replicas[0].model.parameters()]
    result = session.step()
    assert not result.trained
    assert all(torch.equal(p, q) for p, q in zip(session.replicas[0].model.parameters(), before, strict=True))
    counts = {int(state["step"]) for state in session.replicas[0].inner.optimizer.state.values()}
    assert counts == {1}


def test_whose_share_is_all_has_the_same_bits_as_without(data: Path) -> None:
    plain, paced = session_of(data), session_of(data)
    paced.pace = AtShare(4)
    for _ in range(12):
        plain.step()
        paced.step()
    assert plain.global_digest() == paced.global_digest()
    assert plain.totals.sequences == paced.totals.sequences
