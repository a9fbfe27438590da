"""The outer loop: global against local parameters, and shared memory of the loops of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from diloco.algorithm import AlphaMerge, MergeRule, Nesterov, OuterLoop, RebaseMerge, partition


def loops(count: int) -> list[OuterLoop]:
    """Return outer loops of equal models with two fragments and nonzero momentum."""
    made = []
    for _ in range(count):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        loop = OuterLoop(model, partition(model, num_fragments=2, strategy="balanced"), Nesterov(learning_rate=0.5))
        for fragment in loop.fragments:
            loop.outer_step(fragment.index, torch.linspace(-1, 1, fragment.numel))
        made.append(loop)
    return made


def memory(*some: OuterLoop) -> int:
    """Return the number of distinct tensors of global parameters and outer state."""
    tensors = [t for loop in some for t in loop.global_params]
    tensors += [t for loop in some for state in loop.outer_states for t in state.slots.values()]
    return len({tensor.data_ptr() for tensor in tensors})


def test_loops_that_hold_the_same_hold_it_once_and_whoever_changes_it_copies() -> None:
    first, second, alone = loops(3)
    second.share(first)
    assert memory(first, second) == memory(alone) == 4
    for steps in range(1, 4):
        for changing in (second, first):
            changing.outer_step(0, torch.full((first.fragments[0].numel,), float(steps)))
            if changing is second:
                assert first.digest(0) == alone.digest(0) != second.digest(0), "the second loop has changed its state"
        alone.outer_step(0, torch.full((first.fragments[0].numel,), float(steps)))
        assert [each.digest(0) for each in (first, second)] == [alone.digest(0)] * 2
        second.share(first)
        assert memory(first, second) == 4


def test_what_differs_in_a_bit_is_held_twice() -> None:
    first, second = loops(2)
    first.global_params[0][0], second.global_params[0][0] = 0.0, -0.0
    second.outer_states[1].step += 1
    second.share(first)
    assert memory(first, second) == 8
    assert torch.signbit(second.global_params[0][0])


def test_a_loaded_state_is_no_other_loops() -> None:
    first, second, other = loops(3)
    second.share(first)
    before = first.digest(0)
    other.outer_step(0, torch.ones(other.fragments[0].numel))
    second.load_fragment_state(0, other.fragment_state(0))
    assert (first.digest(0), second.digest(0)) == (before, other.digest(0))
    assert memory(first, second) == 6


class Whole:
    """A rule without ``elementwise``, which gets all values at once and never a parameter itself."""

    def __init__(self, rule: MergeRule) -> None:
        self.rule, self.keeps_sent = rule, rule.keeps_sent
        self.sizes: list[int] = []

    def merge(self, local: Tensor, global_params: Tensor, sent: Tensor | None) -> None:
        self.sizes.append(local.numel())
        self.rule.merge(local, global_params, sent)


def merged(make: Callable[[nn.Module], object], rule: MergeRule) -> list[Tensor]:
    """Return the parameters of a model after a round of its single fragment, and after a carried-over move."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(700, 500), nn.Linear(5, 3))  # the first one is longer than one piece
    make(model)
    loop = OuterLoop(model, partition(model, num_fragments=1), Nesterov(learning_rate=0.5))
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for turn in range(2):
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=noise).to(parameter.dtype))
            if turn == 0:
                delta, sent, largest = loop.pseudo_gradient(0, keep_local=rule.keeps_sent)
                assert largest == delta.abs().max()
    loop.outer_step(0, delta)
    loop.merge(0, rule, sent)
    with loop.carrying_over(0):
        loop.outer_step(0, delta)
    return [parameter.detach().clone() for parameter in model.parameters()]


def transpose(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()


@pytest.mark.parametrize("rule", [RebaseMerge(), AlphaMerge(0.3)])
@pytest.mark.parametrize("other", [transpose, lambda model: model[1].bfloat16(), lambda model: model.bfloat16()])
def test_parameters_merge_to_the_same_bits_in_their_place_and_copied(
    rule: MergeRule, other: Callable[[nn.Module], object]
) -> None:
    for make in (lambda model: model, other):
        whole = Whole(rule)
        for one, expected in zip(merged(make, rule), merged(make, whole), strict=True):
            assert torch.equal(one.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
        assert whole.sizes == [700 * 500 + 500 + 5 * 3 + 3]
