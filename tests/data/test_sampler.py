"""Samplers never overlap, add up to one larger batch, and resume where they stopped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.data import Sampler, permute
from diloco.errors import CheckpointError
from tests.data.numbered_windows import LENGTH, tokens_for, windows_of


def samplers(windows: int, replicas: int, batch_size: int, sharding: Any = "shuffled", seed: int = 1) -> list[Sampler]:
    tokens = tokens_for(windows, rest=LENGTH - 1)
    return [
        Sampler(
            tokens,
            sequence_length=LENGTH,
            batch_size=batch_size,
            replica=replica,
            num_replicas=replicas,
            seed=seed,
            sharding=sharding,
        )
        for replica in range(replicas)
    ]


def draw(members: Sequence[Sampler], steps: int) -> list[list[int]]:
    """Return the windows of ``steps * len(members)`` batches, step by step, in the order of the replicas."""
    return [windows_of(sampler.next_batch()) for _ in range(steps) for sampler in members]


SHAPES = st.tuples(st.integers(1, 60), st.integers(1, 5), st.integers(1, 4)).filter(lambda s: s[0] >= s[1] * s[2])


@settings(max_examples=30)
@given(shape=SHAPES, seed=st.integers(0, 2**64))
def test_shuffled_replicas_share_out_one_shuffle_after_the_other(shape: tuple[int, int, int], seed: int) -> None:
    """Replica m's batch at step k is number k * M + m of all epochs. So an epoch has each window once, except for
    less than a batch, and all replicas together see what one with a larger batch sees."""
    windows, replicas, batch_size = shape
    batches_per_epoch = windows // batch_size
    steps = 2 * batches_per_epoch // replicas + 1
    drawn = draw(samplers(*shape, seed=seed), steps)
    for epoch, first in enumerate(range(0, len(drawn), batches_per_epoch)):
        order = permute(np.arange(windows), windows, f"seed {seed}, epoch {epoch}").tolist()
        for place, batch in enumerate(drawn[first : first + batches_per_epoch]):
            assert batch == order[place * batch_size : (place + 1) * batch_size]


@pytest.mark.parametrize("sharding", ["shuffled", "contiguous"])
@pytest.mark.parametrize("stop", [0, 1, 4, 5, 6, 11])
def test_resuming_equals_never_stopping(stop: int, sharding: Any) -> None:
    """With 5 steps per epoch, the stops fall at its beginning, within it, at its last step, at its end and after it."""
    straight = samplers(32, 2, 3, sharding)[1]
    expected = [straight.next_batch() for _ in range(stop + 7)]

    before = samplers(32, 2, 3, sharding)[1]
    for _ in range(stop):
        before.next_batch()
    state = json.loads(json.dumps(before.state_dict()))
    after = samplers(32, 2, 3, sharding)[1]
    after.next_batch()  # its earlier position must not matter
    after.load_state_dict(state)
    assert int(after.epochs[""]) == stop // 5
    for inputs, targets in expected[stop:]:
        found = after.next_batch()
        assert torch.equal(found[0], inputs)
        assert torch.equal(found[1], targets)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 2}, r"seed is 1 in the cursor and 2 here"),
        ({"batch_size": 3}, r"batch_size is 2 in the cursor and 3 here"),
        ({"num_replicas": 4}, r"num_replicas is 2 in the cursor and 4 here"),
        ({"sharding": "contiguous"}, r"sharding is 'shuffled' in the cursor and 'contiguous' here"),
        ({"tokens": tokens_for(40)[::-1].copy()}, r"data is '[0-9a-f]{16}' in the cursor and '[0-9a-f]{16}' here"),
    ],
)
def test_a_cursor_of_another_run_is_refused(change: dict[str, object], message: str) -> None:
    arguments = {"tokens": tokens_for(40), "sequence_length": LENGTH, "batch_size": 2, "num_replicas": 2, "seed": 1}
    state = Sampler(**arguments, replica=0).state_dict()  # type: ignore[arg-type]  # arguments are varied by name
    other = Sampler(**{**arguments, **change}, replica=0)  # type: ignore[arg-type]  # arguments are varied by name
    if other.state_dict()["num_replicas"] is not None:
        other.next_batch()
    unmoved = other.state_dict()
    with pytest.raises(CheckpointError, match=message):
        other.load_state_dict(state)
    assert other.state_dict() == unmoved


def test_seeds_and_epochs_shuffle_differently() -> None:
    epochs = {}
    for seed in (0, 1):
        (sampler,) = samplers(200, 1, 10, seed=seed)
        for epoch in range(2):
            epochs[seed, epoch] = tuple(window for batch in draw([sampler], 20) for window in batch)
    assert len(set(epochs.values())) == 4
    assert {tuple(sorted(order)) for order in epochs.values()} == {tuple(range(200))}
