"""Dynamic steps in a session: when speeds are announced, which steps are skipped, and what is unaffected."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from diloco.algorithm import trains_at
from diloco.data import build_corpus
from diloco.events import Event, RoundCommitted, RoundSent
from diloco.membership import View
from diloco.train import DynamicSteps, Fleet, RunSettings, Session, make_transport, resolve
from tests.command_lines import load_configuration
from tests.runs import SMALL


class Others:
    """Members with the view and speeds that a test sets."""

    def __init__(self, members: tuple[int, ...] = (0, 1), speeds: Mapping[int, float] | None = None) -> None:
        self.view = View(0, members)
        self.known = dict(speeds or {})
        self.told: list[float] = []
        self.seen: dict[str, Any] = {}
        self.transport = self

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


def session_of(data: Path, events: list[Event] | None = None) -> Session:
    configuration = load_configuration(
        [*SMALL.split(), str(data), "--replicas", "1", "--model.arguments.vocab-size", "257"]
    )
    settings: RunSettings = resolve(configuration, num_layers=2)
    fleet = Fleet(make_transport(settings))
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
    whole, paced = session_of(data), session_of(data)
    paced.pace = AtShare(4)
    rates = [whole.step().learning_rate for _ in range(12)]
    assert [paced.step().learning_rate for _ in range(12)] == rates
    assert paced.global_digest() == whole.global_digest(), "a share of all has the same bits as none"
    assert [r.learning_rate for r in results if r.trained] == [rates[t] for t in range(12) if trained[t]]
    assert session.replicas[0].sampler.state_dict() == whole.replicas[0].sampler.state_dict()
    sent = [(event.fragment, event.outer_step, event.weight) for event in events if isinstance(event, RoundSent)]
    assert sent[0] == (0, 0, 0.5), "steps 1 and 4 of 4"
    assert {weight for _, outer_step, weight in sent if outer_step} == {0.25}
    assert len([event for event in events if isinstance(event, RoundCommitted)]) == len(sent) - 1
    assert session.totals.sequences == 2 * sum(trained)
