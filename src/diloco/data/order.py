"""Which training sequences a replica draws at a step: a pure function of the run's seed, the members and the step.

The sequences of a run are one endless stream of positions 0, 1, 2, ... At every step its members divide the next
positions among themselves, one batch each (`Assignment`). When the members change, the stream continues where the old
ones would stop (`Shares`): no position is drawn twice; those that a leaver did not draw wait for the next epoch. A
shuffle of each epoch maps positions to windows of the tokens (`windows_at`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from diloco.errors import ConfigurationError

__all__ = ["Assignment", "Shares", "as_message", "permute", "read_message", "windows_at"]

T = TypeVar("T")

_ROUNDS = 8
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]  # steps and positions fit int64
_Members = Annotated[tuple[_Count, ...], msgspec.Meta(min_length=1, max_length=2**16)]


def as_message(value: object) -> Any:
    """Return a value as JSON, which `read_message` reads."""
    return msgspec.json.decode(msgspec.json.encode(value))


def read_message(message: object, kind: type[T]) -> T:
    """Return the value that a message of a peer or a file describes; raise `ConfigurationError` if it is malformed."""
    try:
        return msgspec.convert(message, kind)
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
    >>> [each.from_step for each in both.of_member(0)]
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
        aside, start = [each for each in self.aside if each[1] > oldest], next_one.start
        for replica in sorted(joined):
            aside.append((Assignment(from_step, (replica,), start), begins))
            start += (begins - from_step) * batch_size
        chain = [each for each, after in pairwise(self.chain) if after.from_step > oldest]
        chain += [newest] if newest.from_step < begins else []
        return Shares((*chain, Assignment(begins, next_one.members, start)), tuple(aside))

    def of_member(self, member: int) -> tuple[Assignment, ...]:
        """Return the assignments that a member's sampler needs, in the order in which they begin."""
        reserved = [each for each in self.aside if each[0].members == (member,)][-1:]
        begins = reserved[0][1] if reserved else 0  # after a rejoin, only the new ones
        shared = [each for each in self.chain if member in each.members and each.from_step >= begins]
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
