"""Which sequences a replica draws at a step, a pure function of the run's seed, the members and the step; and batches.

The sequences of a run are one endless stream of positions 0, 1, 2, ... At every step its members divide the next
positions among themselves, one batch each (`Assignment`). When the members change, the stream continues where the old
ones would stop (`Shares`): no position is drawn twice; those that a leaver did not draw wait for the next epoch. A
shuffle of each epoch maps positions to windows of the tokens (`windows_at`), from which a `Sampler` draws.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, TypeAlias, TypedDict, TypeVar, Unpack

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diloco.data.chat import PackedRows
from diloco.data.source import warn_once
from diloco.data.tokens import PackedTokens
from diloco.errors import CheckpointError, ConfigurationError, DataError
from diloco.units import diff
from diloco.waiting import described

T = TypeVar("T")

_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # the step of splitmix64
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]  # steps and positions fit int64
_Members = Annotated[tuple[_Count, ...], msgspec.Meta(min_length=1, max_length=2**16)]


def as_message(value: object) -> Any:
    """Return a value as JSON, which `read_message` reads."""
    return msgspec.json.decode(msgspec.json.encode(value))


def read_message(message: object, kind: type[T]) -> T:
    """Return the value that a message of a peer or a file describes; raise `ConfigurationError` if it is malformed."""
    try:
        return msgspec.convert(message, described(kind))
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"The data's order can't be read: {error}.") from error


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    """The positions that each member draws from a given inner step on.

    At inner step t the member at index i of ``members`` draws B positions from ``start + ((t - from_step) *
    len(members) + i) * B`` on.

    >>> two = Assignment(0, (0, 1), 0)
    >>> two.positions(1, step=3, batch_size=4)
    array([28, 29, 30, 31])
    >>> two.following(6, (0,), batch_size=4)
    Assignment(from_step=6, members=(0,), start=48)
    """

    from_step: _Count  # the first inner step of the assignment
    members: _Members  # replica numbers in ascending order
    start: _Count  # all positions from this one on are still to be drawn

    def __post_init__(self) -> None:
        if any(one >= other for one, other in pairwise(self.members)):
            raise ValueError(f"the members {self.members!r:.80} are not in ascending order")

    def positions(self, member: int, step: int, batch_size: int) -> NDArray[np.int64]:
        """Return the ``(batch_size,)`` int64 positions that a member draws at an inner step."""
        if member not in self.members or step < self.from_step:
            raise ConfigurationError(f"Replica {member} draws nothing at step {step} by {self!r:.200}.")
        begin = self._position(step, batch_size) + self.members.index(member) * batch_size
        return np.arange(begin, begin + batch_size, dtype=np.int64)

    def following(self, from_step: int, members: Sequence[int], batch_size: int) -> Assignment:
        """Return the assignment from a later step on; what this one assigns to earlier steps counts as drawn."""
        return Assignment(from_step, tuple(members), self._position(from_step, batch_size))

    def _position(self, step: int, batch_size: int) -> int:
        return self.start + (step - self.from_step) * len(self.members) * batch_size


class Shares(msgspec.Struct, frozen=True):
    """The assignments of an elastic run that have not ended yet; all members agree on them.

    A view changes while its members are at different steps, and none of them stops for it. So they keep using their
    assignment for ``margin`` further steps, within which every one of them has to wait for a round of the next view.
    The next assignment begins there. Until then, a joiner draws from positions that are reserved for it alone.

    >>> both = Shares.of((0,)).following(10, (0, 1), joined=(1,), margin=5, batch_size=4)
    >>> [assignment.from_step for assignment in both.of_member(0)]
    [0, 15]
    >>> both.of_member(1)  # at first what comes after what replica 0 draws until then
    (Assignment(from_step=10, members=(1,), start=60), Assignment(from_step=15, members=(0, 1), start=80))
    """

    # in the order in which they begin; each is in force until the next one begins
    chain: Annotated[tuple[Assignment, ...], msgspec.Meta(min_length=1)]
    # one assignment for each replica that joined, with the step from which the chain includes it
    aside: tuple[tuple[Assignment, _Count], ...] = ()

    @classmethod
    def of(cls, members: Sequence[int]) -> Shares:
        """Return the shares of a run that begins with ``members``."""
        return cls((Assignment(0, tuple(members), 0),))

    def following(
        self, from_step: int, members: Sequence[int], *, joined: Collection[int], margin: int, batch_size: int
    ) -> Shares:
        """Return the shares after a change of the view.

        Args:
            from_step: a step of the next view that no member has begun when the change is agreed on; not before that of
                any earlier change.
            members: the members of the next view, in ascending order.
            joined: the members that were not in the view before.
            margin: steps within which every member waits for a round.
            batch_size: sequences per batch of a replica (B).
        """
        newest, oldest = self.chain[-1], from_step - margin  # no member is further behind
        begins = max(from_step + margin, newest.from_step)
        next_one = newest.following(begins, members, batch_size)
        aside, start = [kept for kept in self.aside if kept[1] > oldest], next_one.start
        for replica in sorted(joined):
            aside.append((Assignment(from_step, (replica,), start), begins))
            start += (begins - from_step) * batch_size
        chain = [assignment for assignment, after in pairwise(self.chain) if after.from_step > oldest]
        chain += [newest] if newest.from_step < begins else []
        return Shares((*chain, Assignment(begins, next_one.members, start)), tuple(aside))

    def of_member(self, member: int) -> tuple[Assignment, ...]:
        """Return the assignments that a member's sampler needs, in the order in which they begin."""
        reserved = [kept for kept in self.aside if kept[0].members == (member,)][-1:]
        begins = reserved[0][1] if reserved else 0  # after a rejoin, only the new ones
        shared = [
            assignment for assignment in self.chain if member in assignment.members and assignment.from_step >= begins
        ]
        return (*(assignment for assignment, _ in reserved), *shared)


def permute(positions: NDArray[np.int64], size: int, key: str) -> NDArray[np.int64]:
    """Return the images of ``positions``, (n,) int64, under the permutation of ``range(size)`` that ``key`` names.

    It is computed only where a batch needs it, by integer arithmetic that all library versions agree on: a Feistel
    network. A number below ``side * side >= size`` is a pair (left, right), and each round maps it to ``(right, (left +
    f(right)) mod side)``, which is invertible for any f. The few images outside the range are mapped again.

    >>> permute(np.arange(8), 8, "epoch 0").tolist()
    [2, 5, 4, 0, 1, 6, 3, 7]
    """
    side = math.isqrt(size - 1) + 1
    round_keys = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest(), dtype="<u8")
    images = _feistel(positions.astype(np.uint64), side, round_keys)
    # This ends: it follows a cycle of the larger permutation, and the cycle contains the position it began at.
    while (outside := np.flatnonzero(images >= size)).size:
        images[outside] = _feistel(images[outside], side, round_keys)
    return images.astype(np.int64)


def windows_at(positions: NDArray[np.int64], num_windows: int, batch_size: int, seed: int) -> NDArray[np.int64]:
    """Return the windows of the tokens at some positions of the stream.

    An epoch has as many positions as there are windows in whole batches, so a batch of positions that begins at a
    multiple of the batch size lies in one epoch and contains no window twice. The fewer than ``batch_size`` windows
    left over differ between epochs, because each epoch is shuffled anew.

    Args:
        positions: (n,) int64, at least 0.
        num_windows: windows of the tokens (W), at least ``batch_size``.
        batch_size: sequences per batch of a replica (B).
        seed: of the run; with the number of the epoch, it is the key of the shuffle.

    >>> windows_at(np.arange(10), num_windows=7, batch_size=2, seed=0).tolist()
    [5, 3, 6, 4, 0, 2, 1, 4, 3, 6]
    """
    epochs, places = np.divmod(positions, num_windows // batch_size * batch_size)
    windows = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():  # after a change of the members, a batch may contain positions of two
        of_epoch = epochs == epoch
        windows[of_epoch] = permute(places[of_epoch], num_windows, f"seed {seed}, epoch {epoch}")
    return windows


def deal(first: int, count: int, num_replicas: int, key: str) -> NDArray[np.int64]:
    """Return the replica of each of ``count`` documents from number ``first`` on: ``(count,)`` int64.

    Each run of M documents goes to M different replicas, in an order that ``key`` draws anew for every run. So the
    replicas get equally many, of every kind, whatever the period of their order.

    >>> deal(0, 8, 2, "epoch 0").tolist(), deal(3, 5, 2, "epoch 0").tolist()
    ([1, 0, 1, 0, 1, 0, 0, 1], [0, 1, 0, 0, 1])
    """
    runs, places = np.divmod(np.arange(first, first + count, dtype=np.int64), num_replicas)
    first_run = first // num_replicas
    num_runs = -(-(first + count) // num_replicas) - first_run
    candidates = np.arange(first_run * num_replicas, (first_run + num_runs) * num_replicas, dtype=np.uint64)
    begin = np.uint64(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little"))
    scores = _mix(begin + candidates * _GOLDEN).reshape(num_runs, num_replicas)
    order = scores.argsort(axis=1, kind="stable")  # of each run, the replica of each place
    replicas: NDArray[np.int64] = order[runs - first_run, places]
    return replicas


def _feistel(numbers: NDArray[np.uint64], side: int, round_keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    left, right = np.divmod(numbers, np.uint64(side))
    for round_key in round_keys:
        left, right = right, (left + _mix(right ^ round_key) % np.uint64(side)) % np.uint64(side)
    return left * np.uint64(side) + right


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of splitmix64: every bit of the input flips about half the bits of the output."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


Batch: TypeAlias = tuple[Tensor, Tensor]
"""Inputs and targets, each ``(batch_size, sequence_length)`` int64 on the CPU; negative targets are not counted."""

Cursor: TypeAlias = Mapping[str, Any]  # the JSON value that `Batches.state_dict` returns


class Drawing(TypedDict):
    """The arguments that determine the batches of one replica."""

    sequence_length: int  # tokens per sequence (L)
    batch_size: int  # sequences per batch of this replica (B)
    replica: int  # the number of this replica (m)
    # M, the replicas that draw until `assign` changes them. None: members may change at any time, and nothing can be
    # drawn before the first `assign`
    num_replicas: int | None
    seed: int  # part of the key of every shuffle; the same for all replicas


class Batches(ABC):
    """Batches of one replica, in an order whose position is saved as a few numbers; ``data`` identifies the data."""

    def __init__(self, data: Mapping[str, Any], drawing: Drawing) -> None:
        self._replica, self._num_replicas, self._seed = drawing["replica"], drawing["num_replicas"], drawing["seed"]
        self._batch_size, self._length = drawing["batch_size"], drawing["sequence_length"]
        # everything that decides what a batch contains, except the replica's own number; part of the cursor
        self._origin = {**data, **{name: value for name, value in drawing.items() if name != "replica"}}

    @property
    @abstractmethod
    def epochs(self) -> float:
        """How often all replicas together have drawn all of the data so far."""

    @abstractmethod
    def next_batch(self) -> Batch:
        """Return the next batch and advance the cursor, which does not move if an error is raised."""

    def skip_batch(self) -> None:
        """Advance the cursor by one batch, which no replica draws in this epoch."""
        self.next_batch()

    def assign(self, assignment: Assignment) -> None:
        """Draw by this assignment from its first step on, and by the current one until then."""
        self.join_at(assignment.from_step)

    def join_at(self, step: int) -> None:
        """Begin at an inner step, in a run whose members may change by the assignment that must follow."""
        raise ConfigurationError(
            f"Replica {self._replica} can't join a run that streams its data, or see others join it, at step {step}: "
            "only each replica itself knows what it has read. Resume all replicas from their checkpoints, or use "
            "tokens made by `diloco tokenize`."
        )

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the cursor: the position after the last batch that `next_batch` returned, as JSON."""

    def load_state_dict(self, state: Cursor) -> None:
        """Continue after the batch after which ``state`` was saved; raise `CheckpointError` if it is of other data."""
        mine = {name: self._origin.get(name, state.get(name, "a value")) for name in self.state_dict()}
        if difference := diff(state, mine, "the data cursor", "this run", mine):
            raise CheckpointError(
                f"{difference}. It works only with the data and settings with which it was saved. It was not loaded."
            )
        self._restore(state)

    @abstractmethod
    def _restore(self, state: Cursor) -> None:
        """Continue from a cursor of these batches."""

    def close(self) -> None:  # noqa: B027  # only a stream works in the background
        """Stop all background work; nothing can be drawn afterwards."""


def _gather(tokens: PackedTokens | PackedRows, windows: NDArray[np.int64], sequence_length: int) -> Batch:
    """Return inputs and targets of these windows."""
    inputs = np.empty((len(windows), sequence_length), dtype=np.int64)
    targets = np.empty_like(inputs)
    for row, window in enumerate(windows.tolist()):
        tokens.read(window, inputs[row], targets[row])
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def heldout_windows(
    tokens: PackedTokens | PackedRows, sequence_length: int, max_sequences: int
) -> tuple[NDArray[np.int64], int]:
    """Return the windows to evaluate on, always the same ones, spread evenly over ``tokens``, in order; and their
    length.

    At most ``max_sequences`` windows are used; 0: all. Fewer tokens than a window needs are one shorter window. Raise
    `DataError` if there is nothing to predict.
    """
    windows = tokens.num_windows(sequence_length)
    if not windows and isinstance(tokens, PackedTokens) and len(tokens) > 1:
        windows, sequence_length = 1, len(tokens) - 1
    if not windows:
        raise DataError("There is no text to evaluate on, or too little to hold some of it out. Give more text.")
    count = min(max_sequences or windows, windows)
    return np.arange(count) * windows // count, sequence_length


def heldout_batches(
    tokens: PackedTokens | PackedRows, sequence_length: int, batch_size: int, max_sequences: int
) -> Iterator[Batch]:
    """Return an iterator of batches of the `heldout_windows`. The last one may be smaller.

    >>> batches = heldout_batches(PackedTokens([np.arange(21)]), 2, batch_size=2, max_sequences=3)
    >>> [inputs[:, 0].tolist() for inputs, _ in batches]
    [[0, 6], [12]]
    """
    chosen, length = heldout_windows(tokens, sequence_length, max_sequences)  # raises at once, not at the first batch
    return (_gather(tokens, chosen[first : first + batch_size], length) for first in range(0, len(chosen), batch_size))


class Sampler(Batches):
    """The `Batches` of one replica, in an order that is a pure function of the arguments and the number drawn so far.

    In each epoch all windows are permuted anew, the same way for every replica. The epochs form one stream of positions
    that the replicas share (`Assignment`): M replicas with batches of B see together, step by step, what one replica
    with batches of M * B sees in its first epoch. An epoch consists of whole batches; the windows left out of it are
    others in the next one. If there are fewer than one batch for each replica needs, they count several times.

    Raises:
        DataError: there are too few tokens for one sequence.

    >>> tokens = PackedTokens([np.arange(13)])
    >>> sampler = Sampler(tokens, sequence_length=3, batch_size=2, replica=0, num_replicas=2, seed=0)
    >>> inputs, targets = sampler.next_batch()
    >>> inputs.shape, bool((targets == inputs + 1).all())
    (torch.Size([2, 3]), True)
    """

    def __init__(self, tokens: PackedTokens | PackedRows, **drawing: Unpack[Drawing]) -> None:
        super().__init__({"data": tokens.digest, "tokens": len(tokens)}, drawing)
        members, length = range(self._num_replicas or 0), self._length
        self._tokens, self._distinct = tokens, tokens.num_windows(length)
        if not self._distinct:
            raise DataError(
                f"{len(tokens)} training tokens are fewer than one sequence of {length} needs, that is {length + 1}. "
                "Use more text or shorter sequences."
            )
        needed = self._batch_size * max(1, len(members))
        repeats = -(-needed // self._distinct)
        if repeats > 1:
            sequences = "training sequence" if self._distinct == 1 else "training sequences"
            warn_once(
                f"The text gives only {self._distinct:,} {sequences} of {length} tokens, and a step of all replicas "
                f"has {needed:,}, so it draws some of them several times. Use more text, smaller batches or shorter "
                "sequences."
            )
        self._num_windows = self._distinct * repeats  # the same ones, several times
        self._drawn = 0
        # in the order of their first steps; the first is in force
        self._assignments = [Assignment(0, tuple(members), 0)] if members else []

    @property
    def epochs(self) -> float:
        if self._assigned is None:
            return 0.0
        position = int(self._assigned.positions(self._replica, self._drawn, self._batch_size)[0])
        repeats = self._num_windows // self._distinct
        return position * repeats / (self._num_windows // self._batch_size * self._batch_size)

    def next_batch(self) -> Batch:
        if self._assigned is None:
            raise ConfigurationError(f"Replica {self._replica} has no assignment for step {self._drawn}.")
        positions = self._assigned.positions(self._replica, self._drawn, self._batch_size)
        windows = windows_at(positions, self._num_windows, self._batch_size, self._seed)
        batch = _gather(self._tokens, windows % self._distinct, self._length)
        self._advance()
        return batch

    def skip_batch(self) -> None:
        self._advance()

    def assign(self, assignment: Assignment) -> None:
        """Use this assignment from its first step on; it replaces another with the same first step."""
        if self._replica not in assignment.members or assignment.from_step < self._drawn:
            raise ConfigurationError(
                f"Replica {self._replica}, which has drawn {self._drawn} batches, can't draw by the assignment from "
                f"step {assignment.from_step} on to the members {assignment.members!r:.80}."
            )
        others = [other for other in self._assignments if other.from_step != assignment.from_step]
        self._assignments = sorted([*others, assignment], key=lambda known: known.from_step)
        self._advance(0)

    def join_at(self, step: int) -> None:
        self._assignments = [] if self._num_replicas is None else self._assignments
        self._drawn = step

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor. Replicas at the same step have equal ones."""
        return {**self._origin, "drawn": self._drawn, "assignments": as_message(self._assignments)}

    def _restore(self, state: Cursor) -> None:
        self._drawn, self._assignments = state["drawn"], read_message(state["assignments"], list[Assignment])
        self._advance(0)

    @property
    def _assigned(self) -> Assignment | None:
        """The assignment in force at the next step."""
        return next((assignment for assignment in self._assignments[:1] if assignment.from_step <= self._drawn), None)

    def _advance(self, steps: int = 1) -> None:
        """Advance by some steps, and drop the assignments that have ended."""
        self._drawn += steps
        while len(self._assignments) > 1 and self._assignments[1].from_step <= self._drawn:
            del self._assignments[0]
