"""Draw batches from tokens: each replica draws its own, in an order whose position is saved as a few numbers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple, NotRequired, Protocol, TypeAlias, TypedDict

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diloco.data.order import Assignment, as_message, permute, read_message
from diloco.data.packed import PackedTokens, TokenArray, num_windows
from diloco.errors import CheckpointError, ConfigurationError, DataError

__all__ = ["Batch", "Batches", "Cursor", "Drawing", "Prefetcher", "Sampler", "check_cursor", "heldout_batches"]

Batch: TypeAlias = tuple[Tensor, Tensor]
"""Inputs and targets, each ``(batch_size, sequence_length)`` int64 on the CPU; negative targets are not counted."""

Cursor: TypeAlias = Mapping[str, Any]  # the JSON value that `Batches.state_dict` returns
Sharding: TypeAlias = Literal["shuffled", "contiguous"]


class Drawing(TypedDict):
    """The arguments that determine the batches of one replica; see `Sampler`."""

    sequence_length: int
    batch_size: int
    replica: int
    num_replicas: int | None
    seed: int
    sharding: NotRequired[Sharding]


class Batches(Protocol):
    """The batches of one replica, in an order whose position is saved as a few numbers."""

    @property
    def epochs(self) -> Mapping[str, float]:
        """Source -> how often all replicas together have drawn all of it so far; one source alone is called ``""``."""

    @property
    def order(self) -> str:
        """What a joiner must know, as text, to draw what no other replica draws; "" if the settings imply it."""

    def next_batch(self) -> Batch:
        """Return the next batch and advance the cursor, which does not move if an error is raised."""

    def skip_batch(self) -> None:
        """Advance the cursor by one batch, which no replica draws in this epoch."""

    def assign(self, assignment: Assignment) -> None:
        """Draw by this assignment from its first step on, and by the current one until then."""

    def join_at(self, step: int, order: str) -> None:
        """Draw from inner step ``step`` on, as a joiner that has got the `order` of another replica."""

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor: the position after the last batch that `next_batch` returned."""

    def load_state_dict(self, state: Cursor) -> None:
        """Continue after the batch after which ``state`` was saved; raise `CheckpointError` if it is of other data."""

    def resume_from(self, cursor_of: Callable[[int], Cursor], before: int) -> None:
        """Continue where another number of replicas stopped; what they drew is not drawn again in this epoch.

        Args:
            cursor_of: replica, below ``before`` -> its cursor; all have drawn the same number of batches.
            before: how many replicas drew until then.
        """

    def close(self) -> None:
        """Stop all background work; nothing can be drawn afterwards."""


def check_cursor(state: Cursor, origin: Cursor, more: Collection[str]) -> None:
    """Raise `CheckpointError` unless ``state`` has the values of ``origin`` and the other fields ``more``."""
    differences = [
        f"{name} is {state.get(name)!r} in the cursor and {value!r} here"
        for name, value in origin.items()
        if state.get(name) != value
    ]
    differences += [f"{name} is missing in the cursor" for name in more if name not in state]
    if differences:
        raise CheckpointError(
            f"The data cursor belongs to other batches: {'; '.join(differences)}. It works only with the data and "
            "settings with which it was saved. It was not loaded."
        )


def _gather(tokens: PackedTokens, begins: NDArray[np.int64], sequence_length: int) -> Batch:
    """Return inputs and targets of the windows that begin at these tokens.

    Rows are copied one at a time, which is faster than gathering their tokens, also from a file.
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
    packed = PackedTokens([tokens]) if isinstance(tokens, np.ndarray) else tokens
    windows = num_windows(packed, sequence_length)
    if windows < 1:
        raise DataError(
            f"There are only {len(tokens)} held-out tokens, but one sequence of {sequence_length} needs "
            f"{sequence_length + 1}. Use more text, a larger data.heldout_fraction, or shorter sequences."
        )
    count = min(max_sequences or windows, windows)
    begins = np.arange(count) * windows // count * sequence_length
    return (
        _gather(packed, begins[first : first + batch_size], sequence_length) for first in range(0, count, batch_size)
    )


class Sampler:
    """The `Batches` of one replica, in an order that is a pure function of the arguments and the number drawn so far.

    ``"shuffled"``: in each epoch all windows are permuted anew, the same way for every replica. The epochs form one
    stream of positions that the replicas share (`Assignment`): M replicas with batches of B see together, step by step,
    what one replica with batches of M * B sees in its first epoch. An epoch consists of whole batches; the fewer than B
    windows that are left out of it are others in the next one.

    ``"contiguous"``: of n windows, replica m draws from ``[m * n // M, (m + 1) * n // M)``, shuffled within that slice
    in each epoch. So each replica has its own documents (non-iid). An epoch ends for all replicas at once, when some
    replica could not draw another full batch.

    Args:
        tokens: the packed training tokens of one source or a `Mixture`, or an array ``(n,)`` of integers.
        sequence_length: tokens per sequence (L).
        batch_size: sequences per batch of this replica (B).
        replica: the number of this replica (m), ``0 <= replica < num_replicas``.
        num_replicas: M, the replicas that draw until `assign` changes them. None: members may change at any time, and
            nothing can be drawn before the first `assign`.
        seed: with the number of the epoch, the key of the shuffle. It must be the same for all replicas.
        sharding: see above.

    Raises:
        ConfigurationError: ``"contiguous"`` with members that may change or several sources.
        DataError: there are too few tokens for one batch for each replica.

    >>> tokens = np.arange(13, dtype=np.uint16)
    >>> sampler = Sampler(tokens, sequence_length=3, batch_size=2, replica=0, num_replicas=2, seed=0)
    >>> inputs, targets = sampler.next_batch()
    >>> inputs.shape, bool((targets == inputs + 1).all())
    (torch.Size([2, 3]), True)
    """

    def __init__(
        self,
        tokens: PackedTokens | TokenArray,
        *,
        sequence_length: int,
        batch_size: int,
        replica: int,
        num_replicas: int | None,
        seed: int,
        sharding: Sharding = "shuffled",
    ) -> None:
        self._tokens = PackedTokens([tokens]) if isinstance(tokens, np.ndarray) else tokens
        if sharding == "contiguous" and (num_replicas is None or self._tokens.shares):
            raise ConfigurationError(
                "sharding='contiguous' needs a fixed number of replicas and a single source, because each replica has "
                "its own slice. Use sharding='shuffled'."
            )
        self._tokens.check(sequence_length, batch_size, num_replicas or 1)
        self._replica = replica
        # everything that decides which windows a batch contains, except the replica's own number
        self._origin = {
            "data": self._tokens.digest,
            "tokens": len(self._tokens),
            "seed": seed,
            "sequence_length": sequence_length,
            "batch_size": batch_size,
            "num_replicas": num_replicas,
            "sharding": sharding,
        }
        self._seed, self._length, self._batch_size = seed, sequence_length, batch_size
        self._num_replicas, self._contiguous = num_replicas, sharding == "contiguous"
        self._windows, self._shares = num_windows(self._tokens, sequence_length), num_replicas or 1
        self._steps_per_slice = self._windows // self._shares // batch_size
        self._drawn = 0
        # in the order of their first steps; the first is in force. Contiguous slices have none
        self._assignments = [] if num_replicas is None or self._contiguous else [Assignment.of(num_replicas)]

    @property
    def epochs(self) -> Mapping[str, float]:
        if self._contiguous:
            return {"": self._drawn / self._steps_per_slice}
        if self._assigned is None:
            return {}
        position = self._assigned.positions(self._replica, self._drawn, self._batch_size)[0]
        return self._tokens.epochs_at(int(position), self._length, self._batch_size)

    @property
    def order(self) -> str:
        """The assignment in force if it differs from the one that the settings imply."""
        if self._num_replicas is None or not self._assignments or self._assignments[0].from_step == 0:
            return ""
        return msgspec.json.encode(self._assignments[0]).decode()

    def next_batch(self) -> Batch:
        batch = _gather(self._tokens, self._next_begins(), self._length)
        self.skip_batch()
        return batch

    def skip_batch(self) -> None:
        self._drawn += 1
        self._drop_ended()

    def assign(self, assignment: Assignment) -> None:
        """Use this assignment from its first step on; it replaces another with the same first step."""
        if self._contiguous or self._replica not in assignment.members or assignment.from_step < self._drawn:
            raise ConfigurationError(
                f"Replica {self._replica}, which has drawn {self._drawn} batches with sharding "
                f"{self._origin['sharding']!r}, can't draw by an assignment from step {assignment.from_step} on to the "
                f"members {assignment.members!r:.80}."
            )
        others = [each for each in self._assignments if each.from_step != assignment.from_step]
        self._assignments = sorted([*others, assignment], key=lambda each: each.from_step)
        self._drop_ended()

    def join_at(self, step: int, order: str) -> None:
        """Begin at a step as `Batches.join_at` describes; if members may change at any time, `assign` must follow."""
        if order:
            try:
                assignment = msgspec.json.decode(order, type=Assignment)
                assignment.positions(self._replica, step, self._batch_size)
            except (msgspec.MsgspecError, ConfigurationError) as error:
                raise CheckpointError(
                    f"The order {order!r:.200} of another replica can't be followed: {error}"
                ) from error
            self._assignments = [assignment]
        if self._num_replicas is None:
            self._assignments = []
        self._drawn = step

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor as JSON. Replicas at the same step have equal cursors."""
        return {**self._origin, "drawn": self._drawn, "assignments": as_message(self._assignments)}

    def load_state_dict(self, state: Cursor) -> None:
        check_cursor(state, self._origin, ("drawn", "assignments"))
        self._drawn, self._assignments = state["drawn"], read_message(state["assignments"], list[Assignment])
        self._drop_ended()

    def resume_from(self, cursor_of: Callable[[int], Cursor], before: int) -> None:
        state = cursor_of(0)
        check_cursor(state, {**self._origin, "num_replicas": before}, ("drawn", "assignments"))
        if self._contiguous or self._num_replicas is None:
            raise CheckpointError(
                f"With sharding={self._origin['sharding']!r} each of the {before} replicas drew from its own slice, "
                "and another number of replicas can't continue from there. The cursor was not loaded."
            )
        last = read_message(state["assignments"], list[Assignment])[-1]
        self._drawn = state["drawn"]
        self._assignments = [last.following(self._drawn, range(self._num_replicas), self._batch_size)]

    def close(self) -> None:
        pass

    @property
    def _assigned(self) -> Assignment | None:
        """The assignment in force at the next step."""
        return next((each for each in self._assignments[:1] if each.from_step <= self._drawn), None)

    def _next_begins(self) -> NDArray[np.int64]:
        """Return the ``(batch_size,)`` tokens at which the windows of the next batch begin."""
        if self._contiguous:
            epoch, step = divmod(self._drawn, self._steps_per_slice)
            begin, end = (number * self._windows // self._shares for number in (self._replica, self._replica + 1))
            key = f"seed {self._seed}, epoch {epoch}, replica {self._replica}"
            places = step * self._batch_size + np.arange(self._batch_size)
            return (begin + permute(places, end - begin, key)) * self._length
        if self._assigned is None:
            raise ConfigurationError(f"Replica {self._replica} has no assignment for step {self._drawn}.")
        positions = self._assigned.positions(self._replica, self._drawn, self._batch_size)
        return self._tokens.begins_at(positions, self._length, self._batch_size, self._seed)

    def _drop_ended(self) -> None:
        while len(self._assignments) > 1 and self._assignments[1].from_step <= self._drawn:
            del self._assignments[0]


_WAIT_S = 0.01  # how long to wait for the thread to end before draining its queue again


class _Made(NamedTuple):
    """A batch with the cursor and epochs after it, or the error that occurred instead."""

    batch: Batch | BaseException
    cursor: dict[str, Any]
    epochs: Mapping[str, float]


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
        self._cursor, self.epochs = batches.state_dict(), batches.epochs
        self._queue: queue.Queue[_Made] = queue.Queue(ahead)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def order(self) -> str:
        with self._paused():
            return self._batches.order

    def next_batch(self) -> Batch:
        if self._error is not None:
            raise self._error
        if self._thread is None:
            self._thread = threading.Thread(target=self._make, name=self._called, daemon=True)
            self._thread.start()
        made = self._queue.get()
        if isinstance(made.batch, BaseException):
            self._error = made.batch
            self._end()
            raise made.batch
        self._cursor, self.epochs = made.cursor, made.epochs
        return made.batch

    def skip_batch(self) -> None:
        with self._paused():
            self._batches.skip_batch()

    def assign(self, assignment: Assignment) -> None:
        with self._paused():
            self._batches.assign(assignment)

    def join_at(self, step: int, order: str) -> None:
        with self._paused():
            self._batches.join_at(step, order)

    def state_dict(self) -> dict[str, Any]:
        return self._cursor

    def load_state_dict(self, state: Cursor) -> None:
        with self._paused():
            self._batches.load_state_dict(state)

    def resume_from(self, cursor_of: Callable[[int], Cursor], before: int) -> None:
        with self._paused():
            self._batches.resume_from(cursor_of, before)

    def close(self) -> None:
        self._end()
        self._batches.close()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Stop the thread and set the batches to the cursor while the context is open."""
        if self._thread is not None or self._error is not None:
            self._end()
            self._batches.load_state_dict(self._cursor)
            self._error = None
        try:
            yield
        finally:
            self._cursor, self.epochs = self._batches.state_dict(), self._batches.epochs

    def _make(self) -> None:
        while not self._stop.is_set():
            try:
                made = _Made(self._batches.next_batch(), self._batches.state_dict(), self._batches.epochs)
            except BaseException as error:  # raised where the batch would have been returned
                made = _Made(error, self._cursor, self.epochs)
            self._queue.put(made)
            if isinstance(made.batch, BaseException):
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
