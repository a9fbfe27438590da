"""Weights by trained steps, in training replicas: the weight of each contribution, and the resulting mean."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.algorithm import LEAST_WEIGHT, Nesterov, RebaseMerge, RoundId, SyncSchedule, partition
from diloco.errors import CheckpointError, ConfigurationError
from diloco.events import RoundCommitted, RoundSent
from diloco.outer import DiLoCo
from diloco.train import InnerLoop
from diloco.transport import Fault, InProcessTransport
from tests.replicas import Gradient, Swarm, Vectors, quadratic
from tests.runs import Listener, train, write_text

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


def test_undisturbed_replicas_weigh_exactly_their_base_weight() -> None:
    schedule = SyncSchedule(inner_steps=7, num_fragments=3, overlap_steps=3)
    swarm = Swarm(2, schedule, weights=[1.0, 0.3], **_fragments())
    swarm.run(40, quadratic())
    assert {m: set(each) for m, each in weights(swarm).items()} == {0: {1.0}, 1: {0.3}}


def test_the_mean_is_that_of_the_naive_formula() -> None:
    """With an outer SGD(lr=1) and AlphaMerge(0), the global parameters move by the weighted mean of all work."""
    swarm = Swarm(3, SCHEDULE)
    run(swarm, 3, {1: {0, 1}})
    start = swarm.global_params(0)
    gradient = quadratic()
    moved: list[Tensor] = []
    for m, (model, inner) in enumerate(zip(swarm.models, swarm.inner, strict=True)):
        gradient(m, 3, model)
        inner.step()
        moved.append(start - swarm.local(m))
    for diloco in swarm.replicas:
        diloco.begin()
    for diloco in swarm.replicas:
        diloco.finish()
    steps = [4, 2, 4]
    mean = sum(n * each for n, each in zip(steps, moved, strict=True)) / sum(steps)
    torch.testing.assert_close(swarm.global_params(0), start - mean)


def test_the_work_of_a_void_round_is_in_the_next_weight() -> None:
    faults = [Fault(kind="drop", replica=0, round=RoundId(0, outer_step)) for outer_step in (1, 2)]
    swarm = Swarm(2, SCHEDULE, transport=InProcessTransport(2, faults=faults))
    run(swarm, 20, {1: {10}})
    assert weights(swarm) == {0: [1.0, 1.0, 2.0, 3.0, 1.0], 1: [1.0, 1.0, 1.75, 2.75, 1.0]}


def test_what_is_done_while_a_void_round_is_on_its_way_counts_once() -> None:
    schedule = SyncSchedule(inner_steps=4, overlap_steps=3)
    fault = Fault(kind="drop", replica=0, round=RoundId(0, 0))
    transport = InProcessTransport(2, faults=[fault])
    swarm = Swarm(2, schedule, transport=transport, merge=RebaseMerge())
    swarm.run(13, quadratic())
    assert weights(swarm)[0] == [1.0, 2.0, 1.0]


def test_who_trained_nothing_is_lost_in_rounding_and_no_round_is_void() -> None:
    swarm = Swarm(3, SCHEDULE)
    run(swarm, 3, {2: {0, 1, 2, 3}})
    run(swarm, 1, {2: {3}})
    assert weights(swarm)[2] == [LEAST_WEIGHT]
    assert [event.contributors for event in swarm.events if isinstance(event, RoundCommitted)] == [(0, 1, 2)] * 3
    two = Swarm(2, SCHEDULE)
    two.run(4, quadratic())
    assert torch.equal(swarm.global_params(2), two.global_params(0))


def test_a_round_in_which_nobody_trained_moves_nothing() -> None:
    swarm = Swarm(2, SCHEDULE)
    before = swarm.global_params(0)
    run(swarm, 4, {0: set(range(4)), 1: set(range(4))})
    assert torch.equal(swarm.global_params(0), before)
    assert swarm.replicas[0].rounds_committed == 1


def test_who_takes_over_the_others_state_begins_to_count_anew() -> None:
    swarm = Swarm(2, SCHEDULE)
    run(swarm, 3, {})
    swarm.replicas[1].take_over([0])
    run(swarm, 1, {})
    assert weights(swarm)[1] == [0.25]


def test_who_keeps_its_work_goes_on_counting() -> None:
    swarm = Swarm(2, SCHEDULE)
    run(swarm, 3, {1: {2}})
    swarm.replicas[1].take_over([0], keep_work=True)
    run(swarm, 1, {})
    assert weights(swarm)[1] == [0.75]


def test_converges_to_the_mean_of_the_targets_by_the_steps_trained() -> None:
    """Two replicas have different targets, and one trains only every fourth step. With small steps, the global
    parameters converge to the mean of the targets, weighted by the work of each replica times its weight."""
    targets = [1.0, -1.0]

    def gradient(replica: int, step: int, model: Any) -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.detach() - targets[replica]

    def make_inner(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=4e-3)

    swarm = Swarm(2, SCHEDULE, make_inner=make_inner, outer=Nesterov(learning_rate=2.0, momentum=0.9))
    run(swarm, 600, {1: {step for step in range(600) if step % 4}}, gradient)
    # a window moves replica m by about n_m lr (target - x), with weight n_m: it is balanced if sum n^2 (target - x) = 0
    expected = (16 * 1.0 + 1 * -1.0) / 17
    torch.testing.assert_close(swarm.global_params(0), torch.full((15,), expected), atol=0.02, rtol=0)


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
    transport = InProcessTransport(2, faults=faults, min_contributors=2 if needs_all else 1)
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
        return Swarm(2, schedule, transport=InProcessTransport(2, faults=faults), merge=RebaseMerge())

    whole, first, second = make(), make(), make()
    run(whole, 20, idle)
    run(first, stop_at, idle)
    second.resume_from(first)
    run(second, 20 - stop_at, idle)
    assert torch.equal(second.global_params(0), whole.global_params(0))
    for m in (0, 1):
        assert weights(first).get(m, []) + weights(second)[m] == weights(whole)[m]


def test_a_checkpoint_that_does_not_say_what_was_trained_is_refused() -> None:
    swarm = Swarm(1, SCHEDULE)
    state = swarm.replicas[0].state_dict()
    del state["trained_steps"]
    with pytest.raises(CheckpointError, match="trained steps of the saved state must be two lists"):
        swarm.replicas[0].load_state_dict(state)


def test_a_weight_that_can_be_none_is_refused_at_once() -> None:
    model = Vectors()
    with pytest.raises(ConfigurationError, match=r"weight must be .* got 0\.0"):
        DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), weight=0.0)


def test_a_step_that_the_gradient_scaler_skipped_was_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run, this is the third step of the second replica."""
    unscale, calls = InnerLoop.unscale, itertools.count()

    def spoilt(loop: InnerLoop) -> None:
        if next(calls) == 5:
            parameter = next(loop.model.parameters())
            assert parameter.grad is not None
            parameter.grad.fill_(float("inf"))
        unscale(loop)

    monkeypatch.setattr(InnerLoop, "unscale", spoilt)
    listener = Listener()
    arguments = "--algorithm diloco --fragments 1 --overlap-steps 0 --precision float16 --steps 8"
    train(write_text(tmp_path), tmp_path / "run", arguments, sink=listener)
    sent = [(event.replica, event.outer_step, event.weight) for event in listener.of(RoundSent)]
    assert sent == [(0, 0, 1.0), (1, 0, 0.75), (0, 1, 1.0), (1, 1, 1.0)]


def _fragments() -> dict[str, Any]:
    return {"fragments": partition(Vectors(), num_fragments=3, strategy="balanced")}
