"""Replicas that take turns in one process draw only their own random numbers, and the process keeps its own."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from diloco.errors import CheckpointError
from diloco.state_tree import flatten, unflatten
from diloco.train import RandomState


def draw() -> tuple[Any, ...]:
    """Draw from every generator, with an odd number of normal numbers, so that one is left in its cache."""
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.random()),
        float(np.random.standard_normal()),
        torch.rand(3).tolist(),
        torch.randn(1).item(),
        torch.nn.functional.dropout(torch.ones(8)).tolist(),
    )


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


def through_text(state: RandomState) -> dict[str, Any]:
    skeleton, tensors = flatten(state.state_dict())
    loaded: dict[str, Any] = unflatten(json.loads(json.dumps(skeleton, allow_nan=False)), tensors)
    return loaded


@pytest.mark.parametrize("draws", [0, 1, 2])
def test_a_saved_state_goes_on_where_it_was(draws: int) -> None:
    state, other = RandomState(0, 0), RandomState(5, 5)
    drawn(state, draws)
    saved = through_text(state)
    expected = drawn(state, times=3)  # the saved state does not change with it
    other.load_state_dict(saved)
    assert drawn(other, times=3) == expected


def damaged(path: str, value: Any) -> dict[str, Any]:
    state = RandomState(0, 0).state_dict()
    *parents, last = path.split(".")
    place = state
    for name in parents:
        place = place[name]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    return state


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("torch", KeyError),
        ("numpy.position", KeyError),
        ("python.words", torch.full((625,), -1)),
        ("numpy.words", torch.zeros(623, dtype=torch.int64)),
        ("numpy.position", 625),
        ("torch", torch.zeros(5055, dtype=torch.uint8)),
        ("cuda", [b""]),
        ("cuda_seed", -1),
    ],
)
def test_a_malformed_state_is_refused_and_changes_nothing(path: str, value: Any) -> None:
    state = RandomState(1, 1)
    with pytest.raises(CheckpointError, match=r"random state is malformed: .* Nothing was loaded"):
        state.load_state_dict(damaged(path, value))
    assert drawn(state) == drawn(RandomState(1, 1))
