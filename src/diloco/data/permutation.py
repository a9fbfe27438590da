"""A shuffle that needs no memory: it computes where position i of a shuffled range lies.

A permutation of ``size`` things is usually an array of ``size`` numbers, one for every replica. Here it is a function,
evaluated only at the positions that a batch needs. It is pure integer arithmetic keyed by a hash, so machines with
different library versions agree on it. Replicas that disagreed about a shuffle would train on each other's data.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["permute", "windows_at"]

_ROUNDS = 8


def permute(positions: NDArray[np.int64], size: int, key: str) -> NDArray[np.int64]:
    """Return the images of ``positions`` under the permutation of ``range(size)`` that ``key`` names.

    This is a Feistel network. A number below ``side * side`` is a pair (left, right), and each round maps it to
    ``(right, (left + f(right)) mod side)``, which is invertible for any f. ``side`` is the smallest integer with ``side
    * side >= size``. The few images outside the range are mapped again until they are inside.

    Args:
        positions: (n,) int64, each in ``[0, size)``.
        size: number of things permuted, at least 1 and below 2**62.
        key: any text; different keys give different permutations.

    Returns:
        (n,) int64, each in ``[0, size)``; distinct positions have distinct images.

    >>> permute(np.arange(8), 8, "epoch 0").tolist()
    [2, 5, 4, 0, 1, 6, 3, 7]
    >>> permute(np.array([2, 6]), 8, "epoch 0").tolist()
    [4, 3]
    """
    side = math.isqrt(size - 1) + 1
    round_keys = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest(), dtype="<u8")
    images = _feistel(positions.astype(np.uint64), side, round_keys)
    # This ends: it follows a cycle of the larger permutation, and the cycle contains the position it began at.
    while (outside := np.flatnonzero(images >= size)).size:
        images[outside] = _feistel(images[outside], side, round_keys)
    return images.astype(np.int64)


def windows_at(
    positions: NDArray[np.int64], num_windows: int, batch_size: int, seed: int, *, source: str | None = None
) -> NDArray[np.int64]:
    """Return the windows of the tokens at some positions of the stream.

    An epoch has as many positions as there are windows in whole batches, so a batch of positions that begins at a
    multiple of the batch size lies in one epoch and contains no window twice. The fewer than ``batch_size`` windows
    left over differ between epochs, because each epoch is shuffled anew.

    Args:
        positions: (n,) int64, at least 0.
        num_windows: windows of the tokens (W), at least ``batch_size``.
        batch_size: sequences per batch of a replica (B).
        seed: the seed of the run; with the number of the epoch and ``source``, it is the key of the shuffle.
        source: the name of one source among several.

    Returns:
        (n,) int64, each in ``[0, num_windows)``; within an epoch distinct positions have distinct windows.

    >>> windows_at(np.arange(10), num_windows=7, batch_size=2, seed=0).tolist()
    [5, 3, 6, 4, 0, 2, 1, 4, 3, 6]
    """
    epochs, places = np.divmod(positions, num_windows // batch_size * batch_size)
    windows = np.empty_like(positions)
    key = f"seed {seed}" if source is None else f"seed {seed}, source {source}"
    # Returned ranges may begin anywhere, so one batch may contain positions of two epochs.
    for epoch in np.unique(epochs).tolist():
        of_epoch = epochs == epoch
        windows[of_epoch] = permute(places[of_epoch], num_windows, f"{key}, epoch {epoch}")
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
