"""The interface of batches, the gathering of sequences into a batch, and prefetching."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diloco.data.assignment import Assignment
from diloco.data.packed import PackedTokens, TokenArray, num_windows
from diloco.errors import CheckpointError, ConfigurationError, DataError

__all__ = ["Batch", "Batches", "Cursor", "Prefetcher", "check_cursor", "gather", "heldout_batches"]

Batch: TypeAlias = tuple[Tensor, Tensor]
"""Inputs and targets, each ``(batch_size, sequence_length)`` int64 on the CPU; negative targets are not counted."""

Cursor: TypeAlias = Mapping[str, Any]  # the JSON value that `Batches.state_dict` returns


class Batches(Protocol):
    """The batches of one replica, in an order whose position is saved as a few numbers."""

    @property
    def epochs(self) -> Mapping[str, float]:
        """Source -> how often all replicas together have drawn all of it so far."""

    def next_batch(self) -> Batch:
        """Return the next batch and advance the cursor."""

    def skip_batch(self) -> None:
        """Advance the cursor by one batch without drawing it."""

    def assign(self, assignment: Assignment) -> None:
        """Use this assignment from its first step on."""

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor: the position after the last batch that `next_batch` returned."""

    def load_state_dict(self, state: Cursor) -> None:
        """Continue after the batch after which ``state`` was saved."""

    def resume_from(self, cursor_of: Callable[[int], Cursor], before: int) -> None:
        """Continue where another number of replicas stopped, all of them after the same number of batches.

        What they drew is not drawn again in this epoch, and the current replicas draw what they left.

        Args:
            cursor_of: replica, below ``before`` -> its cursor; called only for the cursors that are needed.
            before: how many replicas drew until then.

        Raises:
            CheckpointError: the cursors belong to other data, or to a way of drawing that can't be redistributed.
        """

    @property
    def order(self) -> str:
        """What a joiner must know, as text, to draw what no other replica draws; "" if the settings imply it."""

    def join_at(self, step: int, order: str) -> None:
        """Draw from inner step ``step`` on, as a joining replica.

        Args:
            step: inner steps that the others have done.
            order: the `order` of any of them.

        Raises:
            CheckpointError: ``order`` can't be read.
            ConfigurationError: no replica can join a run that draws this way.
        """

    def close(self) -> None:
        """Stop all background work; nothing can be drawn afterwards."""


def check_cursor(state: Cursor, origin: Cursor, more: Collection[str]) -> None:
    """Raise `CheckpointError` unless ``state`` is a cursor of the same batches.

    Args:
        origin: the fields of a cursor that describe the data and the way of drawing, with the values they must have.
        more: the names of its other fields.
    """
    differences = [
        f"{name} is {state.get(name)!r} in the cursor and {value!r} here"
        for name, value in origin.items()
        if state.get(name) != value
    ]
    if differences:
        raise CheckpointError(
            f"The data cursor belongs to other batches: {'; '.join(differences)}. It works only with the data and "
            "settings with which it was saved. It was not loaded."
        )
    if set(state) != {*origin, *more}:
        raise CheckpointError(
            f"A data cursor must have the fields {sorted([*origin, *more])}, got {sorted(state)}. It was not loaded."
        )


def gather(tokens: PackedTokens, begins: NDArray[np.int64], sequence_length: int) -> Batch:
    """Return inputs and targets of the windows that begin at these tokens, each ``(len(begins), sequence_length)``
    int64.

    Rows are copied one at a time: copying consecutive tokens is faster than gathering them one by one, also from a
    file.

    >>> inputs, targets = gather(PackedTokens([np.arange(9, dtype=np.uint16)]), np.array([0, 5]), 3)
    >>> inputs.tolist(), targets.tolist()
    ([[0, 1, 2], [5, 6, 7]], [[1, 2, 3], [6, 7, 8]])
    """
    inputs = np.empty((len(begins), sequence_length), dtype=np.int64)
    targets = np.empty_like(inputs)
    for row, begin in enumerate(begins.tolist()):
        window = tokens[begin : begin + sequence_length + 1]
        inputs[row] = window[:-1]
        targets[row] = window[1:]
        tokens.mark(begin + 1, targets[row])
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def heldout_batches(
    tokens: PackedTokens | TokenArray, sequence_length: int, batch_size: int, max_sequences: int
) -> Iterator[Batch]:
    """Return an iterator of batches for evaluation: always the same windows, spread evenly over ``tokens``, in order.

    Args:
        tokens: (n,) integers, the packed held-out tokens.
        batch_size: sequences per batch; the last batch may be smaller.
        max_sequences: the largest number of windows to use; 0: all.

    Raises:
        DataError: there are too few tokens for one sequence. It is raised at once, not at the first batch.

    >>> [inputs[:, 0].tolist() for inputs, _ in heldout_batches(np.arange(21), 2, batch_size=2, max_sequences=3)]
    [[0, 6], [12]]
    """
    if batch_size < 1 or max_sequences < 0:
        raise ConfigurationError(
            f"An evaluation needs batch_size >= 1 and max_sequences >= 0, not {batch_size} and {max_sequences}."
        )
    packed = PackedTokens([tokens]) if isinstance(tokens, np.ndarray) else tokens
    windows = num_windows(packed, sequence_length)
    if windows < 1:
        raise DataError(
            f"There are only {len(tokens)} held-out tokens, but one sequence of {sequence_length} needs "
            f"{sequence_length + 1}. Use more text, a larger data.heldout_fraction, or shorter "
            "sequences."
        )
    count = min(max_sequences or windows, windows)
    begins = np.arange(count) * windows // count * sequence_length
    return (
        gather(packed, begins[first : first + batch_size], sequence_length) for first in range(0, count, batch_size)
    )


_WAIT_S = 0.01  # how long to wait for the thread to end before draining its queue again


@dataclass(frozen=True)
class _Made:
    """A batch with the cursor and epochs after it, or the error that occurred instead."""

    batch: Batch | None
    cursor: dict[str, Any]
    epochs: Mapping[str, float]
    error: BaseException | None = None


class Prefetcher:
    """`Batches` that prepare the next few batches of others in a thread during training.

    The cursor is that of the last batch returned, whatever was prepared ahead. An error in the thread is raised where
    its batch would have been returned, and again at each later attempt.

    Args:
        batches: the source of the batches; only this object may use it from now on.
        ahead: batches to prepare ahead, at least 1.
        called: the name of the thread.
    """

    def __init__(self, batches: Batches, ahead: int, called: str = "prefetch") -> None:
        self._batches = batches
        self._ahead = ahead
        self._called = called
        self._cursor = batches.state_dict()
        self._epochs = batches.epochs
        self._queue: queue.Queue[_Made] = queue.Queue(ahead)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None

    @property
    def epochs(self) -> Mapping[str, float]:
        return self._epochs

    @property
    def order(self) -> str:
        with self._paused():
            return self._batches.order

    def next_batch(self) -> Batch:
        """Return the next batch, after waiting for it if necessary; raise the error of the thread if it failed."""
        if self._failed is not None:
            raise self._failed
        if self._thread is None:
            self._thread = threading.Thread(target=self._make, name=self._called, daemon=True)
            self._thread.start()
        made = self._queue.get()
        if made.error is not None:
            self._failed = made.error
            self._end()
            raise made.error
        assert made.batch is not None
        self._cursor, self._epochs = made.cursor, made.epochs
        return made.batch

    def skip_batch(self) -> None:
        with self._paused():
            self._batches.skip_batch()

    def assign(self, assignment: Assignment) -> None:
        with self._paused():
            self._batches.assign(assignment)

    def state_dict(self) -> dict[str, Any]:
        return self._cursor

    def load_state_dict(self, state: Cursor) -> None:
        with self._paused():
            self._batches.load_state_dict(state)

    def resume_from(self, cursor_of: Callable[[int], Cursor], before: int) -> None:
        with self._paused():
            self._batches.resume_from(cursor_of, before)

    def join_at(self, step: int, order: str) -> None:
        with self._paused():
            self._batches.join_at(step, order)

    def close(self) -> None:
        """End the thread and discard what it prepared; the cursor does not move."""
        self._end()
        self._batches.close()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Stop the thread and set the batches to the cursor while the context is open."""
        if self._thread is not None or self._failed is not None:
            self._end()
            self._batches.load_state_dict(self._cursor)
            self._failed = None
        try:
            yield
        finally:
            self._cursor, self._epochs = self._batches.state_dict(), self._batches.epochs

    def _make(self) -> None:
        while not self._stop.is_set():
            try:
                batch = self._batches.next_batch()
                made = _Made(batch, self._batches.state_dict(), self._batches.epochs)
            except BaseException as error:  # raised where the batch would have been returned
                made = _Made(None, self._cursor, self._epochs, error)
            self._queue.put(made)
            if made.error is not None:
                return

    def _end(self) -> None:
        if self._thread is None:
            return
        self._stop.set()
        while self._thread.is_alive():  # it may be blocked on a full queue
            with suppress(queue.Empty):
                self._queue.get_nowait()
            self._thread.join(_WAIT_S)
        self._thread = None
        self._stop.clear()
        self._queue = queue.Queue(self._ahead)
