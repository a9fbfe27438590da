"""Draw batches from tokens: each replica draws its own, in an order whose position is saved as a few numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NotRequired, TypeAlias, TypedDict, Unpack

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diloco.data.order import Assignment, as_message, read_message
from diloco.data.packed import PackedTokens, TokenArray, num_windows
from diloco.errors import CheckpointError, ConfigurationError, DataError

__all__ = ["Batch", "Batches", "Cursor", "Drawing", "Sampler", "State", "heldout_batches"]

Batch: TypeAlias = tuple[Tensor, Tensor]
"""Inputs and targets, each ``(batch_size, sequence_length)`` int64 on the CPU; negative targets are not counted."""

Cursor: TypeAlias = Mapping[str, Any]  # the JSON value that `Batches.state_dict` returns
State: TypeAlias = tuple[Cursor, Mapping[str, float]]  # a cursor, and the epochs there


class Drawing(TypedDict):
    """The arguments that determine the batches of one replica."""

    sequence_length: int  # tokens per sequence (L)
    batch_size: int  # sequences per batch of this replica (B)
    replica: int  # the number of this replica (m)
    # M, the replicas that draw until `assign` changes them. None: members may change at any time, and nothing can be
    # drawn before the first `assign`
    num_replicas: int | None
    seed: int  # part of the key of every shuffle; the same for all replicas
    ahead: NotRequired[int]  # batches that a thread prepares during training; 0: none


class Batches(ABC):
    """The batches of one replica, in an order whose position is saved as a few numbers.

    A thread may prepare the next few batches during training. The cursor is that of the last batch returned, whatever
    was prepared. An error in the thread is raised where its batch would have been returned, and again at each attempt.
    ``data`` identifies the data.
    """

    moves: tuple[str, ...]  # what moves in a cursor

    def __init__(self, data: Mapping[str, Any], drawing: Drawing) -> None:
        self._replica, self._ahead = drawing["replica"], drawing.get("ahead", 0)
        self._num_replicas, self._seed = drawing["num_replicas"], drawing["seed"]
        self._batch_size, self._length = drawing["batch_size"], drawing["sequence_length"]
        # everything that decides what a batch contains, except the replica's own number; part of the cursor
        self._origin = {**data, **{name: value for name, value in drawing.items() if name not in ("replica", "ahead")}}
        self._thread = ThreadPoolExecutor(1, f"batches of replica {self._replica}")  # it starts with the first batch
        self._prepared: deque[Future[tuple[Batch, State]]] = deque()
        self._after: State  # after the last batch that was returned

    @property
    def epochs(self) -> Mapping[str, float]:
        """Source -> how often all replicas together have drawn all of it so far; one source alone is called ``""``."""
        return (self._after if self._prepared else self._state())[1]

    @property
    def order(self) -> str:
        """What a joiner must know, as text, to draw what no other replica draws; "" if the settings imply it."""
        return ""

    def next_batch(self) -> Batch:
        """Return the next batch and advance the cursor, which does not move if an error is raised."""
        if not self._ahead:
            return self._draw()
        if not self._prepared:
            self._after = self._state()
        while len(self._prepared) <= self._ahead:
            self._prepared.append(self._thread.submit(lambda: (self._draw(), self._state())))
        batch, self._after = self._prepared[0].result()
        self._prepared.popleft()
        return batch

    @abstractmethod
    def skip_batch(self) -> None:
        """Advance the cursor by one batch, which no replica draws in this epoch."""

    def assign(self, assignment: Assignment) -> None:
        """Draw by this assignment from its first step on, and by the current one until then."""
        self.join_at(assignment.from_step, "")

    def join_at(self, step: int, order: str) -> None:
        """Draw from inner step ``step`` on, as a joiner that has got the `order` of another replica."""
        raise ConfigurationError(
            f"Replica {self._replica} can't join a run that streams its data, or see others join it, at step {step}: "
            "only each replica itself knows what it has read. Resume all replicas from their checkpoints, or use "
            "tokens made by `diloco tokenize`."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor: the position after the last batch that `next_batch` returned, as JSON."""
        return dict((self._after if self._prepared else self._state())[0])

    def load_state_dict(self, state: Cursor) -> None:
        """Continue after the batch after which ``state`` was saved; raise `CheckpointError` if it is of other data."""
        self._check(state, self._num_replicas)
        self._settle()
        self._restore(state)

    @abstractmethod
    def resume_from(self, cursor_of: Callable[[int], Cursor], before: int) -> None:
        """Continue where ``before`` replicas stopped; what they drew is not drawn again in this epoch.

        ``cursor_of`` returns the cursor of a replica; all have drawn the same number of batches.
        """

    def close(self) -> None:
        """Stop all background work; nothing can be drawn afterwards."""
        self._settle()
        self._thread.shutdown()

    def _settle(self) -> None:
        """End the preparations, and go back to the cursor: before anything else is drawn than what was prepared."""
        for batch in self._prepared:
            batch.cancel()
        wait(self._prepared)
        if self._prepared:
            self._prepared.clear()
            self._restore(self._after[0])

    def _check(self, state: Cursor, num_replicas: int | None) -> None:
        """Raise `CheckpointError` unless ``state`` is a cursor of these batches for a number of replicas."""
        origin = {**self._origin, "num_replicas": num_replicas}
        differences = [
            f"{name} is {state.get(name)!r} in the cursor and {value!r} here"
            for name, value in origin.items()
            if state.get(name) != value
        ]
        differences += [f"{name} is missing in the cursor" for name in self.moves if name not in state]
        if differences:
            raise CheckpointError(
                f"The data cursor belongs to other batches: {'; '.join(differences)}. It works only with the data and "
                "settings with which it was saved. It was not loaded."
            )

    @abstractmethod
    def _draw(self) -> Batch:
        """Make the next batch, in whichever thread."""

    @abstractmethod
    def _state(self) -> State:
        """Return cursor and epochs after the last batch that was made."""

    @abstractmethod
    def _restore(self, state: Cursor) -> None:
        """Continue from a cursor of these batches."""


def _gather(tokens: PackedTokens, begins: NDArray[np.int64], sequence_length: int) -> Batch:
    """Return inputs and targets of the windows that begin at these tokens, copied row by row, the fastest way."""
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

    At most ``max_sequences`` windows are used; 0: all. The last batch may be smaller. `DataError` for too few tokens is
    raised at once, not at the first batch.

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


class Sampler(Batches):
    """The `Batches` of one replica, in an order that is a pure function of the arguments and the number drawn so far.

    In each epoch all windows are permuted anew, the same way for every replica. The epochs form one stream of positions
    that the replicas share (`Assignment`): M replicas with batches of B see together, step by step, what one replica
    with batches of M * B sees in its first epoch. An epoch consists of whole batches; the windows left out of it are
    others in the next one.

    Raises:
        DataError: there are too few tokens for one batch for each replica.

    >>> tokens = np.arange(13, dtype=np.uint16)
    >>> sampler = Sampler(tokens, sequence_length=3, batch_size=2, replica=0, num_replicas=2, seed=0)
    >>> inputs, targets = sampler.next_batch()
    >>> inputs.shape, bool((targets == inputs + 1).all())
    (torch.Size([2, 3]), True)
    """

    moves = ("drawn", "assignments")

    def __init__(self, tokens: PackedTokens | TokenArray, **drawing: Unpack[Drawing]) -> None:
        self._tokens = PackedTokens([tokens]) if isinstance(tokens, np.ndarray) else tokens
        super().__init__({"data": self._tokens.digest, "tokens": len(self._tokens)}, drawing)
        members = range(self._num_replicas or 0)
        self._tokens.check(self._length, self._batch_size, len(members) or 1)
        self._drawn = 0
        # in the order of their first steps; the first is in force
        self._assignments = [Assignment(0, tuple(members), 0)] if members else []

    @property
    def order(self) -> str:
        """The assignment in force if it differs from the one that the settings imply."""
        in_force = self.state_dict()["assignments"][:1]
        implied = self._num_replicas is None or not in_force or read_message(in_force[0], Assignment).from_step == 0
        return "" if implied else msgspec.json.encode(in_force[0]).decode()

    def skip_batch(self) -> None:
        self._settle()
        self._advance()

    def assign(self, assignment: Assignment) -> None:
        """Use this assignment from its first step on; it replaces another with the same first step."""
        self._settle()
        if self._replica not in assignment.members or assignment.from_step < self._drawn:
            raise ConfigurationError(
                f"Replica {self._replica}, which has drawn {self._drawn} batches, can't draw by the assignment from "
                f"step {assignment.from_step} on to the members {assignment.members!r:.80}."
            )
        others = [each for each in self._assignments if each.from_step != assignment.from_step]
        self._assignments = sorted([*others, assignment], key=lambda each: each.from_step)
        self._advance(0)

    def join_at(self, step: int, order: str) -> None:
        """Begin at a step as `Batches.join_at` describes; if members may change at any time, `assign` must follow."""
        self._settle()
        if order:
            try:
                assignment = msgspec.json.decode(order, type=Assignment)
                assignment.positions(self._replica, step, self._batch_size)
            except (msgspec.MsgspecError, ConfigurationError) as error:
                raise CheckpointError(f"The data order {order!r:.200} can't be followed: {error}") from error
            self._assignments = [assignment]
        self._assignments = [] if self._num_replicas is None else self._assignments
        self._drawn = step

    def resume_from(self, cursor_of: Callable[[int], Cursor], before: int) -> None:
        self._check(state := cursor_of(0), before)
        self._settle()
        self._restore(state)
        last = self._assignments[-1]
        self._assignments = [last.following(self._drawn, range(self._num_replicas or 1), self._batch_size)]

    def _draw(self) -> Batch:
        assignment = self._assigned
        if assignment is None:
            raise ConfigurationError(f"Replica {self._replica} has no assignment for step {self._drawn}.")
        positions = assignment.positions(self._replica, self._drawn, self._batch_size)
        begins = self._tokens.begins_at(positions, self._length, self._batch_size, self._seed)
        batch = _gather(self._tokens, begins, self._length)
        self._advance()
        return batch

    def _state(self) -> State:
        """Return cursor and epochs. Replicas at the same step have equal cursors."""
        cursor = {**self._origin, "drawn": self._drawn, "assignments": as_message(self._assignments)}
        if self._assigned is None:
            return cursor, {}
        position = int(self._assigned.positions(self._replica, self._drawn, self._batch_size)[0])
        return cursor, self._tokens.epochs_at(position, self._length, self._batch_size)

    def _restore(self, state: Cursor) -> None:
        self._drawn, self._assignments = state["drawn"], read_message(state["assignments"], list[Assignment])
        self._advance(0)

    @property
    def _assigned(self) -> Assignment | None:
        """The assignment in force at the next step."""
        return next((each for each in self._assignments[:1] if each.from_step <= self._drawn), None)

    def _advance(self, steps: int = 1) -> None:
        """Advance by some steps, and drop the assignments that have ended."""
        self._drawn += steps
        while len(self._assignments) > 1 and self._assignments[1].from_step <= self._drawn:
            del self._assignments[0]
