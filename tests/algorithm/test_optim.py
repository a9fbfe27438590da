"""Outer optimizers against those of torch.optim, and merge rules."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diloco.algorithm import (
    AlphaMerge,
    Nesterov,
    OuterOptimizer,
    OuterState,
    RebaseMerge,
    Sgd,
    ValueSchedule,
)
from diloco.errors import ContractError
from diloco.testing import check_merge_rule, check_outer_optimizer
from tests.algorithm.codecs import PIECE

OPTIMIZERS: dict[str, tuple[OuterOptimizer, dict[str, Any]]] = {
    "sgd": (Sgd(learning_rate=0.5), {"lr": 0.5}),
    "nesterov": (Nesterov(learning_rate=0.4, momentum=0.9), {"lr": 0.4, "momentum": 0.9, "nesterov": True}),
}
"""Outer optimizers, each with the arguments of its twin, `torch.optim.SGD`."""


def run(outer: OuterOptimizer, start: Tensor, means: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    values = start.clone()
    state = outer.init(values)
    for mean in means:
        outer.update(mean, state, values)
    assert state.step == len(means)
    return values, state.slots


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ours_agree_with_torch_and_keep_the_contract(name: str) -> None:
    outer, arguments = OPTIMIZERS[name]
    check_outer_optimizer(outer)
    generator = torch.Generator().manual_seed(1)
    size = PIECE + 3  # a second, partial piece
    start, means = torch.randn(size, generator=generator), torch.randn(5, size, generator=generator)
    mine, _ = run(outer, start, means)
    theirs = start.clone().requires_grad_()
    twin = torch.optim.SGD([theirs], **arguments)
    for mean in means:
        theirs.grad = mean.clone()
        twin.step()
    torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6)


def test_schedules_are_functions_of_the_outer_step() -> None:
    rate = ValueSchedule(peak=1.0, kind="linear", total_steps=2)
    values, _ = run(Sgd(learning_rate=rate), torch.zeros(1), torch.ones(3, 1))
    assert values.item() == -1.5  # 1 + 0.5 + 0
    momentum = ValueSchedule(peak=1.0, warmup_steps=2)
    values, slots = run(Nesterov(learning_rate=1.0, momentum=momentum), torch.zeros(1), torch.ones(2, 1))
    # v = 1, theta = -(1 + 0.5); v = 1 * 1 + 1 = 2, theta = -1.5 - (1 + 1 * 2)
    assert (values.item(), slots["momentum"].item()) == (-4.5, 2.0)


EPSILON = 2.0**-23  # the relative spacing of float32, twice the error of one rounding
NUMBERS = st.floats(-1e4, 1e4, width=32)
three_vectors = st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1).map(lambda rows: [*torch.tensor(rows).T])


def near(values: Tensor, expected: Tensor, *terms: Tensor) -> bool:
    """Return whether values differ by no more than the rounding of the terms."""
    scale = torch.stack(terms).abs().sum(0).double()
    return bool(((values.double() - expected).abs() <= EPSILON * scale + 2.0**-148).all())  # or of subnormals


@given(three_vectors, st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
def test_alpha_is_the_papers_equation_and_exact_at_its_ends(three: list[Tensor], alpha: float) -> None:
    """Compare Algorithm 2, line 12, with float64."""
    local, global_params, _ = three
    merged = local.clone()
    AlphaMerge(alpha).merge(merged, global_params, None)
    assert near(merged, alpha * local.double() + (1 - alpha) * global_params.double(), local, global_params)
    if alpha in (0.0, 1.0):
        assert torch.equal(merged, local if alpha else global_params)


@given(three_vectors)
def test_rebase_keeps_the_drift_of_the_overlapped_steps(three: list[Tensor]) -> None:
    """Property: local - global after the merge equals local - sent before. Without drift, it takes the global bits."""
    local, global_params, sent = three
    merged, resting = local.clone(), sent.clone()
    RebaseMerge().merge(merged, global_params, sent)
    RebaseMerge().merge(resting, global_params, sent)
    assert near(merged, global_params.double() + (local.double() - sent.double()), local, global_params, sent)
    assert torch.equal(resting, global_params)


def test_our_merge_rules_keep_the_contract() -> None:
    check_merge_rule(AlphaMerge(0.5))
    check_merge_rule(RebaseMerge())
    check_merge_rule(AlphaMerge(1.0))


class Returns:
    """A merge rule that returns what it must write."""

    keeps_sent = False

    def merge(self, local: Tensor, global_params: Tensor, sent: Tensor | None) -> Tensor:
        return (local + global_params) / 2


def test_a_merge_rule_that_returns_its_result_is_refused() -> None:
    """Nobody would use it: the replicas would train apart, with every round committed."""
    with pytest.raises(ContractError, match="merge rule Returns: merge returned its result; it must update `local`"):
        check_merge_rule(Returns())  # type: ignore[arg-type]  # on purpose
    in_place = type("InPlace", (Returns,), {"merge": lambda self, local, new, sent: local.mul_(0.5).add_(new * 0.5)})
    check_merge_rule(in_place())


def test_an_outer_optimizer_that_keeps_the_mean_itself_is_refused() -> None:
    """Its memory belongs to the round."""

    class Keeps(Sgd):
        def init(self, values: Tensor) -> OuterState:
            return OuterState(slots={"last": torch.zeros_like(values)})

        def update(self, mean: Tensor, state: OuterState, values: Tensor) -> None:
            super().update(mean, state, values)
            state.slots["last"] = mean

    with pytest.raises(ContractError, match=r"after 1 updates a parameter or slot is .* in the memory of the mean"):
        check_outer_optimizer(Keeps())
