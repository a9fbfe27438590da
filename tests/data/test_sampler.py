"""Samplers never overlap, add up to one larger batch, and resume where they stopped."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.data import Sampler, Sharding, heldout_batches, permute
from diloco.errors import CheckpointError, ConfigurationError, DataError
from tests.data.numbered_windows import LENGTH, tokens_for, windows_of


def samplers(
    windows: int, replicas: int, batch_size: int, sharding: Sharding = "shuffled", seed: int = 1
) -> list[Sampler]:
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


@settings(deadline=None)
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


@settings(deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 2**64))
def test_contiguous_replicas_stay_in_their_stretches_and_leave_less_than_a_batch_each(
    shape: tuple[int, int, int], seed: int
) -> None:
    windows, replicas, batch_size = shape
    steps = windows // replicas // batch_size
    for replica, sampler in enumerate(samplers(*shape, "contiguous", seed)):
        begin, end = replica * windows // replicas, (replica + 1) * windows // replicas
        for epoch in range(2):
            assert int(sampler.epochs[""]) == epoch
            shard = [window for batch in draw([sampler], steps) for window in batch]
            assert len(set(shard)) == len(shard)
            assert set(shard) <= set(range(begin, end))
            # slices may differ by one window, which is then left out as well
            assert end - begin - len(shard) <= batch_size


@pytest.mark.parametrize("sharding", ["shuffled", "contiguous"])
@pytest.mark.parametrize("stop", [0, 1, 4, 5, 6, 11])
def test_resuming_equals_never_stopping(stop: int, sharding: Sharding) -> None:
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


def test_a_cursor_fits_every_replica_of_the_run() -> None:
    first, second = samplers(30, 2, 2)
    first.next_batch()
    second.next_batch()
    assert first.state_dict() == second.state_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 2}, r"seed is 1 in the cursor and 2 here"),
        ({"sequence_length": 4}, r"sequence_length is 3 in the cursor and 4 here"),
        ({"batch_size": 3}, r"batch_size is 2 in the cursor and 3 here"),
        ({"num_replicas": 4}, r"num_replicas is 2 in the cursor and 4 here"),
        ({"num_replicas": None}, r"num_replicas is 2 in the cursor and None here"),
        ({"sharding": "contiguous"}, r"sharding is 'shuffled' in the cursor and 'contiguous' here"),
        ({"tokens": tokens_for(40)[::-1].copy()}, r"data is '[0-9a-f]{16}' in the cursor and '[0-9a-f]{16}' here"),
        ({"tokens": tokens_for(41)}, r"tokens is 121 in the cursor and 124 here"),
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


@pytest.mark.parametrize("drawn", [-1, 1.5, "3", True])
def test_a_cursor_that_counts_no_batches_is_refused(drawn: object) -> None:
    (sampler,) = samplers(4, 1, 1)
    with pytest.raises(CheckpointError, match=r"an integer of at least 0, got"):
        sampler.load_state_dict({**sampler.state_dict(), "drawn": drawn})


def test_a_malformed_cursor_is_refused() -> None:
    (sampler,) = samplers(4, 1, 1)
    state = sampler.state_dict()
    for wrong in ({}, {**state, "more": 1}, {name: value for name, value in state.items() if name != "seed"}):
        with pytest.raises(CheckpointError, match=r"It was not loaded"):
            sampler.load_state_dict(wrong)


@pytest.mark.parametrize("sharding", ["shuffled", "contiguous"])
def test_too_few_tokens_say_how_many_would_do(sharding: Sharding) -> None:
    arguments: dict[str, int] = {"sequence_length": LENGTH, "batch_size": 3, "replica": 1, "num_replicas": 4, "seed": 0}
    enough = tokens_for(12)
    with pytest.raises(DataError, match=r"36 training tokens make 11 sequences of 3, .*needs 12, that is 37 tokens"):
        Sampler(enough[:-1], **arguments, sharding=sharding)
    sampler = Sampler(enough, **arguments, sharding=sharding)
    assert len(windows_of(sampler.next_batch())) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"replica": 2}, r"replica must be from 0 to 1, got 2"),
        ({"replica": -1}, r"replica must be from 0 to 1, got -1"),
        ({"batch_size": 0}, r"batch_size must be at least 1, got 0"),
        ({"sequence_length": 0}, r"sequence_length must be at least 1, got 0"),
        ({"num_replicas": 0}, r"num_replicas must be at least 1, got 0"),
        ({"num_replicas": None, "replica": -1}, r"replica must be at least 0, got -1"),
        ({"num_replicas": None, "sharding": "contiguous"}, r"'contiguous' needs a fixed number of replicas"),
        ({"sharding": "shufled"}, r"did you mean 'shuffled'\?"),
    ],
)
def test_arguments_out_of_range_are_refused(change: dict[str, object], message: str) -> None:
    arguments = {"sequence_length": LENGTH, "batch_size": 1, "replica": 0, "num_replicas": 2, "seed": 0, **change}
    with pytest.raises(ConfigurationError, match=message):
        Sampler(tokens_for(9), **arguments)  # type: ignore[arg-type]  # arguments are varied by name


def test_batches_are_int64_and_contiguous_from_any_integer_type() -> None:
    for dtype in (np.uint16, np.uint32, np.int64):
        tokens = tokens_for(4, dtype=dtype)
        sampler = Sampler(tokens, sequence_length=LENGTH, batch_size=2, replica=0, num_replicas=1, seed=0)
        for batch in (sampler.next_batch(), next(heldout_batches(tokens, LENGTH, 2, 0))):
            for part in batch:
                assert (part.dtype, part.shape) == (torch.int64, (2, LENGTH))
                assert part.is_contiguous()


def test_seeds_and_epochs_shuffle_differently() -> None:
    epochs = {}
    for seed in (0, 1):
        (sampler,) = samplers(200, 1, 10, seed=seed)
        for epoch in range(2):
            epochs[seed, epoch] = tuple(window for batch in draw([sampler], 20) for window in batch)
    assert len(set(epochs.values())) == 4
    assert {tuple(sorted(order)) for order in epochs.values()} == {tuple(range(200))}
