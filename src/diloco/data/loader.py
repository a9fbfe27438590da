"""Batches of tokens: each replica draws its own, in an order whose position is saved as a few numbers.

A `Sampler` draws from tokens in memory or files, a `DocumentStream` from documents that it reads during training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Any, NotRequired, TypeAlias, TypedDict, Unpack

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diloco.data.chat import PackedRows
from diloco.data.order import Assignment, as_message, read_message, windows_at
from diloco.data.source import Source, is_heldout
from diloco.data.tokenizer import Tokenizer
from diloco.data.tokens import PackedTokens, TokenArray
from diloco.errors import CheckpointError, ConfigurationError, DataError
from diloco.units import diff

__all__ = ["Batches", "Cursor", "DocumentStream", "Drawing", "Sampler", "heldout_batches"]

Batch: TypeAlias = tuple[Tensor, Tensor]
"""Inputs and targets, each ``(batch_size, sequence_length)`` int64 on the CPU; negative targets are not counted."""

Cursor: TypeAlias = Mapping[str, Any]  # the JSON value that `Batches.state_dict` returns
State: TypeAlias = tuple[Cursor, float]  # a cursor, and the epochs there


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
    def epochs(self) -> float:
        """How often all replicas together have drawn all of the data so far."""
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
        self._check(state)
        self._settle()
        self._restore(state)

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

    def _check(self, state: Cursor) -> None:
        """Raise `CheckpointError` unless ``state`` is a cursor of these batches."""
        mine = self._origin | {name: state.get(name, "a value") for name in self.moves}
        if words := diff(state, mine, "the data cursor", "this run", mine):
            raise CheckpointError(
                f"{words}. It works only with the data and settings with which it was saved. It was not loaded."
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


def _gather(tokens: PackedTokens | PackedRows, windows: NDArray[np.int64], sequence_length: int) -> Batch:
    """Return inputs and targets of these windows."""
    inputs = np.empty((len(windows), sequence_length), dtype=np.int64)
    targets = np.empty_like(inputs)
    for row, window in enumerate(windows.tolist()):
        tokens.read(window, inputs[row], targets[row])
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def heldout_batches(
    tokens: PackedTokens | PackedRows | TokenArray, sequence_length: int, batch_size: int, max_sequences: int
) -> Iterator[Batch]:
    """Return an iterator of batches for evaluation: always the same windows, spread evenly over ``tokens``, in order.

    At most ``max_sequences`` windows are used; 0: all. The last batch may be smaller. `DataError` for too few tokens is
    raised at once, not at the first batch.

    >>> [inputs[:, 0].tolist() for inputs, _ in heldout_batches(np.arange(21), 2, batch_size=2, max_sequences=3)]
    [[0, 6], [12]]
    """
    packed = PackedTokens([tokens]) if isinstance(tokens, np.ndarray) else tokens
    windows = packed.num_windows(sequence_length)
    if windows < 1:
        raise DataError(
            f"There are only {len(tokens)} held-out tokens, but one sequence of {sequence_length} needs "
            f"{sequence_length + 1}. Use more text, a larger data.heldout_fraction, or shorter sequences."
        )
    count = min(max_sequences or windows, windows)
    chosen = np.arange(count) * windows // count
    return (
        _gather(packed, chosen[first : first + batch_size], sequence_length) for first in range(0, count, batch_size)
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

    def __init__(self, tokens: PackedTokens | PackedRows | TokenArray, **drawing: Unpack[Drawing]) -> None:
        self._tokens = PackedTokens([tokens]) if isinstance(tokens, np.ndarray) else tokens
        super().__init__({"data": self._tokens.digest, "tokens": len(self._tokens)}, drawing)
        members, length = range(self._num_replicas or 0), self._length
        self._num_windows, needed = self._tokens.num_windows(length), self._batch_size * max(1, len(members))
        if self._num_windows < needed:
            raise DataError(
                f"{len(self._tokens)} training tokens make {self._num_windows} sequences of {length}, but one batch of "
                f"{self._batch_size} for each replica needs {needed}, that is {needed * length + 1} tokens. Use more "
                "text, fewer replicas, smaller batches or shorter sequences."
            )
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

    def _draw(self) -> Batch:
        assignment = self._assigned
        if assignment is None:
            raise ConfigurationError(f"Replica {self._replica} has no assignment for step {self._drawn}.")
        positions = assignment.positions(self._replica, self._drawn, self._batch_size)
        windows = windows_at(positions, self._num_windows, self._batch_size, self._seed)
        batch = _gather(self._tokens, windows, self._length)
        self._advance()
        return batch

    def _state(self) -> State:
        """Return cursor and epochs. Replicas at the same step have equal cursors."""
        cursor = {**self._origin, "drawn": self._drawn, "assignments": as_message(self._assignments)}
        if self._assigned is None:
            return cursor, 0.0
        position = int(self._assigned.positions(self._replica, self._drawn, self._batch_size)[0])
        return cursor, position / (self._num_windows // self._batch_size * self._batch_size)

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


_BLOCK = 64  # documents that are tokenised at a time


class _Place(msgspec.Struct, kw_only=True):
    """Where a replica is in its documents; part of its cursor."""

    rows: Any = None  # the state of the data set before the block of documents to draw from; None: at the beginning
    offset: int = 0  # the tokens of the block that have been drawn
    last: int  # the token before the next one to draw
    epoch: int = 0


class DocumentStream(Batches):
    """The `Batches` of one replica that reads, tokenises and packs its documents meanwhile, in the order of the source.

    ``datasets.distributed.split_dataset_by_node`` divides them among the replicas, whose number can't change. Documents
    are packed end to end, each followed by the end-of-document token, so every token is a target once.
    """

    moves = ("drawn", "place")

    def __init__(
        self, source: Source, tokenizer: Tokenizer, *, data: str, heldout_fraction: float, **drawing: Unpack[Drawing]
    ) -> None:
        super().__init__({"stream": data}, drawing)
        self._source, self._tokenizer, self._heldout_fraction = source, tokenizer, heldout_fraction
        self._stream, self._drawn = source.stream(), 0
        self._go_on(_Place(last=tokenizer.eos_id))

    def skip_batch(self) -> None:
        """Draw a batch and discard it."""
        self.next_batch()

    def close(self) -> None:
        super().close()
        del self._texts  # iterators of `datasets` that end with the interpreter print errors

    def _go_on(self, place: _Place) -> None:
        """Open the documents at a place."""
        from datasets.distributed import split_dataset_by_node

        self._place, self._next_rows, self._is_empty = place, place.rows, not (place.rows or place.offset)
        self._rows = split_dataset_by_node(self._stream, rank=self._replica, world_size=self._num_replicas or 1)
        if place.rows is not None:
            self._rows.load_state_dict(place.rows)
        self._texts = self._source.texts(("a record of the stream", row) for row in self._rows)
        self._tokens = self._next_block() if place.offset else np.zeros(0, np.int64)

    def _next_block(self) -> NDArray[Any]:
        """Return the tokens of the next block of documents to train on; none at the end of an epoch."""
        before, texts = self._next_rows, list(islice(self._texts, _BLOCK))
        if not texts and self._is_empty:
            raise DataError(
                "There are no documents to train on: all are empty, held out, or those of other replicas. Give more "
                "text or a smaller data.heldout_fraction."
            )
        if not texts:
            self._go_on(_Place(last=self._place.last, epoch=self._place.epoch + 1))
            return self._tokens
        self._place.rows, self._next_rows = before, self._rows.state_dict()
        train = [text for text in texts if text and not is_heldout(text, self._heldout_fraction)]
        self._is_empty = self._is_empty and not train
        return self._tokenizer.encode_documents(train)

    def _state(self) -> State:
        place = msgspec.structs.asdict(self._place)
        return {**self._origin, "drawn": self._drawn, "place": place}, float(self._place.epoch)

    def _restore(self, state: Cursor) -> None:
        self._drawn = state["drawn"]
        self._go_on(read_message(state["place"], _Place))

    def _draw(self) -> Batch:
        before, _ = self._state()
        try:
            rows = torch.tensor([self._row() for _ in range(self._batch_size)], dtype=torch.int64, device="cpu")
        except BaseException:
            self._restore(before)
            raise
        self._drawn += 1
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def _row(self) -> list[int]:
        """Return the token before the next ones to draw, and those."""
        row = [self._place.last]
        while len(row) <= self._length:
            if self._place.offset == len(self._tokens):
                self._tokens, self._place.offset = self._next_block(), 0
            offset = self._place.offset
            end = min(offset + self._length + 1 - len(row), len(self._tokens))
            row += self._tokens[offset:end].tolist()
            self._place.offset = end
        self._place.last = row[-1]
        return row
