"""Tokens into batches: deterministic shards, one per replica, whose place can be saved as a few numbers.

The packed tokens are cut into windows of ``sequence_length + 1`` tokens at stride ``sequence_length``: window i holds
``tokens[i * L : i * L + L + 1]``, inputs are all but its last token and targets all but its first, so every token is a
target once. Only the first token of the array, and at its end fewer than ``sequence_length`` tokens, are never one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from diloco.data.permutation import permute
from diloco.errors import CheckpointError, ConfigurationError, DataError, nearest

__all__ = ["Sampler", "Sharding", "heldout_batches", "num_windows"]

Sharding = Literal["shuffled", "contiguous"]
Tokens = NDArray[np.integer[Any]]


class Sampler:
    """The batches of one replica, in an order that is a pure function of the arguments and the number drawn so far.

    ``"shuffled"``: all windows are permuted anew in each epoch, the same way for every replica. Step k of an epoch uses
    the M * B positions from ``k * M * B`` on, and replica m takes positions ``[m * B, (m + 1) * B)`` of those. So
    replicas never share a window within an epoch, and M replicas with batches of B see together, step by step, exactly
    what one replica with batches of M * B sees.

    ``"contiguous"``: replica m draws from windows ``[m * n // M, (m + 1) * n // M)`` of the n, shuffled within that
    stretch in each epoch: each replica has documents of its own (non-iid).

    An epoch ends when not every replica could have another full batch; the rest is left out of that epoch, and as the
    next shuffle is another, it is another rest each time.

    Args:
        tokens: (n,) integers, the packed training tokens; only read, so a memory map will do.
        sequence_length: tokens per sequence (L).
        batch_size: sequences per batch of this replica (B).
        replica: which replica this is (m), ``0 <= replica < num_replicas``.
        num_replicas: M.
        seed: with the number of the epoch, the key of the shuffle. Must be the same for all replicas.
        sharding: see above.

    Raises:
        ConfigurationError: an argument out of its range.
        DataError: too few tokens for one batch for each replica.

    >>> tokens = np.arange(13, dtype=np.uint16)
    >>> sampler = Sampler(tokens, sequence_length=3, batch_size=2, replica=0, num_replicas=2, seed=0)
    >>> inputs, targets = sampler.next_batch()
    >>> inputs.shape, bool((targets == inputs + 1).all())
    (torch.Size([2, 3]), True)
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        sequence_length: int,
        batch_size: int,
        replica: int,
        num_replicas: int,
        seed: int,
        sharding: Sharding = "shuffled",
    ) -> None:
        for name, value in (
            ("sequence_length", sequence_length),
            ("batch_size", batch_size),
            ("num_replicas", num_replicas),
        ):
            if value < 1:
                raise ConfigurationError(f"{name}={value} was given; at least 1 is needed. No sampler was made.")
        if not 0 <= replica < num_replicas:
            raise ConfigurationError(
                f"replica={replica} was given; 0 to {num_replicas - 1} would work with num_replicas={num_replicas}. "
                "No sampler was made."
            )
        if sharding not in get_args(Sharding):
            raise ConfigurationError(
                f"sharding={sharding!r} is unknown; {nearest(sharding, get_args(Sharding))} No sampler was made."
            )
        windows = num_windows(tokens, sequence_length)
        if windows < num_replicas * batch_size:
            raise DataError(
                f"{len(tokens)} training tokens make {windows} sequences of {sequence_length}; one batch of "
                f"{batch_size} for each of {num_replicas} replicas needs {num_replicas * batch_size} of them, that is "
                f"{num_replicas * batch_size * sequence_length + 1} tokens. More text, fewer replicas, smaller batches "
                "or shorter sequences would work. No sampler was made."
            )
        self._tokens = tokens
        self._sequence_length = sequence_length
        self._batch_size = batch_size
        self._replica = replica
        self._num_replicas = num_replicas
        self._seed = seed
        self._sharding: Sharding = sharding
        self._windows = windows
        self._drawn = 0
        self._data = xxhash.xxh3_64_hexdigest(np.ascontiguousarray(tokens).data)

    @property
    def steps_per_epoch(self) -> int:
        """Batches that each replica draws from one shuffle; the same number for every replica."""
        return self._windows // self._num_replicas // self._batch_size

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self._drawn // self.steps_per_epoch

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each ``(batch_size, sequence_length)`` int64 on the CPU; moves the cursor by one."""
        batch = _gather(self._tokens, self._next_windows(), self._sequence_length)
        self._drawn += 1
        return batch

    def _next_windows(self) -> NDArray[np.int64]:
        """(batch_size,) windows of the next batch."""
        epoch, step = divmod(self._drawn, self.steps_per_epoch)
        members, size = self._num_replicas, self._batch_size
        if self._sharding == "shuffled":
            positions = (step * members + self._replica) * size + np.arange(size)
            return permute(positions, self._windows, f"seed {self._seed}, epoch {epoch}")
        begin = self._replica * self._windows // members
        end = (self._replica + 1) * self._windows // members
        key = f"seed {self._seed}, epoch {epoch}, replica {self._replica}"
        return begin + permute(step * size + np.arange(size), end - begin, key)

    def state_dict(self) -> dict[str, int | str]:
        """The cursor: batches drawn so far, and what they were drawn from.

        Replicas in step have equal cursors, so that one which joins can take the cursor of any other.
        """
        return {**self._origin(), "drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Go on after the batch that ``state`` was taken after.

        Raises:
            CheckpointError: the cursor is malformed, or of other data or another way of drawing from it; the message
                names each difference. The sampler stays where it was.
        """
        origin = self._origin()
        if set(state) != {*origin, "drawn"}:
            raise CheckpointError(
                f"A data cursor with the fields {sorted(state)} was given; {sorted([*origin, 'drawn'])} are needed. "
                "The cursor was not loaded."
            )
        differences = [
            f"{name} is {state[name]!r} in the cursor and {value!r} here"
            for name, value in origin.items()
            if state[name] != value
        ]
        if differences:
            raise CheckpointError(
                f"The data cursor belongs to other batches: {'; '.join(differences)}. It can be used only with the "
                "data and settings it was saved with. The cursor was not loaded."
            )
        drawn = state["drawn"]
        if not isinstance(drawn, int) or isinstance(drawn, bool) or drawn < 0:
            raise CheckpointError(
                f"The data cursor says that {drawn!r} batches were drawn; a whole number from 0 on is needed. "
                "The cursor was not loaded."
            )
        self._drawn = drawn

    def _origin(self) -> dict[str, int | str]:
        """Everything but the replica's own number that decides which windows a batch holds."""
        return {
            "data": self._data,
            "tokens": len(self._tokens),
            "seed": self._seed,
            "sequence_length": self._sequence_length,
            "batch_size": self._batch_size,
            "num_replicas": self._num_replicas,
            "sharding": self._sharding,
        }


def heldout_batches(
    tokens: Tokens, sequence_length: int, batch_size: int, max_sequences: int
) -> Iterator[tuple[Tensor, Tensor]]:
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
            "More text, a larger data.heldout_fraction or shorter sequences would work. Nothing was evaluated."
        )
    count = min(max_sequences or windows, windows)
    chosen = np.arange(count) * windows // count
    return (
        _gather(tokens, chosen[begin : begin + batch_size], sequence_length) for begin in range(0, count, batch_size)
    )


def num_windows(tokens: Tokens, sequence_length: int) -> int:
    """Windows of ``sequence_length + 1`` tokens at stride ``sequence_length``."""
    return max(len(tokens) - 1, 0) // sequence_length


def _gather(tokens: Tokens, windows: NDArray[np.int64], sequence_length: int) -> tuple[Tensor, Tensor]:
    begins = windows[:, None] * sequence_length
    # Two gathers, because slices of one would not be contiguous.
    offsets = np.arange(sequence_length)
    inputs, targets = tokens[begins + offsets], tokens[begins + offsets + 1]
    return torch.from_numpy(inputs.astype(np.int64)), torch.from_numpy(targets.astype(np.int64))
