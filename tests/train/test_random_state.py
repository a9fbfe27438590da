"""Replicas that take turns in one process draw only their own random numbers, and the process keeps its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from diloco.train import RandomState


def draw() -> tuple[Any, ...]:
    """Draw an odd number of normal numbers, so that one is left in the generator's cache."""
    return torch.rand(3).tolist(), torch.randn(1).item(), torch.nn.functional.dropout(torch.ones(8)).tolist()


def drawn(state: RandomState, times: int = 1) -> list[tuple[Any, ...]]:
    result = []
    for _ in range(times):
        with state.active():
            result.append(draw())
    return result


@pytest.fixture(autouse=True)
def _own_generators() -> Iterator[None]:
    """Restore the generators of the process after each test, as these tests draw from them."""
    with RandomState(99, 99).active():
        yield


def test_replicas_in_turns_draw_what_each_would_draw_alone() -> None:
    alone = [drawn(RandomState(3, replica), times=3) for replica in range(3)]
    together = [RandomState(3, replica) for replica in range(3)]
    in_turns: list[list[tuple[Any, ...]]] = [[], [], []]
    for _ in range(3):
        for replica, state in enumerate(together):
            in_turns[replica] += drawn(state)
            draw()  # the process keeps drawing too
    assert in_turns == alone


@pytest.mark.parametrize("draws", [0, 1, 2])
@pytest.mark.parametrize("gpus", [0, 1])
def test_a_saved_state_goes_on_where_it_was(draws: int, gpus: int) -> None:
    """Also without the GPU of the machine on which it was saved."""
    state, other = RandomState(0, 0), RandomState(5, 5)
    drawn(state, draws)
    saved = state.state_dict()
    saved["torch"] += [torch.zeros(16, dtype=torch.uint8)] * gpus
    expected = drawn(state, times=3)  # the saved state does not change with it
    other.load_state_dict(saved)
    assert drawn(other, times=3) == expected
