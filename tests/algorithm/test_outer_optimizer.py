"""Outer optimizers: the common contract, and ours against the reference of torch.optim."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from diloco.algorithm import Adam, Nesterov, OuterOptimizer, Sgd, ValueSchedule
from diloco.testing import check_outer_optimizer
from tests.algorithm.codecs import PIECE

OPTIMIZERS = {
    "sgd": Sgd(learning_rate=0.5),
    "nesterov": Nesterov(learning_rate=0.4, momentum=0.9),
    "adam": Adam(learning_rate=0.3, betas=(0.8, 0.9), epsilon=0.1),
}


def torch_twin(name: str, values: Tensor) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD([values], lr=0.5)
    if name == "nesterov":
        return torch.optim.SGD([values], lr=0.4, momentum=0.9, nesterov=True)
    return torch.optim.Adam([values], lr=0.3, betas=(0.8, 0.9), eps=0.1)


def run(outer: OuterOptimizer, start: Tensor, means: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    values = start.clone()
    state = outer.init(values)
    for mean in means:
        outer.update(mean, state, values)
    assert state.step == len(means)
    return values, state.slots


@pytest.fixture(params=sorted(OPTIMIZERS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_agrees_with_torch(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    size = PIECE + 3  # a second, partial piece
    start, means = torch.randn(size, generator=generator), torch.randn(5, size, generator=generator)
    mine, _ = run(OPTIMIZERS[name], start, means)
    theirs = start.clone().requires_grad_()
    twin = torch_twin(name, theirs)
    for mean in means:
        theirs.grad = mean.clone()
        twin.step()
    torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6)


def test_ours_keep_the_contract(name: str) -> None:
    check_outer_optimizer(OPTIMIZERS[name])


def test_is_element_wise(name: str) -> None:
    """Equal values get equal bits at every position, so a fragment's layout can't matter."""
    generator = torch.Generator().manual_seed(2)
    start, means = torch.randn(1001, generator=generator), torch.randn(4, 1001, generator=generator)
    whole, slots = run(OPTIMIZERS[name], start, means)
    part, part_slots = run(OPTIMIZERS[name], start[13:977], means[:, 13:977])
    assert torch.equal(whole[13:977], part)
    assert all(torch.equal(slots[key][13:977], part_slots[key]) for key in slots)


def test_converges_on_a_quadratic(name: str) -> None:
    target = torch.tensor([1.0, -2.0, 3.0])
    values = torch.zeros(3)
    outer, state = OPTIMIZERS[name], OPTIMIZERS[name].init(values)
    for _ in range(200):
        outer.update((values - target) * 0.2, state, values)
    torch.testing.assert_close(values, target, rtol=0, atol=1e-2)


def test_a_zero_mean_from_rest_moves_nothing(name: str) -> None:
    values, outer = torch.ones(4), OPTIMIZERS[name]
    outer.update(torch.zeros(4), outer.init(values), values)
    assert torch.equal(values, torch.ones(4))


def test_schedules_are_functions_of_the_outer_step() -> None:
    rate = ValueSchedule(peak=1.0, kind="linear", total_steps=2)
    values, _ = run(Sgd(learning_rate=rate), torch.zeros(1), torch.ones(3, 1))
    assert values.item() == -1.5  # 1 + 0.5 + 0
    momentum = ValueSchedule(peak=1.0, warmup_steps=2)
    values, slots = run(Nesterov(learning_rate=1.0, momentum=momentum), torch.zeros(1), torch.ones(2, 1))
    # v = 1, theta = -(1 + 0.5); v = 1 * 1 + 1 = 2, theta = -1.5 - (1 + 1 * 2)
    assert (values.item(), slots["momentum"].item()) == (-4.5, 2.0)


def test_adams_square_root_is_correctly_rounded() -> None:
    """Otherwise replicas on different processors would diverge in the last bit and their rounds would be void."""
    mean = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) + 0.1
    adam = Adam(learning_rate=1.0, betas=(0.0, 0.0), epsilon=1e-12)
    values, state = torch.zeros_like(mean), adam.init(mean)
    adam.update(mean, state, values)
    squares = mean.square().numpy()
    assert np.array_equal(-values.numpy(), mean.numpy() / (np.sqrt(squares) + np.float32(1e-12)))


@pytest.mark.parametrize("momentum", [0.0, 0.6, 0.9])
def test_the_first_step_is_lr_times_1_plus_mu_and_equal_means_reach_the_gain(momentum: float) -> None:
    outer, mean = (
        Nesterov(learning_rate=1.75 * (1 - momentum), momentum=momentum),
        torch.randn(100, dtype=torch.float32),
    )
    values, _ = run(outer, torch.zeros(100), mean[None])
    torch.testing.assert_close(-values, outer.learning_rate * (1 + momentum) * mean)
    values, _ = run(outer, torch.zeros(100), mean.expand(200, 100))
    later, _ = run(outer, torch.zeros(100), mean.expand(201, 100))
    torch.testing.assert_close(values - later, 1.75 * mean, rtol=1e-3, atol=1e-3)
