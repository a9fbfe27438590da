"""Steps that a replica does not train, such as dynamic ones: which they are, what they leave as it is, and weights."""

from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.algorithm import LEAST_WEIGHT, RoundId, SyncSchedule, trains_at
from diloco.events import Event, RoundCommitted, RoundSent
from diloco.membership import View
from diloco.train import DynamicSteps
from tests.faults import Fault, FaultyTransport
from tests.replicas import Swarm, quadratic
from tests.train.source_runs import session_of

ALONE = "--replicas 1"


def test_a_slow_replica_trains_its_share_and_says_how_fast_it_is() -> None:
    others = mock.Mock()
    others.directory.transport = others.transport
    others.transport.configure_mock(view=View(0, (0, 1)), speeds=lambda: {1: 2.5})
    pace = DynamicSteps(0, 10, others)
    for _ in range(6):
        pace.trained(1.0)
    assert [step for step in range(20) if pace.trains(step)] == [2, 4, 7, 9, 12, 14, 17, 19]
    for step in range(20):
        pace.announce(step)
    assert others.transport.announce_speed.mock_calls == [mock.call(1.0)] * 2
    others.place.note.assert_called_with(pace=0.4)


def at_share(steps: int, patch: pytest.MonkeyPatch) -> DynamicSteps:
    """Return the pace of a lone replica that trains so many of 4 steps, however fast it is."""
    others = mock.Mock()
    others.directory.transport = others.transport
    others.transport.view = View(0, (0,))
    pace = DynamicSteps(0, 4, others)
    patch.setattr(pace, "steps_of", lambda replica: steps)
    return pace


def test_a_step_that_is_left_out_only_advances_the_schedule(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []
    session = session_of(data, ALONE, on_event=events.append)
    session.pace = at_share(1, monkeypatch)
    results = [session.step() for _ in range(12)]
    trained = [result.trained for result in results]
    assert trained == [step == 0 or trains_at(step, 1, 4) for step in range(12)], "the very first one is always trained"
    assert {result.pace for result in results} == {0.25}
    assert session.totals.steps == 12
    whole, paced = session_of(data, ALONE), session_of(data, ALONE)
    paced.pace = at_share(4, monkeypatch)
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


@pytest.mark.parametrize(
    ("weight", "first", "later"), [('"tokens"', 0.5, 0.25), ('"equal"', 1.0, 1.0), ("3.0", 1.5, 0.75)]
)
def test_a_replica_weighs_by_what_it_has_trained_or_as_all_do_or_times_what_is_given(
    data: Path, monkeypatch: pytest.MonkeyPatch, weight: str, first: float, later: float
) -> None:
    events: list[Event] = []
    session = session_of(data, f"{ALONE} --sync.arguments {{average={{weight={weight}}}}}", on_event=events.append)
    session.pace = at_share(1, monkeypatch)
    for _ in range(12):
        session.step()
    sent = [(event.outer_step, event.weight) for event in events if isinstance(event, RoundSent)]
    assert sent[0] == (0, first), "the very first step is always trained, and one of four"
    assert {each for outer_step, each in sent if outer_step} == {later}


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 23)), min_size=2, max_size=2),
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5)), max_size=4, unique=True),
    st.booleans(),
)
def test_weights_are_those_of_a_plain_count_whatever_happens(
    idle: list[set[int]], dropped: list[tuple[int, int]], needs_all: bool
) -> None:
    faults = [Fault(kind="drop", replica=replica, round=RoundId(0, k)) for replica, k in dropped]
    transport = FaultyTransport(2, faults=faults, min_contributors=2 if needs_all else 1)
    swarm = Swarm(2, SyncSchedule(inner_steps=4), transport=transport)
    gradient = quadratic()
    for step in range(24):
        for replica, diloco in enumerate(swarm.replicas):
            trains = step not in idle[replica]
            if trains:
                gradient(replica, step, swarm.models[replica])
                swarm.inner[replica].step()
            diloco.begin(float(trains))
        for diloco in swarm.replicas:
            diloco.finish()
    for replica in (0, 1):
        expected, count = [], 0
        for k in range(6):
            count += sum(step not in idle[replica] for step in range(4 * k, 4 * k + 4))
            expected.append(count / 4 if count else LEAST_WEIGHT)
            lost = {m for m, outer_step in dropped if outer_step == k}
            if not lost or (not needs_all and lost == {1 - replica}):
                count = 0
        sent = [event for event in swarm.events if isinstance(event, RoundSent) and event.replica == replica]
        assert [event.weight for event in sent] == expected
