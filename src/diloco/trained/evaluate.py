"""Evaluate a model on held-out text: loss, perplexity and bits per byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from diloco.data import PackedTokens, TokenArray, Tokenizer, heldout_batches
from diloco.devices import to_device
from diloco.errors import ConfigurationError, DataError
from diloco.model import ENDS, NOT_COUNTED, LanguageModel, documents_of
from diloco.units import perplexity

__all__ = [
    "Evaluation",
    "document_streams",
    "evaluate",
    "evaluate_windows",
    "mean_evaluation",
    "sliding_windows",
]

LOGITS_BYTES = 1 << 30  # limit for the float32 logits of one forward pass, unless one sequence needs more


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts held-out text."""

    loss: float  # mean cross-entropy in nats per token, end-of-document tokens included
    bits_per_byte: float  # the same cross-entropy in bits per byte of text, comparable between tokenisers
    tokens: int  # number of predicted tokens
    num_bytes: int  # number of UTF-8 bytes that they stand for

    @property
    def perplexity(self) -> float:
        """``exp(loss)``, or infinity if that overflows."""
        return perplexity(self.loss)

    @property
    def bits_per_token(self) -> float:
        """``loss`` in bits."""
        return self.loss / math.log(2)


def evaluate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    tokens: PackedTokens | TokenArray,
    *,
    sequence_length: int,
    batch_size: int,
    sequences: int = 0,
    document_masks: bool = False,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Evaluation:
    """Evaluate ``model`` on held-out ``tokens``; afterwards its mode is restored.

    Args:
        tokenizer: determines how many bytes each token stands for.
        tokens: ``(n,)`` packed held-out tokens.
        batch_size: sequences per forward pass; fewer if their logits would take more than `LOGITS_BYTES`.
        sequences: how many sequences to use, always the same ones, spread evenly; 0: all.
        document_masks: mask the documents of a sequence from each other.
        progress: called after each batch with the number of tokens predicted so far.
    """
    batch_size = _fitting(batch_size, sequence_length, model)
    batches = heldout_batches(tokens, sequence_length, batch_size, sequences)
    end = tokenizer.eos_id if document_masks else None
    end = ENDS if getattr(tokens, "marks_ends", False) else end
    return _evaluate_batches(model, tokenizer, batches, end, progress)


def sliding_windows(num_targets: int, length: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield windows in which each of ``num_targets`` tokens is predicted once; a first token before them is only input.

    A window ``(begin, end, first)`` has the inputs ``tokens[begin:end]``, and only the predictions from ``first`` on
    count. It is ``length`` tokens wide, or fewer if there are fewer, and ends ``stride`` tokens after the window before
    it; the last one ends with the tokens. So all but the first ``length`` tokens are predicted from at least ``length -
    stride`` tokens.

    >>> list(sliding_windows(10, length=4, stride=2))
    [(0, 4, 0), (2, 6, 4), (4, 8, 6), (6, 10, 8)]
    >>> list(sliding_windows(10, length=4, stride=4))
    [(0, 4, 0), (4, 8, 4), (6, 10, 8)]
    """
    end = min(length, num_targets)
    if end:
        yield 0, end, 0
    while end < num_targets:
        first, end = end, min(end + stride, num_targets)
        yield end - length, end, first


def document_streams(tokens: np.ndarray, end: int) -> list[np.ndarray]:
    """Split packed documents into streams for `evaluate_windows`; each begins with ``end`` and lacks its own end token.

    >>> document_streams(np.array([5, 6, 9, 9, 7, 9]), end=9)
    [array([9, 5, 6]), array([9]), array([9, 7])]
    """
    with_first = np.concatenate([np.array([end], dtype=tokens.dtype), tokens])
    begins = np.flatnonzero(with_first == end)
    streams = np.split(with_first, begins[1:])
    return streams if len(streams[-1]) > 1 else streams[:-1]


def evaluate_windows(
    model: LanguageModel,
    tokenizer: Tokenizer,
    streams: Sequence[np.ndarray],
    *,
    sequence_length: int,
    stride: int,
    batch_size: int,
    document_masks: bool = False,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Evaluation:
    """Evaluate ``model`` on every token of every stream except the first, which is only input; see `sliding_windows`.

    Args:
        model, tokenizer, batch_size, document_masks, progress: as for `evaluate`, with windows instead of sequences.
        streams: each ``(n,)`` integers; nothing is seen across streams.
        sequence_length: the most tokens that the model sees.
        stride: tokens from the end of a window to the end of the next, 1 to ``sequence_length``.

    Raises:
        ConfigurationError: the stride is out of range.
        DataError: there is nothing to predict.
    """
    if not 1 <= stride <= sequence_length:
        raise ConfigurationError(
            f"The stride must be between 1 and the sequence length of {sequence_length}, got {stride}."
        )
    windows = [
        (tokens, window) for tokens in streams for window in sliding_windows(len(tokens) - 1, sequence_length, stride)
    ]
    if not windows:
        raise DataError("There is no token to predict in the text.")
    batch_size = _fitting(batch_size, sequence_length, model)
    windows.sort(key=lambda pair: pair[1][0] - pair[1][1])  # groups similar lengths into batches, the longest first
    starts = range(0, len(windows), batch_size)
    batches = (_padded(windows[start : start + batch_size]) for start in starts)
    return _evaluate_batches(model, tokenizer, batches, tokenizer.eos_id if document_masks else None, progress)


def _evaluate_batches(
    model: LanguageModel,
    tokenizer: Tokenizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    end: int | None,
    progress: Callable[[int], None],
) -> Evaluation:
    """Evaluate on all targets that are not negative and restore the model's mode; ``end`` is as for `documents_of`."""
    device = next(model.parameters()).device
    was_training = model.training
    nats, count, num_bytes = 0.0, 0, 0
    model.eval()
    try:
        with torch.no_grad():
            for inputs, targets in batches:
                shown = to_device(inputs, device)
                wanted = to_device(targets, device)
                logits = model(shown, documents=documents_of(shown, wanted, end)).float()
                wanted = torch.where(wanted < 0, NOT_COUNTED, wanted).flatten()
                loss = nn.functional.cross_entropy(
                    logits.flatten(0, 1), wanted, ignore_index=NOT_COUNTED, reduction="sum"
                )
                counted = targets[targets >= 0]
                nats += float(loss)
                count += counted.numel()
                num_bytes += tokenizer.num_bytes(counted)
                progress(count)
    finally:
        model.train(was_training)
    if not count:
        raise DataError("There is no token to predict in the text.")
    return Evaluation(nats / count, nats / math.log(2) / max(1, num_bytes), count, num_bytes)


def _fitting(batch_size: int, sequence_length: int, model: LanguageModel) -> int:
    """Return the number of sequences whose logits take at most `LOGITS_BYTES`, at least one."""
    return max(1, min(batch_size, LOGITS_BYTES // (4 * sequence_length * model.vocab_size)))


def _padded(windows: Sequence[tuple[np.ndarray, tuple[int, int, int]]]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, ``(batch, longest)`` int64; a causal model does not see the padding, which is at the
    end.
    """
    longest = max(end - begin for _, (begin, end, _) in windows)
    inputs = torch.zeros(len(windows), longest, dtype=torch.int64, device="cpu")
    targets = torch.full_like(inputs, NOT_COUNTED)
    for row, (tokens, (begin, end, first)) in enumerate(windows):
        piece = torch.from_numpy(tokens[begin : end + 1].astype(np.int64))
        inputs[row, : end - begin] = piece[:-1]
        targets[row, first - begin : end - begin] = piece[1 + first - begin :]
    return inputs, targets


def mean_evaluation(evaluations: list[Evaluation]) -> Evaluation:
    """Return the mean over models evaluated on the same tokens (independent replicas have no global parameters)."""
    size, first = len(evaluations), evaluations[0]
    loss = sum(e.loss for e in evaluations) / size
    bits_per_byte = sum(e.bits_per_byte for e in evaluations) / size
    return Evaluation(loss, bits_per_byte, first.tokens, first.num_bytes)
