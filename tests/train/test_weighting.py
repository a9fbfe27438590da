"""Weights by trained steps, in training replicas: the weight of each contribution, and the resulting mean."""

from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.algorithm import LEAST_WEIGHT, RebaseMerge, RoundId, SyncSchedule
from diloco.events import RoundSent
from tests.faults import Fault, FaultyTransport
from tests.replicas import Gradient, Swarm, quadratic

SCHEDULE = SyncSchedule(inner_steps=4)


def weights(swarm: Swarm) -> dict[int, list[float]]:
    """Return the weights of the contributions by replica, in the order in which they were sent."""
    sent = defaultdict(list)
    for event in swarm.events:
        if isinstance(event, RoundSent):
            sent[event.replica].append(event.weight)
    return dict(sent)


def run(swarm: Swarm, steps: int, idle: dict[int, set[int]], gradient: Gradient | None = None) -> None:
    """Run steps of all replicas. A replica does not train its ``idle`` steps (replica -> steps, counted from 0)."""
    gradient = gradient or quadratic()
    for _ in range(steps):
        for number, (model, inner, diloco) in enumerate(zip(swarm.models, swarm.inner, swarm.replicas, strict=True)):
            trains = diloco.steps not in idle.get(number, set())
            if trains:
                gradient(number, diloco.steps, model)
                inner.step()
                inner.zero_grad()
            diloco.begin(1.0 if trains else 0.0)
        for diloco in swarm.replicas:
            diloco.finish()


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
    swarm = Swarm(2, SCHEDULE, transport=transport)
    run(swarm, 24, dict(enumerate(idle)))
    for replica in (0, 1):
        expected, count = [], 0
        for k in range(6):
            count += sum(step not in idle[replica] for step in range(4 * k, 4 * k + 4))
            expected.append(count / 4 if count else LEAST_WEIGHT)
            lost = {m for m, outer_step in dropped if outer_step == k}
            if not lost or (not needs_all and lost == {1 - replica}):
                count = 0
        assert weights(swarm)[replica] == expected


@pytest.mark.parametrize("stop_at", [1, 4, 5, 6, 8, 9, 11])
def test_stopping_anywhere_and_going_on_weighs_the_same(stop_at: int) -> None:
    """The run stops with a round in flight, between rounds, and with work that no mean contains yet."""
    schedule = SyncSchedule(inner_steps=4, overlap_steps=2)
    faults = [Fault(kind="drop", replica=0, round=RoundId(0, k)) for k in (0, 2)]
    idle = {1: {2, 5, 9, 10}}

    def make() -> Swarm:
        return Swarm(2, schedule, transport=FaultyTransport(2, faults=faults), merge=RebaseMerge())

    whole, first, second = make(), make(), make()
    run(whole, 20, idle)
    run(first, stop_at, idle)
    second.resume_from(first)
    run(second, 20 - stop_at, idle)
    assert torch.equal(second.global_params(0), whole.global_params(0))
    for m in (0, 1):
        assert weights(first).get(m, []) + weights(second)[m] == weights(whole)[m]
