"""Inner steps in float16: which are skipped and how the scale changes, alone and with other replicas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from diloco.algorithm import SyncSchedule
from diloco.outer import DiLoCo
from diloco.train import OptimizerSettings, inner_learning_rate
from diloco.transport import InProcessTransport
from tests.train.inner_loops import batch, make_loop, optimizer_state, spoil, train, weights


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("seen_by_scaler", [True, False])
@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
def test_an_infinite_gradient_skips_the_step_and_lowers_the_scale(
    value: float, seen_by_scaler: bool, name: str
) -> None:
    """This holds with and without a fused kernel, and for infinities that arise after the gradients are unscaled."""
    loop = make_loop("float16", name=name, arguments={})
    train(loop, 2)
    held, state = weights(loop.model), optimizer_state(loop)
    scale = loop.scaler.get_scale()
    loop.accumulate_gradients(*batch(2))
    if seen_by_scaler:
        spoil(loop.model, value)
    loop.unscale()
    spoil(loop.model, value)
    result = loop.apply(2)
    assert result.skipped
    assert not math.isfinite(result.gradient_norm)
    assert loop.scaler.get_scale() == scale / 2
    assert torch.equal(weights(loop.model), held)
    assert torch.equal(optimizer_state(loop), state)
    assert all(p.grad is None for p in loop.model.parameters())
    assert not any(math.isnan(loss) for loss in train(loop, 2, start=3))


def test_the_scale_goes_as_torchs_own_would() -> None:
    """Reference: GradScaler used as documented. It grows after three good steps; a bad step restarts the count."""
    bad = {2, 7, 8}
    mine, theirs = make_loop("float16"), torch.amp.GradScaler("cpu", growth_interval=3)
    mine.scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for step in range(14):
        mine.accumulate_gradients(*batch(step))
        torch.autograd.backward(theirs.scale(parameter.sum() * (math.inf if step in bad else 1.0)))
        if step in bad:
            spoil(mine.model, math.inf)
        mine.unscale()
        assert mine.apply(step).skipped is (step in bad)
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        assert mine.scaler.get_scale() == theirs.get_scale(), step
        assert mine.scaler.state_dict() == theirs.state_dict(), step


def test_a_mean_that_is_finite_is_applied_though_this_replicas_gradients_were_not() -> None:
    """The other replicas step with the mean; if this replica alone skipped, the replicas would diverge."""
    spoilt, sound = make_loop("float16"), make_loop("float16")
    for loop in (spoilt, sound):
        loop.accumulate_gradients(*batch(0))
    mean = [torch.full_like(p, 0.01) for p in sound.model.parameters()]
    spoil(spoilt.model, math.inf)
    for loop in (spoilt, sound):
        loop.unscale()
        for parameter, gradient in zip(loop.model.parameters(), mean, strict=True):
            parameter.grad = gradient.clone()
        assert not loop.apply(0).skipped
    assert torch.equal(weights(spoilt.model), weights(sound.model))
    assert spoilt.scaler.get_scale() == sound.scaler.get_scale() / 2


def test_with_diloco_around_it_a_skipped_step_desynchronises_nothing() -> None:
    """Steps, rounds and digests stay equal on all replicas, and the loss scale never affects contributions."""
    hub = InProcessTransport(2)
    loops = [make_loop("float16", rate=inner_learning_rate(OptimizerSettings(warmup_steps=4), 24)) for _ in range(2)]
    schedule = SyncSchedule(inner_steps=4, num_fragments=2, overlap_steps=1)
    swarm = [
        DiLoCo(loop.model, loop.optimizer, transport=hub.endpoint(m), schedule=schedule) for m, loop in enumerate(loops)
    ]
    scales = []
    for step in range(24):
        results = []
        for m, (loop, diloco) in enumerate(zip(loops, swarm, strict=True)):
            loop.accumulate_gradients(*batch(100 * m + step))
            if m == 1 and step in (3, 4, 9):  # before a send, in flight, and in between
                spoil(loop.model, math.inf)
            loop.unscale()
            results.append(loop.apply(step))
            diloco.begin()
        for diloco in swarm:
            diloco.finish()
        assert [result.skipped for result in results] == [False, step in (3, 4, 9)]
        assert results[0].learning_rate == results[1].learning_rate
        assert swarm[0].steps == swarm[1].steps == step + 1
        assert swarm[0].in_flight == swarm[1].in_flight
        for fragment in range(2):
            assert swarm[0].fragments[fragment].state.digest() == swarm[1].fragments[fragment].state.digest()
        scales.append(tuple(loop.scaler.get_scale() for loop in loops))
    assert [diloco.rounds_void for diloco in swarm] == [0, 0]
    assert swarm[0].rounds_committed == swarm[1].rounds_committed == sum(schedule.rounds_of(p, 23) for p in range(2))
    assert scales[-1] == (2.0**16, 2.0**13)
    largest = max(float(fragment.global_params.abs().max()) for fragment in swarm[0].fragments)
    assert largest < 10, "the outer optimizer never saw a scaled value"
