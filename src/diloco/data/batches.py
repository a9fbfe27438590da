"""Batches: what training needs of whoever draws them, and how sequences of packed tokens become one."""

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

Cursor: TypeAlias = Mapping[str, Any]  # what `Batches.state_dict` gave, fit for JSON


class Batches(Protocol):
    """The batches of one replica, in an order whose place can be saved as a few numbers."""

    @property
    def epochs(self) -> Mapping[str, float]:
        """Source -> how often all of it has been drawn by now, by all replicas together."""

    def next_batch(self) -> Batch:
        """The next batch; moves the cursor by one."""

    def skip_batch(self) -> None:
        """Move the cursor by one without drawing."""

    def assign(self, assignment: Assignment) -> None:
        """Draw by this from its first step on."""

    def state_dict(self) -> dict[str, Any]:
        """The cursor: after the last batch that `next_batch` gave."""

    def load_state_dict(self, state: Cursor) -> None:
        """Go on after the batch that ``state`` was taken after."""

    def go_on_from(self, cursor_of: Callable[[int], Cursor], before: int) -> None:
        """Go on where another number of replicas stopped, all of them after the same number of batches.

        What they drew is not drawn again in this epoch, and what they left is drawn by the present replicas.

        Args:
            cursor_of: replica, below ``before`` -> its cursor; asked only for what is needed.
            before: replicas that drew until then.

        Raises:
            CheckpointError: the cursors are of other data, or of a way of drawing that can't be shared out anew.
        """

    @property
    def order(self) -> str:
        """What a joiner must be told to draw what nobody else draws, as text; "" where the settings say it all."""

    def join_at(self, step: int, order: str) -> None:
        """Draw from inner step ``step`` on, as one who joins a run.

        Args:
            step: inner steps that the others have done.
            order: `order` of any of them.

        Raises:
            CheckpointError: ``order`` can't be read.
            ConfigurationError: nobody can join a run that draws this way.
        """

    def close(self) -> None:
        """End what runs beside the training; nothing can be drawn afterwards."""


def check_cursor(state: Cursor, origin: Cursor, more: Collection[str]) -> None:
    """Raise `CheckpointError` unless ``state`` is a cursor of the same batches.

    Args:
        origin: what a cursor must say of the data and the way of drawing from it.
        more: its other fields.
    """
    differences = [
        f"{name} is {state.get(name)!r} in the cursor and {value!r} here"
        for name, value in origin.items()
        if state.get(name) != value
    ]
    if differences:
        raise CheckpointError(
            f"The data cursor belongs to other batches: {'; '.join(differences)}. It can be used only with the data "
            "and settings it was saved with. It was not loaded."
        )
    if set(state) != {*origin, *more}:
        raise CheckpointError(
            f"A data cursor has the fields {sorted([*origin, *more])}, not {sorted(state)}. It was not loaded."
        )


def gather(tokens: PackedTokens, begins: NDArray[np.int64], sequence_length: int) -> Batch:
    """Inputs and targets, each ``(len(begins), sequence_length)`` int64, of the windows that begin at these tokens.

    Row by row, as a copy of so many tokens in a row is faster than a gather of each, also from a file.

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
    """Batches for evaluation: always the same windows, spread evenly over ``tokens``, in order.

    Args:
        tokens: (n,) integers, the packed held-out tokens.
        batch_size: sequences per batch; the last batch may be smaller.
        max_sequences: how many windows to use at most; 0: all.

    Raises:
        DataError: there are too few tokens for one sequence. Raised at once, not at the first batch.

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
            f"{len(tokens)} held-out tokens were given; one sequence of {sequence_length} needs {sequence_length + 1}. "
            "Use more text, a larger data.heldout_fraction, shorter sequences, or diloco evaluate --by-document."
        )
    count = min(max_sequences or windows, windows)
    begins = np.arange(count) * windows // count * sequence_length
    return (
        gather(packed, begins[first : first + batch_size], sequence_length) for first in range(0, count, batch_size)
    )


_WAIT_S = 0.01  # how long to wait for the thread's end before making room in its queue again


@dataclass(frozen=True)
class _Made:
    """A batch with the cursor and epochs after it, or the error in place of a batch."""

    batch: Batch | None
    cursor: dict[str, Any]
    epochs: Mapping[str, float]
    error: BaseException | None = None


class Prefetcher:
    """`Batches` around others, of which the next few are made in a thread while training goes on.

    The cursor is that of the last batch given, whatever was made ahead. An error in the thread is raised where its
    batch would have been given, and again at each later attempt.

    Args:
        batches: only this object uses them from now on.
        ahead: batches made ahead, at least 1.
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
        """The next batch, waiting for it where it is not ready; what the thread raised, where it failed."""
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

    def go_on_from(self, cursor_of: Callable[[int], Cursor], before: int) -> None:
        with self._paused():
            self._batches.go_on_from(cursor_of, before)

    def join_at(self, step: int, order: str) -> None:
        with self._paused():
            self._batches.join_at(step, order)

    def close(self) -> None:
        """End the thread; what it made is lost, and the cursor stays."""
        self._end()
        self._batches.close()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Inside, the batches stand where the cursor says, and no thread uses them."""
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
            except BaseException as error:  # to be raised where the batch would have been given
                made = _Made(None, self._cursor, self._epochs, error)
            self._queue.put(made)
            if made.error is not None:
                return

    def _end(self) -> None:
        if self._thread is None:
            return
        self._stop.set()
        while self._thread.is_alive():  # it may wait for room
            with suppress(queue.Empty):
                self._queue.get_nowait()
            self._thread.join(_WAIT_S)
        self._thread = None
        self._stop.clear()
        self._queue = queue.Queue(self._ahead)
