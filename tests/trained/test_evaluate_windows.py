"""Evaluation with overlapping windows and by document, compared with predicting one token at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.data import ByteTokenizer
from diloco.errors import ConfigurationError, DataError
from diloco.model import ModelSettings, Transformer
from diloco.trained import document_streams, evaluate, evaluate_windows, sliding_windows
from tests.model.decoders import build_lively

SETTINGS = ModelSettings(layers=1, width=8, ffn_width=8, heads=2, vocab_size=257, max_sequence_length=12)
TOKENIZER = ByteTokenizer()


@given(num_targets=st.integers(0, 60), length=st.integers(1, 20), data=st.data())
def test_every_target_counts_once_with_the_context_that_is_promised(
    num_targets: int, length: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, length))
    counted = []
    for begin, end, first in sliding_windows(num_targets, length, stride):
        assert 0 <= begin <= first < end <= num_targets
        assert end - begin == min(length, num_targets)
        assert first == 0 or first + 1 - begin > length - stride  # the number of inputs that the token sees
        counted += range(first, end)
    assert counted == list(range(num_targets))


def reference(model: Transformer, streams: list[np.ndarray], length: int, stride: int) -> tuple[float, int]:
    """Predict each target by its own forward pass over the inputs of its window."""
    nats, count = 0.0, 0
    for tokens in streams:
        for begin, end, first in sliding_windows(len(tokens) - 1, length, stride):
            for position in range(first, end):
                inputs = torch.tensor([tokens[begin : position + 1].tolist()])
                with torch.no_grad():
                    chances = model(inputs)[0, -1].double().log_softmax(0)
                nats -= float(chances[int(tokens[position + 1])])
                count += 1
    return nats, count


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4).filter(lambda sizes: max(sizes) > 1),
    length=st.integers(1, 12),
    batch_size=st.integers(1, 5),
    data=st.data(),
)
@settings(max_examples=25, deadline=None)
def test_batches_of_windows_equal_predicting_token_by_token(
    lengths: list[int], length: int, batch_size: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, length))
    rng = np.random.default_rng(0)
    streams = [rng.integers(0, 257, size).astype(np.uint16) for size in lengths]
    model = build_lively(SETTINGS).train()
    found = evaluate_windows(model, TOKENIZER, streams, sequence_length=length, stride=stride, batch_size=batch_size)
    nats, count = reference(model, streams, length, stride)
    assert model.training
    assert found.tokens == count == sum(size - 1 for size in lengths)
    assert found.num_bytes == sum(int((stream[1:] != TOKENIZER.eos_id).sum()) for stream in streams)
    assert found.loss == pytest.approx(nats / count, rel=1e-5)
    assert found.bits_per_token == pytest.approx(nats / count / math.log(2), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / max(1, found.num_bytes), rel=1e-5)


def test_progress_ends_at_all_tokens_however_they_are_cut() -> None:
    tokens, told = np.arange(40, dtype=np.uint16), ([], [])  # type: tuple[list[int], list[int]]
    model = build_lively(SETTINGS)
    whole = evaluate(model, TOKENIZER, tokens, sequence_length=8, batch_size=2, progress=told[0].append)
    windows = evaluate_windows(
        model, TOKENIZER, [tokens], sequence_length=8, stride=4, batch_size=2, progress=told[1].append
    )
    for seen, evaluation in zip(told, (whole, windows), strict=True):
        assert seen == sorted(seen)
        assert len(seen) > 1
        assert seen[-1] == evaluation.tokens


@given(st.lists(st.text(max_size=5), max_size=6))
def test_packed_documents_are_taken_apart_again(texts: list[str]) -> None:
    """A text may be empty; packed tokens have an end token for it, too."""
    streams = document_streams(TOKENIZER.encode_documents(texts), TOKENIZER.eos_id)
    expected = [[256, *text.encode()] for text in texts]
    while expected and expected[-1] == [256]:  # it has nothing to predict
        expected.pop()
    assert [stream.tolist() for stream in streams][: len(expected)] == expected
    assert all(len(stream) == 1 for stream in streams[len(expected) :])


def test_without_overlap_it_is_the_evaluation_of_training() -> None:
    """When the tokens are a whole number of sequences."""
    model, tokens = build_lively(SETTINGS), np.random.default_rng(1).integers(0, 257, 12 * 7 + 1).astype(np.uint16)
    arguments: dict[str, Any] = {"sequence_length": 12, "batch_size": 3}
    packed = evaluate(model, TOKENIZER, tokens, **arguments)
    slid = evaluate_windows(model, TOKENIZER, [tokens], stride=12, **arguments)
    assert (slid.tokens, slid.num_bytes) == (packed.tokens, packed.num_bytes)
    assert slid.loss == pytest.approx(packed.loss, rel=1e-6)


def test_misuse_says_what_would_work() -> None:
    arguments: dict[str, Any] = {"sequence_length": 4, "batch_size": 1}
    for stride in (0, 5):
        with pytest.raises(ConfigurationError, match=f"between 1 and the sequence length of 4, got {stride}"):
            evaluate_windows(build_lively(SETTINGS), TOKENIZER, [np.arange(9)], stride=stride, **arguments)
    with pytest.raises(DataError, match="no token to predict"):
        evaluate_windows(build_lively(SETTINGS), TOKENIZER, [np.arange(1)], stride=4, **arguments)
