"""Batches of every kind: order, cursor, several replicas, and changes of the members."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.data import (
    Assignment,
    Batches,
    ByteTokenizer,
    DataSettings,
    DocumentStream,
    PackedTokens,
    Sampler,
    Source,
    heldout_batches,
    permute,
    survey,
)
from diloco.errors import CheckpointError, ConfigurationError, DataError
from tests.finetuning import write_records
from tests.runs import numbered

LENGTH, SIZE = 8, 2
"""Tokens per sequence, and sequences per batch."""

DOCUMENTS = numbered(60)
TOKENS = ByteTokenizer().encode_documents(DOCUMENTS)
KINDS = ("tokens", "pieces", "stream", "stream of files")

Make = Callable[..., list[Batches]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Return a function that makes the batches of every replica."""
    opened: list[Batches] = []
    files = {"stream": [2 * DOCUMENTS]}
    files["stream of files"] = [DOCUMENTS[:20], DOCUMENTS[20:33], DOCUMENTS[33:], numbered(40, prefix="other")]
    for kind, parts in files.items():
        for number, texts in enumerate(parts):
            write_records(tmp_path / f"{kind}-{number}.jsonl", [{"text": text} for text in texts])

    def of_replica(kind: str, **drawing: Any) -> Batches:
        drawing |= {"sequence_length": LENGTH, "batch_size": SIZE, "seed": 0}
        if kind not in files:
            return Sampler(PackedTokens(np.array_split(TOKENS, 5 if kind == "pieces" else 1)), **drawing)
        streamed = DataSettings(paths=(f"{tmp_path}/{kind}-*.jsonl",), streaming=True, heldout_fraction=0.2)
        source = Source(streamed)
        look = survey(source.documents(), streamed.heldout_fraction)
        return DocumentStream(source, look, ByteTokenizer(), data=kind, **drawing)

    def make(kind: str, replicas: int) -> list[Batches]:
        opened.extend(of_replica(kind, replica=each, num_replicas=replicas) for each in range(replicas))
        return opened[-replicas:]

    yield make
    for batches in opened:
        batches.close()


def lists(batch: Any) -> tuple[list[list[int]], list[list[int]]]:
    inputs, targets = batch
    return inputs.tolist(), targets.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_the_cursor_goes_on_anywhere_and_targets_are_the_next_tokens(kind: str, make: Make) -> None:
    """Across epochs and through JSON."""
    (_, whole), (_, again) = make(kind, 2), make(kind, 2)
    rng = random.Random(kind)
    for step in range(60):
        if rng.random() < 0.2:
            cursor = json.loads(json.dumps(again.state_dict()))
            again = make(kind, 2)[1]
            again.load_state_dict(cursor)
            assert again.state_dict() == cursor
        for batches in (whole, again) if step % 7 == 3 else ():
            batches.skip_batch()
        inputs, targets = batch = whole.next_batch()
        assert inputs.shape == targets.shape == (SIZE, LENGTH)
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.is_contiguous() and targets.is_contiguous()  # noqa: PT018  # one fact of both
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert lists(batch) == lists(again.next_batch())
        assert whole.state_dict() == again.state_dict()
        assert whole.epochs == again.epochs


@pytest.mark.parametrize("kind", KINDS)
def test_a_cursor_of_other_data_or_none_at_all_is_refused(kind: str, make: Make) -> None:
    (batches,), (another,) = make(kind, 1), make("tokens" if kind == "stream of files" else "stream of files", 1)
    good = batches.state_dict()
    for cursor in ({}, another.state_dict(), {**good, "sequence_length": 99}):
        with pytest.raises(CheckpointError, match="not loaded"):
            batches.load_state_dict(cursor)
    assert batches.state_dict() == good
    if isinstance(batches, DocumentStream):
        with pytest.raises(ConfigurationError, match="can't join a run that streams its data"):
            batches.assign(Assignment(3, (0,), 0))


def test_an_error_of_a_stream_comes_where_its_batch_would_and_costs_none(make: Make, tmp_path: Path) -> None:
    """A file is gone for a while."""
    (whole,), (gone,) = make("stream", 1), make("stream", 1)
    expected = [lists(whole.next_batch()) for _ in range(400)]  # more than an epoch
    drawn = [lists(gone.next_batch())]
    (tmp_path / "stream-0.jsonl").rename(tmp_path / "aside")
    for _ in range(2):
        with pytest.raises(DataError, match="No such file"):
            drawn.extend(lists(gone.next_batch()) for _ in range(400))
    assert 1 < len(drawn) == gone.state_dict()["drawn"] < 400
    (tmp_path / "aside").rename(tmp_path / "stream-0.jsonl")
    assert [*drawn, *(lists(gone.next_batch()) for _ in range(400 - len(drawn)))] == expected


def tokens_for(windows: int, rest: int = 0) -> PackedTokens:
    """Tokens whose values are their positions, so that a sequence of 3 shows its window."""
    return PackedTokens([np.arange(windows * 3 + 1 + rest, dtype=np.uint32)])


def windows_of(batch: tuple[torch.Tensor, torch.Tensor]) -> list[int]:
    """Return the windows of a batch, after checking that they are complete."""
    inputs, targets = batch
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(3))
    assert torch.equal(targets, inputs + 1)
    assert (inputs[:, 0] % 3 == 0).all()
    return [int(first) // 3 for first in inputs[:, 0]]


SHAPES = st.tuples(st.integers(1, 60), st.integers(1, 5), st.integers(1, 4)).filter(lambda s: s[0] >= s[1] * s[2])


@settings(max_examples=30)
@given(shape=SHAPES, seed=st.integers(0, 2**64))
def test_replicas_share_out_one_shuffle_after_the_other(shape: tuple[int, int, int], seed: int) -> None:
    """Replica m's batch at step k is number k * M + m of all epochs. So an epoch has each window once, except for
    less than a batch, and all replicas together see what one with a larger batch sees."""
    windows, replicas, batch_size = shape
    drawing: Any = {"sequence_length": 3, "batch_size": batch_size, "num_replicas": replicas, "seed": seed}
    members = [Sampler(tokens_for(windows, rest=2), replica=replica, **drawing) for replica in range(replicas)]
    per_epoch = windows // batch_size
    steps = 2 * per_epoch // replicas + 1
    drawn = [windows_of(sampler.next_batch()) for _ in range(steps) for sampler in members]
    for epoch, first in enumerate(range(0, len(drawn), per_epoch)):
        order = permute(np.arange(windows), windows, f"seed {seed}, epoch {epoch}").tolist()
        for place, batch in enumerate(drawn[first : first + per_epoch]):
            assert batch == order[place * batch_size : (place + 1) * batch_size]


def test_fewer_windows_than_a_batch_are_drawn_several_times(caplog: pytest.LogCaptureFixture) -> None:
    drawing: Any = {"sequence_length": 3, "batch_size": 4, "num_replicas": 2, "seed": 0}
    members = [Sampler(tokens_for(3), replica=replica, **drawing) for replica in range(2)]
    drawn = [windows_of(sampler.next_batch()) for sampler in members]
    assert sorted(Counter([*drawn[0], *drawn[1]]).values()) == [2, 3, 3]
    assert members[0].epochs == pytest.approx(3)
    assert "only 3 training sequences of 3 tokens, and a step of all replicas has 8" in caplog.text
    with pytest.raises(DataError, match="3 training tokens are fewer than one sequence of 3 needs, that is 4"):
        Sampler(PackedTokens([np.arange(3)]), replica=0, **drawing)


def test_assignments_hold_from_their_step_on_also_in_a_resumed_run() -> None:
    """An epoch is 5 batches; the members of an elastic run change at steps 3 and 9."""

    def begin(replicas: int | None = None) -> Sampler:
        drawing: Any = {"sequence_length": 3, "batch_size": 2, "replica": 0, "seed": 1}
        return Sampler(tokens_for(11), **drawing, num_replicas=replicas)

    whole, again = begin(), begin()
    with pytest.raises(ConfigurationError, match="no assignment for step 0"):
        whole.next_batch()
    first = Assignment(0, (0, 1), 0)
    second = first.following(3, (0,), 2)
    changes = {0: [first], 1: [second], 8: [second.following(9, (0, 4, 7), 2)]}
    for step in range(15):
        for batches in (whole, again):
            for assignment in changes.get(step, ()):
                batches.assign(assignment)
        state, again = json.loads(json.dumps(again.state_dict())), begin()
        again.load_state_dict(state)
        assert whole.state_dict() == again.state_dict() == state
        assert lists(whole.next_batch()) == lists(again.next_batch())
    again.join_at(20)
    with pytest.raises(ConfigurationError, match="can't draw by the assignment from step 3"):
        again.assign(second)
    again.assign(first.following(20, (0, 1), 2))
    fixed = begin(replicas=2)
    fixed.join_at(20)
    assert lists(again.next_batch()) == lists(fixed.next_batch())


@settings(deadline=None)
@given(windows=st.integers(1, 40), batch_size=st.integers(1, 7), most=st.integers(0, 50))
def test_heldout_windows_are_distinct_spread_and_always_the_same(windows: int, batch_size: int, most: int) -> None:
    batches, again = (
        [windows_of(batch) for batch in heldout_batches(tokens_for(windows, rest=1), 3, batch_size, most)]
        for _ in range(2)
    )
    assert batches == again
    assert all(len(batch) == batch_size for batch in batches[:-1])
    chosen = [window for batch in batches for window in batch]
    assert len(chosen) == (min(most, windows) if most else windows)
    gaps = np.diff([*chosen, windows])
    assert gaps.min() >= 1
    assert gaps.max() - gaps.min() <= 1
    for tokens in range(2):
        with pytest.raises(DataError, match="too little to hold some of it out"):  # at once
            heldout_batches(PackedTokens([np.arange(tokens)]), 3, batch_size, most)
    ((inputs, targets),) = heldout_batches(PackedTokens([np.arange(3)]), 3, batch_size, most)
    assert (inputs.tolist(), targets.tolist()) == ([[0, 1]], [[1, 2]]), "fewer tokens than a window are one"
