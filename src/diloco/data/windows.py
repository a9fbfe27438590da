"""Windows of packed tokens: what a sequence is, and batches of them.

Packed tokens are cut into windows of ``sequence_length + 1`` tokens at stride ``sequence_length``: window i holds
``tokens[i * L : i * L + L + 1]``, inputs are all but its last token and targets all but its first, so every token is a
target once. Only the first token of the array, and at its end fewer than ``sequence_length`` tokens, are never one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from diloco.data.batches import Batch
from diloco.data.packed import Tokens
from diloco.errors import ConfigurationError, DataError

__all__ = ["gather", "heldout_batches", "num_windows"]


def num_windows(tokens: Tokens, sequence_length: int) -> int:
    """Windows of ``sequence_length + 1`` tokens at stride ``sequence_length``."""
    return max(len(tokens) - 1, 0) // sequence_length


def gather(tokens: Tokens, begins: NDArray[np.int64], sequence_length: int) -> Batch:
    """Inputs and targets, each ``(len(begins), sequence_length)`` int64: what begins at these tokens.

    Row by row, as a copy of so many tokens in a row is faster than a gather of each, also from a file.

    >>> inputs, targets = gather(np.arange(9, dtype=np.uint16), np.array([0, 5]), 3)
    >>> inputs.tolist(), targets.tolist()
    ([[0, 1, 2], [5, 6, 7]], [[1, 2, 3], [6, 7, 8]])
    """
    inputs = np.empty((len(begins), sequence_length), dtype=np.int64)
    targets = np.empty_like(inputs)
    for row, begin in enumerate(begins.tolist()):
        window = tokens[begin : begin + sequence_length + 1]
        inputs[row] = window[:-1]
        targets[row] = window[1:]
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def heldout_batches(tokens: Tokens, sequence_length: int, batch_size: int, max_sequences: int) -> Iterator[Batch]:
    """Batches for evaluation: always the same windows, spread evenly over ``tokens``, in order.

    Args:
        tokens: (n,) integers, the packed held-out tokens.
        sequence_length: tokens per sequence.
        batch_size: sequences per batch; the last batch may be smaller.
        max_sequences: how many windows to use at most; 0: all.

    Returns:
        An iterator of inputs and targets, each ``(batch, sequence_length)`` int64 on the CPU.

    Raises:
        DataError: there are too few tokens for one sequence. Raised at once, not at the first batch.

    >>> [inputs[:, 0].tolist() for inputs, _ in heldout_batches(np.arange(21), 2, batch_size=2, max_sequences=3)]
    [[0, 6], [12]]
    """
    if batch_size < 1 or max_sequences < 0:
        raise ConfigurationError(
            f"batch_size={batch_size} with max_sequences={max_sequences} was given; at least 1 and at least 0 are "
            "needed. Nothing was evaluated."
        )
    windows = num_windows(tokens, sequence_length)
    if windows < 1:
        raise DataError(
            f"{len(tokens)} held-out tokens were given; one sequence of {sequence_length} needs {sequence_length + 1}. "
            "More text, a larger data.heldout_fraction, shorter sequences, or diloco evaluate --by-document would "
            "work. Nothing was evaluated."
        )
    count = min(max_sequences or windows, windows)
    begins = np.arange(count) * windows // count * sequence_length
    return (
        gather(tokens, begins[first : first + batch_size], sequence_length) for first in range(0, count, batch_size)
    )
