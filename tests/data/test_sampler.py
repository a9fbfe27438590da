"""Samplers never overlap and add up to one larger batch; held-out windows are spread."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.data import Assignment, Sampler, heldout_batches, permute
from diloco.errors import DataError
from tests.data.streams import lists

LENGTH = 3


def tokens_for(windows: int, rest: int = 0) -> np.ndarray:
    """Tokens whose values are their positions, so that a sequence shows its window."""
    return np.arange(windows * LENGTH + 1 + rest, dtype=np.uint32)


def windows_of(batch: tuple[torch.Tensor, torch.Tensor]) -> list[int]:
    """Return the windows of a batch, after checking that they are complete."""
    inputs, targets = batch
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(LENGTH))
    assert torch.equal(targets, inputs + 1)
    assert (inputs[:, 0] % LENGTH == 0).all()
    return [int(first) // LENGTH for first in inputs[:, 0]]


def samplers(tokens: Any, replicas: int, batch_size: int, seed: int = 1) -> list[Sampler]:
    shape = {"sequence_length": LENGTH, "batch_size": batch_size, "num_replicas": replicas, "seed": seed}
    return [Sampler(tokens, replica=replica, **shape) for replica in range(replicas)]


SHAPES = st.tuples(st.integers(1, 60), st.integers(1, 5), st.integers(1, 4)).filter(lambda s: s[0] >= s[1] * s[2])


@settings(max_examples=30)
@given(shape=SHAPES, seed=st.integers(0, 2**64))
def test_replicas_share_out_one_shuffle_after_the_other(shape: tuple[int, int, int], seed: int) -> None:
    """Replica m's batch at step k is number k * M + m of all epochs. So an epoch has each window once, except for
    less than a batch, and all replicas together see what one with a larger batch sees."""
    windows, replicas, batch_size = shape
    batches_per_epoch = windows // batch_size
    members = samplers(tokens_for(windows, rest=LENGTH - 1), replicas, batch_size, seed)
    steps = 2 * batches_per_epoch // replicas + 1
    drawn = [windows_of(sampler.next_batch()) for _ in range(steps) for sampler in members]
    for epoch, first in enumerate(range(0, len(drawn), batches_per_epoch)):
        order = permute(np.arange(windows), windows, f"seed {seed}, epoch {epoch}").tolist()
        for place, batch in enumerate(drawn[first : first + batches_per_epoch]):
            assert batch == order[place * batch_size : (place + 1) * batch_size]


@pytest.mark.parametrize("stop", [1, 2, 3, 6, 8])
def test_resuming_between_changes_equals_never_stopping(stop: int) -> None:
    """An epoch is 5 batches; members change at steps 3 and 6, and the cursor contains that from step 1 on."""
    second = Assignment(0, (0, 1), 0).following(3, (1,), 2)
    runs = [samplers(tokens_for(11), 2, 2)[1] for _ in range(2)]
    for step in range(10):
        for sampler in runs if step == 1 else ():
            sampler.assign(second)
            sampler.assign(second.following(6, (1, 3), 2))
        if step == stop:
            state = json.loads(json.dumps(runs[1].state_dict()))
            runs[1] = samplers(tokens_for(11), 2, 2)[1]
            runs[1].load_state_dict(state)
            assert runs[1].state_dict() == state
        assert lists(runs[0].next_batch()) == lists(runs[1].next_batch())


@settings(deadline=None)
@given(windows=st.integers(1, 40), batch_size=st.integers(1, 7), most=st.integers(0, 50))
def test_heldout_windows_are_distinct_spread_and_always_the_same(windows: int, batch_size: int, most: int) -> None:
    tokens = tokens_for(windows, rest=1)
    batches = [windows_of(batch) for batch in heldout_batches(tokens, LENGTH, batch_size, most)]
    assert batches == [windows_of(batch) for batch in heldout_batches(tokens, LENGTH, batch_size, most)]
    assert all(len(batch) == batch_size for batch in batches[:-1])
    chosen = [window for batch in batches for window in batch]
    assert len(chosen) == (min(most, windows) if most else windows)
    gaps = np.diff([*chosen, windows])
    assert gaps.min() >= 1
    assert gaps.max() - gaps.min() <= 1
    with pytest.raises(DataError, match=r"only 3 held-out tokens, but one sequence of 3 needs 4"):  # at once
        heldout_batches(tokens[:3], LENGTH, batch_size, most)
