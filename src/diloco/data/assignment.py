"""Which training sequences a replica draws at a step: a pure function of the run's seed, the members and the step.

The sequences of a run are one endless stream of positions 0, 1, 2, ... At every step its members divide the next
positions among themselves, one batch each. When the members change, the stream continues where the old members stopped:
no position is used twice, and none is lost if a replica that leaves returns the positions it did not use. A shuffle of
each epoch (`windows_at`) maps positions to windows of the tokens. Every replica computes this locally; they only have
to agree on the `Assignment`, a few numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from reprlib import repr as shortened
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

from diloco.errors import ConfigurationError

__all__ = ["Assignment", "Drawing", "Range", "Sharding"]

Range: TypeAlias = tuple[int, int]  # positions from the first number up to, but not including, the second

_LIMIT = 2**62  # steps and positions stay below this, so that they fit int64
_MOST_ENTRIES = 2**16  # a message with more members or returned ranges than this is malformed

Sharding = Literal["shuffled", "contiguous"]


class Drawing(TypedDict):
    """The arguments that determine the batches of one replica; see `diloco.data.sampler.Sampler`."""

    sequence_length: int
    batch_size: int
    replica: int
    num_replicas: int | None
    seed: int
    sharding: NotRequired[Sharding]


@dataclass(frozen=True)
class Assignment:
    """The positions that each member draws from a given inner step on.

    The stream is the positions of ``returned`` in order, then ``start``, ``start + 1``, ... At inner step t the member
    at index i of ``members`` draws B items of the stream, beginning at item ``((t - from_step) * len(members) + i) *
    B``.

    Raises:
        ConfigurationError: a number, the members or the ranges are not as described above.

    >>> two = Assignment.of(2)
    >>> two.positions(1, step=3, batch_size=4)
    array([28, 29, 30, 31])
    >>> unused = two.ranges(1, range(4, 6), batch_size=4)  # replica 1 leaves after step 3, applied from step 6
    >>> alone = two.following(6, (0,), batch_size=4, returned=unused)
    >>> alone
    Assignment(from_step=6, members=(0,), start=44, returned=((36, 40),))
    >>> [alone.positions(0, step, batch_size=4).tolist() for step in (6, 7, 8)]
    [[36, 37, 38, 39], [44, 45, 46, 47], [48, 49, 50, 51]]
    """

    from_step: int  # the first inner step of the assignment
    members: tuple[int, ...]  # replica numbers in ascending order
    start: int  # all positions from this one on are still to be drawn
    # ranges of positions below ``start``, in ascending order and disjoint, that a replica left unused. They are drawn
    # first.
    returned: tuple[Range, ...] = ()

    def __post_init__(self) -> None:
        for name, number in (("from_step", self.from_step), ("start", self.start)):
            if not _is_whole(number):
                raise ConfigurationError(
                    f"{name} of an assignment must be an integer of at least 0 and below 2**62, got "
                    f"{shortened(number)}."
                )
        if not _are_members(self.members):
            raise ConfigurationError(
                f"The members of an assignment must be a tuple of 1 to {_MOST_ENTRIES} replica numbers, each once, in "
                f"ascending order, not {shortened(self.members)}."
            )
        if not _are_ranges(self.returned, self.start):
            raise ConfigurationError(
                f"The returned ranges of an assignment must be a tuple of at most {_MOST_ENTRIES} pairs (begin, end) "
                "with begin < end <= start, in ascending order and without overlap, got "
                f"{shortened(self.returned)} with start={self.start}. Positions from start on are not assigned yet, so "
                "they can't be returned."
            )

    @classmethod
    def of(cls, num_replicas: int) -> Assignment:
        """Return the assignment of a run from its first step on, with replicas numbered from 0."""
        if not _is_whole(num_replicas) or not 1 <= num_replicas <= _MOST_ENTRIES:
            raise ConfigurationError(
                f"An assignment needs 1 to {_MOST_ENTRIES} replicas, not {shortened(num_replicas)}."
            )
        return cls(0, tuple(range(num_replicas)), 0)

    def positions(self, member: int, step: int, batch_size: int) -> NDArray[np.int64]:
        """Return the ``(batch_size,)`` int64 positions that a member draws at an inner step.

        Raises:
            ConfigurationError: the member is unknown, the step is before ``from_step``, or the positions would exceed
                2**62.
        """
        begin = self._first_item(member, step, batch_size)
        pieces = self._ranges_of(begin, begin + batch_size)
        if pieces[-1][1] > _LIMIT:
            raise ConfigurationError(
                f"Step {step} in batches of {batch_size} for {len(self.members)} members reaches position "
                f"{pieces[-1][1]}; only positions below 2**62 can be counted."
            )
        return np.concatenate([np.arange(*piece, dtype=np.int64) for piece in pieces])

    def ranges(self, member: int, steps: range, batch_size: int) -> tuple[Range, ...]:
        """Return the positions of a member in consecutive steps, as few ranges.

        These are the ranges that it returns if it leaves before the steps.

        Raises:
            ConfigurationError: the member is unknown, a step is before ``from_step``, or the steps are not consecutive.
        """
        if steps.step != 1:
            raise ConfigurationError(f"{steps} leaves out steps; give consecutive steps.")
        pieces: list[Range] = []
        for step in steps:
            begin = self._first_item(member, step, batch_size)
            pieces += self._ranges_of(begin, begin + batch_size)
        return _merged(pieces)

    def following(
        self, from_step: int, members: tuple[int, ...], batch_size: int, returned: Iterable[Sequence[int]] = ()
    ) -> Assignment:
        """Return the assignment from a later step on, with other members.

        What this one assigns to steps before ``from_step`` counts as assigned. The rest of its returned ranges and the
        new ones come first, in ascending order, so the order in which departures become known does not matter.

        Args:
            from_step: the first inner step of the new assignment, not before this one's.
            members: replica numbers in ascending order.
            batch_size: sequences per batch of a replica (B), the same for all.
            returned: ranges that were assigned to departing replicas before ``from_step`` and not used (see `ranges`),
                in any order; pairs may be lists, because JSON has no tuples.

        Raises:
            ConfigurationError: the step is before this assignment's, or the result would be malformed, above all if a
                range is returned twice or was never assigned.
        """
        used = self._items_before(from_step, batch_size)
        rest: list[Range] = []
        for begin, end in self.returned:
            skipped = min(used, end - begin)
            used -= skipped
            if begin + skipped < end:
                rest.append((begin + skipped, end))
        given = tuple(tuple(each) if isinstance(each, list) else each for each in returned)
        if not all(map(_is_range, given)):
            raise ConfigurationError(
                f"Returned ranges must be pairs (begin, end) of integers with begin < end, got {shortened(given)}."
            )
        together = tuple(sorted([*rest, *((begin, end) for begin, end in given)]))
        # Validated before merging, because merging would hide duplicates.
        checked = Assignment(from_step, members, self.start + used, together)
        start, merged = checked.start, list(_merged(checked.returned))
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        return Assignment(from_step, members, start, tuple(merged))

    def to_message(self) -> list[object]:
        """Return plain lists and integers for JSON: ``[from_step, [member, ...], start, [[begin, end], ...]]``."""
        return [self.from_step, list(self.members), self.start, [list(each) for each in self.returned]]

    @classmethod
    def from_message(cls, message: Any) -> Assignment:
        """Return the assignment from which `to_message` made the message.

        Raises:
            ConfigurationError: the message is malformed, or describes an invalid assignment (see the class).
        """
        match message:
            case [from_step, list(members), start, list(returned)] if all(isinstance(each, list) for each in returned):
                # The constructor checks the types.
                return cls(from_step, tuple(members), start, tuple(map(tuple, returned)))
        raise ConfigurationError(
            "The message of an assignment must be [from_step, [member, ...], start, [[begin, end], ...]], got "
            f"{shortened(message)}."
        )

    def _items_before(self, step: int, batch_size: int) -> int:
        """Return how many items of the stream belong to steps before this one."""
        if not _is_whole(step) or step < self.from_step:
            raise ConfigurationError(
                f"The assignment is for steps from {self.from_step} on, not for {shortened(step)}."
            )
        if not _is_whole(batch_size) or batch_size < 1:
            raise ConfigurationError(f"batch_size must be an integer of at least 1, got {shortened(batch_size)}.")
        return (step - self.from_step) * len(self.members) * batch_size

    def _first_item(self, member: int, step: int, batch_size: int) -> int:
        """Return the item of the stream at which a member's batch of a step begins."""
        if member not in self.members:
            raise ConfigurationError(
                f"Replica {shortened(member)} draws nothing at step {shortened(step)}: from step {self.from_step} on "
                f"the members are {shortened(self.members)}."
            )
        return self._items_before(step, batch_size) + self.members.index(member) * batch_size

    def _ranges_of(self, begin: int, end: int) -> list[Range]:
        """Return the positions of items ``begin`` to ``end`` of the stream as ranges in ascending order."""
        pieces: list[Range] = []
        passed = 0
        for low, high in (*self.returned, (self.start, self.start + end)):
            first, last = max(begin - passed, 0), min(end - passed, high - low)
            if first < last:
                pieces.append((low + first, low + last))
            passed += high - low
        return pieces


def _merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return the same positions as few ranges; the given ones are in ascending order and disjoint."""
    merged: list[Range] = []
    for begin, end in ranges:
        if merged and merged[-1][1] == begin:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return tuple(merged)


def _is_whole(number: object) -> bool:
    """Return whether it is an int in range; bool is excluded, and so are NumPy integers, which JSON does not take."""
    return type(number) is int and 0 <= number < _LIMIT


def _are_members(members: object) -> bool:
    if not isinstance(members, tuple) or not 1 <= len(members) <= _MOST_ENTRIES or not all(map(_is_whole, members)):
        return False
    return all(one < other for one, other in pairwise(members))


def _is_range(pair: object) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and all(map(_is_whole, pair)) and bool(pair[0] < pair[1])


def _are_ranges(ranges: object, start: int) -> bool:
    if not isinstance(ranges, tuple) or len(ranges) > _MOST_ENTRIES or not all(map(_is_range, ranges)):
        return False
    return all(end <= next_begin for (_, end), (next_begin, _) in pairwise([*ranges, (start, start)]))
