"""Draw batches from tokens: each replica draws its own, in an order whose position is saved as a few numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from reprlib import repr as shortened
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from diloco.data.assignment import Assignment, Sharding
from diloco.data.batches import Batch, Cursor, check_cursor, gather
from diloco.data.packed import PackedTokens, num_windows
from diloco.data.permutation import permute
from diloco.errors import CheckpointError, ConfigurationError, nearest

__all__ = ["Sampler"]


class Sampler:
    """The batches of one replica, in an order that is a pure function of the arguments and the number drawn so far.

    ``"shuffled"``: in each epoch all windows are permuted anew, the same way for every replica. The epochs form one
    stream that the replicas share. At step k, replica m takes the B positions from ``(k * M + m) * B`` on, so no
    position is used twice, and M replicas with batches of B see together, step by step, what one replica with batches
    of M * B sees in its first epoch. An epoch consists of whole batches: fewer than B windows are left out of it, and
    the next shuffle leaves out others. If the number of batches of an epoch is not a multiple of M, some replicas begin
    the next epoch within a step. When the members change, `assign` sets what each draws from then on.

    ``"contiguous"``: of n windows, replica m draws from ``[m * n // M, (m + 1) * n // M)``, shuffled within that slice
    in each epoch. So each replica has its own documents (non-iid). An epoch ends for all replicas at once, when some
    replica could not draw another full batch.

    Args:
        tokens: the packed training tokens of one source or a `Mixture`; they are only read, so memory-mapped files
            work. An array ``(n,)`` of integers is a single source.
        sequence_length: tokens per sequence (L).
        batch_size: sequences per batch of this replica (B).
        replica: the number of this replica (m), ``0 <= replica < num_replicas``.
        num_replicas: M, the replicas that draw until `assign` changes them. None: members may change at any time,
            ``replica`` is any number from 0 on, and nothing can be drawn before the first `assign`.
        seed: with the number of the epoch, the key of the shuffle. It must be the same for all replicas.
        sharding: see above.

    Raises:
        ConfigurationError: an argument is out of range.
        DataError: there are too few tokens for one batch for each replica.

    >>> tokens = np.arange(13, dtype=np.uint16)
    >>> sampler = Sampler(tokens, sequence_length=3, batch_size=2, replica=0, num_replicas=2, seed=0)
    >>> inputs, targets = sampler.next_batch()
    >>> inputs.shape, bool((targets == inputs + 1).all())
    (torch.Size([2, 3]), True)
    """

    def __init__(
        self,
        tokens: PackedTokens | NDArray[np.integer[Any]],
        *,
        sequence_length: int,
        batch_size: int,
        replica: int,
        num_replicas: int | None,
        seed: int,
        sharding: Sharding = "shuffled",
    ) -> None:
        shares = 1 if num_replicas is None else num_replicas
        for name, value in (("sequence_length", sequence_length), ("batch_size", batch_size), ("num_replicas", shares)):
            if value < 1:
                raise ConfigurationError(f"{name} must be at least 1, got {value}.")
        if replica < 0 or (num_replicas is not None and replica >= num_replicas):
            numbers = "at least 0" if num_replicas is None else f"from 0 to {num_replicas - 1}"
            raise ConfigurationError(f"With num_replicas={num_replicas}, replica must be {numbers}, got {replica}.")
        if sharding not in get_args(Sharding):
            raise ConfigurationError(f"sharding={sharding!r} is unknown; {nearest(sharding, get_args(Sharding))}")
        if isinstance(tokens, np.ndarray):
            tokens = PackedTokens([tokens])
        if sharding == "contiguous" and num_replicas is None:
            raise ConfigurationError(
                "sharding='contiguous' needs a fixed number of replicas, because each of them has its own slice. "
                "Give num_replicas, or use sharding='shuffled'."
            )
        if sharding == "contiguous" and tokens.shares:
            raise ConfigurationError(
                "sharding='contiguous' works only with a single source. Give one source, or use sharding='shuffled'."
            )
        tokens.check(sequence_length, batch_size, shares)
        windows = num_windows(tokens, sequence_length)
        self._tokens = tokens
        self._sequence_length = sequence_length
        self._batch_size = batch_size
        self._replica = replica
        self._num_replicas = num_replicas
        self._seed = seed
        self._sharding: Sharding = sharding
        self._data = tokens.digest
        self._drawn = 0
        fixed = sharding == "shuffled" and num_replicas is not None
        # in the order of their first steps; the first is in force
        self._assignments = [Assignment.of(shares)] if fixed else []
        # only for contiguous sharding, which has no assignments: each replica keeps its slice of the windows
        self._slice = replica * windows // shares, (replica + 1) * windows // shares
        self._slice_steps = windows // shares // batch_size

    @property
    def epochs(self) -> Mapping[str, float]:
        """Source -> how often all replicas together have drawn all of it; a single source is called ``""``."""
        if self._sharding == "contiguous":
            return {"": self._drawn / self._slice_steps}
        if not self._assignments or self._assignments[0].from_step > self._drawn:
            return {}
        return self._tokens.epochs_at(int(self._next_positions()[0]), self._sequence_length, self._batch_size)

    def next_batch(self) -> Batch:
        """Return inputs and targets, each ``(batch_size, sequence_length)`` int64 on the CPU, and advance the cursor.

        Raises:
            ConfigurationError: nothing is assigned to this replica at this step. The cursor does not move.
        """
        batch = gather(self._tokens, self._next_begins(), self._sequence_length)
        self.skip_batch()
        return batch

    def skip_batch(self) -> None:
        """Advance the cursor as `next_batch` does, without drawing. No replica draws those windows in this epoch."""
        self._drawn += 1
        self._assignments = _in_force(self._assignments, self._drawn)

    def assign(self, assignment: Assignment) -> None:
        """Use this assignment from its first step on, and the current one until then.

        It replaces another assignment with the same first step. Later assignments stay.

        Raises:
            ConfigurationError: it begins before a step that was already drawn, this replica is not one of its members,
                or sharding is contiguous. Nothing changes.
        """
        if self._sharding != "shuffled":
            raise ConfigurationError(
                f"With sharding={self._sharding!r} every replica keeps its own slice of the tokens, so nothing can be "
                "assigned; members can change with sharding='shuffled'. The sampler continues as before."
            )
        if self._replica not in assignment.members:
            raise ConfigurationError(
                f"Replica {self._replica} cannot draw by an assignment to the members {shortened(assignment.members)}. "
                "The sampler continues as before."
            )
        if assignment.from_step < self._drawn:
            raise ConfigurationError(
                f"An assignment from step {assignment.from_step} on comes too late: {self._drawn} batches were already "
                "drawn. The sampler continues as before."
            )
        others = [each for each in self._assignments if each.from_step != assignment.from_step]
        ordered = sorted([*others, assignment], key=lambda each: each.from_step)
        self._assignments = _in_force(ordered, self._drawn)

    def _next_begins(self) -> NDArray[np.int64]:
        """Return the ``(batch_size,)`` tokens at which the windows of the next batch begin."""
        length = self._sequence_length
        if self._sharding == "shuffled":
            return self._tokens.begins_at(self._next_positions(), length, self._batch_size, self._seed)
        epoch, step = divmod(self._drawn, self._slice_steps)
        begin, end = self._slice
        key = f"seed {self._seed}, epoch {epoch}, replica {self._replica}"
        return (begin + permute(step * self._batch_size + np.arange(self._batch_size), end - begin, key)) * length

    def _next_positions(self) -> NDArray[np.int64]:
        """Return the ``(batch_size,)`` positions of the next batch in the stream."""
        if not self._assignments or self._assignments[0].from_step > self._drawn:
            raise ConfigurationError(
                f"Replica {self._replica} has no assignment for step {self._drawn}. Its assignments begin at the steps "
                f"{[each.from_step for each in self._assignments]}. No batch was drawn."
            )
        return self._assignments[0].positions(self._replica, self._drawn, self._batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor as JSON: the batches drawn, what they are drawn from, and the assignments from now on.

        Replicas at the same step have equal cursors, so a joining replica can use the cursor of any other.
        """
        assignments = [each.to_message() for each in self._assignments]
        return {**self._origin(), "drawn": self._drawn, "assignments": assignments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batch after which ``state`` was saved.

        Raises:
            CheckpointError: the cursor is malformed, or belongs to other data or another way of drawing. The message
                names each difference. The sampler does not change.
        """
        drawn = self._check_origin(state)
        assignments = self._assignments_of(state["assignments"], drawn)
        self._drawn, self._assignments = drawn, assignments

    def resume_from(self, cursor_of: Callable[[int], Cursor], before: int) -> None:
        """Continue as `Batches.resume_from` describes, where the earlier replicas stopped in the stream of positions.

        Raises:
            CheckpointError: as `load_state_dict`, or sharding is contiguous, where no other replica can continue a
                slice. The sampler does not change.
        """
        state = cursor_of(0)
        drawn = self._check_origin(state, num_replicas=before)
        if self._sharding != "shuffled" or self._num_replicas is None:
            raise CheckpointError(
                f"With sharding={self._sharding!r} each of the {before} replicas drew from its own slice, and another "
                "number of replicas can't continue from there; only sharding='shuffled' allows it. The cursor was not "
                "loaded."
            )
        (last,) = self._assignments_of(state["assignments"], drawn)[-1:]
        self._assignments = [last.following(drawn, tuple(range(self._num_replicas)), self._batch_size)]
        self._drawn = drawn

    @property
    def order(self) -> str:
        """The assignment in force if it differs from the one that the settings imply; see `Batches.order`."""
        if self._num_replicas is None or not self._assignments or self._assignments[0].from_step == 0:
            return ""
        return json.dumps(self._assignments[0].to_message())

    def join_at(self, step: int, order: str) -> None:
        """Begin at a step as `Batches.join_at` describes; if members may change at any time, `assign` must follow."""
        try:
            assignments = [json.loads(order)] if order else self.state_dict()["assignments"]
        except ValueError as error:
            raise CheckpointError(
                f"The order {order!r:.200} is not JSON: {error}. The cursor was not moved."
            ) from error
        if self._num_replicas is None:
            assignments = []
        self.load_state_dict({**self._origin(), "drawn": step, "assignments": assignments})

    def close(self) -> None:
        """Do nothing: there is no background work."""

    def _check_origin(self, state: Cursor, **others: int | None) -> int:
        """Return how many batches a cursor has drawn; raise unless its origin matches, except for ``others``."""
        check_cursor(state, {**self._origin(), **others}, ("drawn", "assignments"))
        drawn = state["drawn"]
        if type(drawn) is not int or drawn < 0:
            raise CheckpointError(
                f"The number of batches drawn in a data cursor must be an integer of at least 0, got {drawn!r}. It was "
                "not loaded."
            )
        return drawn

    def _assignments_of(self, messages: Any, drawn: int) -> list[Assignment]:
        """Return the assignments of a cursor that are in force at the step ``drawn`` or later."""
        try:
            assignments = [Assignment.from_message(each) for each in messages]
        except (TypeError, ConfigurationError) as error:
            raise CheckpointError(
                f"The assignments of the data cursor cannot be read, {shortened(messages)}: {error} It was not loaded."
            ) from error
        first_steps = [each.from_step for each in assignments]
        if self._sharding == "contiguous" and assignments:
            raise CheckpointError(
                f"The data cursor has {len(assignments)} assignments, but sharding='contiguous' has none. "
                "It was not loaded."
            )
        fixed = self._sharding == "shuffled" and self._num_replicas is not None
        if first_steps != sorted(set(first_steps)) or (fixed and (not first_steps or first_steps[0] > drawn)):
            raise CheckpointError(
                f"After {drawn} batches, the assignments of the data cursor begin at the steps "
                f"{shortened(first_steps)}. At least one is needed, the first must begin at step {drawn} or earlier, "
                "and each must begin after the one before it. It was not loaded."
            )
        return _in_force(assignments, drawn)

    def _origin(self) -> dict[str, int | str | None]:
        """Return everything that decides which windows a batch contains, except the replica's own number."""
        return {
            "data": self._data,
            "tokens": len(self._tokens),
            "seed": self._seed,
            "sequence_length": self._sequence_length,
            "batch_size": self._batch_size,
            "num_replicas": self._num_replicas,
            "sharding": self._sharding,
        }


def _in_force(assignments: list[Assignment], step: int) -> list[Assignment]:
    """Return the assignments that apply to this step or a later one, in the order of their first steps."""
    ended = sum(each.from_step <= step for each in assignments[1:])
    return assignments[ended:]
