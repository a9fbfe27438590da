"""Samplers never overlap, add up to one larger batch, and resume where they stopped; held-out windows are spread."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.data import Assignment, Sampler, heldout_batches, permute
from diloco.errors import CheckpointError, DataError

LENGTH = 3


def tokens_for(windows: int, rest: int = 0, dtype: type[np.integer[Any]] = np.uint32) -> np.ndarray:
    """Tokens whose values are their positions, so that a sequence shows its window."""
    return np.arange(windows * LENGTH + 1 + rest, dtype=dtype)


def windows_of(batch: tuple[torch.Tensor, torch.Tensor]) -> list[int]:
    """Return the windows of a batch, after checking that they are complete."""
    inputs, targets = batch
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(LENGTH))
    assert torch.equal(targets, inputs + 1)
    assert (inputs[:, 0] % LENGTH == 0).all()
    return [int(first) // LENGTH for first in inputs[:, 0]]


def samplers(windows: int, replicas: int, batch_size: int, seed: int = 1) -> list[Sampler]:
    tokens = tokens_for(windows, rest=LENGTH - 1)
    return [
        Sampler(
            tokens,
            sequence_length=LENGTH,
            batch_size=batch_size,
            replica=replica,
            num_replicas=replicas,
            seed=seed,
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


@pytest.mark.parametrize("stop", [0, 1, 4, 5, 6, 11])
def test_resuming_equals_never_stopping(stop: int) -> None:
    """With 5 steps per epoch, the stops fall at its beginning, within it, at its last step, at its end and after it."""
    straight = samplers(32, 2, 3)[1]
    expected = [straight.next_batch() for _ in range(stop + 7)]

    before = samplers(32, 2, 3)[1]
    for _ in range(stop):
        before.next_batch()
    state = json.loads(json.dumps(before.state_dict()))
    after = samplers(32, 2, 3)[1]
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
        ({"num_replicas": 4}, r"num_replicas is 2 in the cursor and 4 here"),
        ({"tokens": tokens_for(40)[::-1].copy()}, r"data is '[0-9a-f]{16}' in the cursor and '[0-9a-f]{16}' here"),
    ],
)
def test_a_cursor_of_another_run_is_refused(change: dict[str, object], message: str) -> None:
    arguments = {"tokens": tokens_for(40), "sequence_length": LENGTH, "batch_size": 2, "num_replicas": 2, "seed": 1}
    state = Sampler(**arguments, replica=0).state_dict()  # type: ignore[arg-type]  # arguments are varied by name
    other = Sampler(**{**arguments, **change}, replica=0)  # type: ignore[arg-type]  # arguments are varied by name
    other.next_batch()
    unmoved = other.state_dict()
    with pytest.raises(CheckpointError, match=message):
        other.load_state_dict(state)
    assert other.state_dict() == unmoved


def sampler(replica: int, num_replicas: int | None, windows: int = 100, **more: str) -> Sampler:
    """Return a sampler with batches of 2 sequences."""
    arguments = {"sequence_length": LENGTH, "batch_size": 2, "seed": 1, **more}
    return Sampler(tokens_for(windows), replica=replica, num_replicas=num_replicas, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("stop", [1, 2, 3, 6, 8])
def test_resuming_between_changes_equals_never_stopping(stop: int) -> None:
    """An epoch is 5 batches; members change at steps 3 and 6, and the cursor contains that from step 1 on."""
    first = Assignment(0, (0, 1), 0)
    second = first.following(3, (1,), 2)
    runs = [sampler(1, 2, windows=11) for _ in range(2)]
    for step in range(10):
        if step == 1:
            for own in runs:
                own.assign(second)
                own.assign(second.following(6, (1, 3), 2))
        if step == stop:
            state = json.loads(json.dumps(runs[1].state_dict()))
            runs[1] = sampler(1, 2, windows=11)
            runs[1].load_state_dict(state)
            assert runs[1].state_dict() == state
        batches = [own.next_batch() for own in runs]
        assert torch.equal(batches[0][0], batches[1][0])
        assert torch.equal(batches[0][1], batches[1][1])


@settings(deadline=None)
@given(windows=st.integers(1, 40), batch_size=st.integers(1, 7), most=st.integers(0, 50))
def test_heldout_windows_are_distinct_spread_and_always_the_same(windows: int, batch_size: int, most: int) -> None:
    tokens = tokens_for(windows, rest=1)
    batches = [windows_of(batch) for batch in heldout_batches(tokens, LENGTH, batch_size, most)]
    assert batches == [windows_of(batch) for batch in heldout_batches(tokens, LENGTH, batch_size, most)]
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert 1 <= len(batches[-1]) <= batch_size
    chosen = [window for batch in batches for window in batch]
    count = min(most, windows) if most else windows
    assert len(chosen) == count
    gaps = np.diff([*chosen, windows])
    assert gaps.min() >= 1
    assert gaps.max() - gaps.min() <= 1


def test_all_heldout_windows_make_every_token_a_target_once() -> None:
    tokens = tokens_for(10)
    targets = [t for _, batch in heldout_batches(tokens, LENGTH, 4, 0) for t in batch.flatten().tolist()]
    assert targets == tokens[1:].tolist()


def test_too_few_heldout_tokens_are_refused_at_once() -> None:
    with pytest.raises(DataError, match=r"only 3 held-out tokens, but one sequence of 3 needs 4"):
        heldout_batches(tokens_for(1)[:-1], LENGTH, 1, 0)
