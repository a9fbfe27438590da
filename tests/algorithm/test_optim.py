"""Outer optimizers against those of torch.optim, and the digest of what they agree on."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diloco.algorithm import Nesterov, OuterOptimizer, OuterState, Sgd, ValueSchedule, digest_state, digest_tensors
from diloco.testing import check_outer_optimizer
from tests.algorithm.codecs import PIECE

OPTIMIZERS = {"sgd": Sgd(learning_rate=0.5), "nesterov": Nesterov(learning_rate=0.4, momentum=0.9)}


def torch_twin(name: str, values: Tensor) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD([values], lr=0.5)
    return torch.optim.SGD([values], lr=0.4, momentum=0.9, nesterov=True)


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


def test_schedules_are_functions_of_the_outer_step() -> None:
    rate = ValueSchedule(peak=1.0, kind="linear", total_steps=2)
    values, _ = run(Sgd(learning_rate=rate), torch.zeros(1), torch.ones(3, 1))
    assert values.item() == -1.5  # 1 + 0.5 + 0
    momentum = ValueSchedule(peak=1.0, warmup_steps=2)
    values, slots = run(Nesterov(learning_rate=1.0, momentum=momentum), torch.zeros(1), torch.ones(2, 1))
    # v = 1, theta = -(1 + 0.5); v = 1 * 1 + 1 = 2, theta = -1.5 - (1 + 1 * 2)
    assert (values.item(), slots["momentum"].item()) == (-4.5, 2.0)


SIZE = 67


def flipped(values: Tensor, index: int, bit: int) -> Tensor:
    copy = values.clone()
    copy.view(torch.int32)[index] ^= -(1 << 31) if bit == 31 else 1 << bit
    return copy


@given(index=st.integers(0, SIZE - 1), bit=st.integers(0, 31))
def test_any_one_bit_of_parameters_or_momentum_changes_it(index: int, bit: int) -> None:
    """Property: this includes the sign of a zero and the payload of a NaN."""
    params, momentum = torch.zeros(SIZE), torch.full((SIZE,), float("nan"))
    digest = digest_state(params, OuterState(3, {"momentum": momentum}))
    assert digest_state(flipped(params, index, bit), OuterState(3, {"momentum": momentum})) != digest
    assert digest_state(params, OuterState(3, {"momentum": flipped(momentum, index, bit)})) != digest
    assert digest_state(params.clone(), OuterState(3, {"momentum": momentum.clone()})) == digest


def test_the_outer_step_the_slots_and_their_names_are_in_it() -> None:
    params, one, two = torch.ones(4), torch.zeros(4), torch.full((4,), 2.0)
    states = [
        *(OuterState(step) for step in (1, 2, 12)),
        OuterState(1, {"mean": one, "square": two}),
        OuterState(1, {"mean": two, "square": one}),
        OuterState(1, {"first": one, "square": two}),
        OuterState(1, {"mean": one}),
    ]
    assert len({digest_state(params, state) for state in states}) == len(states)


def test_layout_in_memory_does_not_count() -> None:
    values = torch.arange(24, dtype=torch.float32)
    table = values.view(4, 6)
    same = {
        digest_tensors({"x": values}),
        digest_tensors({"x": table}),
        digest_tensors({"x": table.t().contiguous().t()}),  # the same values, columns first
        digest_tensors({"x": torch.stack([values, -values], dim=1)[:, 0]}),  # every other value
        digest_tensors({"x": torch.cat([torch.zeros(1), values])[1:]}),  # at an offset in its memory
        digest_tensors({"x": values.clone().requires_grad_()}),
    }
    assert len(same) == 1
    assert digest_tensors({"x": table.t()}) not in same


def test_it_is_the_same_on_every_machine() -> None:
    """XXH3-128 over name, a zero byte and little-endian bytes. A change here makes old and new replicas diverge."""
    assert digest_tensors({"x": torch.tensor([1.0, -2.0])}) == "8a8afd0bcf978a344cf2b1830dd52557"
