"""Outer loops of one process that hold what they agree on once."""

from __future__ import annotations

import torch
from torch import nn

from diloco.algorithm.fragments import partition
from diloco.algorithm.outer_loop import OuterLoop
from diloco.algorithm.outer_optimizer import Nesterov


def loops(count: int) -> list[OuterLoop]:
    """Of equal models, with two fragments and momentum that is not zero."""
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
    """Distinct tensors of global parameters and outer state."""
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
                assert first.digest(0) == alone.digest(0) != second.digest(0), "the other's was changed"
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
