"""Weights by trained steps, in training replicas: the weight of each contribution, and the resulting mean."""

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.algorithm import LEAST_WEIGHT, RoundId, SyncSchedule
from diloco.events import RoundSent
from tests.faults import Fault, FaultyTransport
from tests.replicas import Swarm, quadratic

SCHEDULE = SyncSchedule(inner_steps=4)


def weights(swarm: Swarm) -> dict[int, list[float]]:
    """Return the weights of the contributions by replica, in the order in which they were sent."""
    sent = defaultdict(list)
    for event in swarm.events:
        if isinstance(event, RoundSent):
            sent[event.replica].append(event.weight)
    return dict(sent)


def run(swarm: Swarm, steps: int, idle: dict[int, set[int]]) -> None:
    """Run steps of all replicas. A replica does not train its ``idle`` steps (replica -> steps, counted from 0)."""
    gradient = quadratic()
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
