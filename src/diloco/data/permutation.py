"""A shuffle that needs no memory: where does position i of a shuffled range lie?

A permutation of ``size`` things is usually an array of ``size`` numbers, one array for every replica that asks. Here it
is a function, evaluated only at the positions a batch needs. It is pure integer arithmetic keyed by a hash, so machines
with different library versions agree on it; replicas that disagreed about a shuffle would train on each other's data.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["permute"]

_ROUNDS = 8


def permute(positions: NDArray[np.int64], size: int, key: str) -> NDArray[np.int64]:
    """Images of ``positions`` under the permutation of ``range(size)`` that ``key`` names.

    A Feistel network: a number below ``side * side`` is a pair (left, right), and each round maps it to
    ``(right, (left + f(right)) mod side)``, which can be undone whatever f is. ``side`` is the least whole number with
    ``side * side >= size``; the few images that fall outside the range are mapped again until they are inside.

    Args:
        positions: (n,) int64, each in ``[0, size)``.
        size: number of things permuted, at least 1 and below 2**62.
        key: any text; each gives a permutation of its own.

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
    # The walk ends: it follows a cycle of the larger permutation, and that cycle holds the position it began at.
    while (outside := np.flatnonzero(images >= size)).size:
        images[outside] = _feistel(images[outside], side, round_keys)
    return images.astype(np.int64)


def _feistel(numbers: NDArray[np.uint64], side: int, round_keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    left, right = np.divmod(numbers, np.uint64(side))
    for round_key in round_keys:
        left, right = right, (left + _mix(right ^ round_key) % np.uint64(side)) % np.uint64(side)
    return left * np.uint64(side) + right


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: every bit of the input flips about half the bits of the output."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
