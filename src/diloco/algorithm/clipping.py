"""Clipping of contributions that are too large, with equal bits on every replica, and a bound on the mean.

A contribution of norm n keeps its weight, but its values are multiplied by ``min(1, max_norm / n)``. So a faulty or
malicious replica moves the mean by at most its weight times ``max_norm``.

Norms must have equal bits on all replicas, or the replicas would diverge. The summation order of a library depends on
the processor's vector width. So norms are summed here in float64 by elementwise additions of halves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from diloco.algorithm.codec.base import Codec, largest_magnitude
from diloco.errors import CodecError

__all__ = ["CHUNK_VALUES", "LARGEST_MEAN", "check_mean", "scale_factors", "vector_norm"]

LARGEST_MEAN = 2.0**100  # a larger mean makes the round void: momentum and outer steps would overflow

CHUNK_VALUES = 1 << 20
"""The number of values whose squares are summed at a time, 8 MiB of float64. It defines the order of summation."""


def scale_factors(max_norm: float, norms: Mapping[int, float]) -> dict[int, float]:
    """Return ``max_norm / n``, rounded to float32, for each contributor whose norm n exceeds ``max_norm``.

    Args:
        max_norm: The largest L2 norm of a contribution.
        norms: Replica -> norm of its contribution, for all contributors.

    >>> scale_factors(1.0, {0: 0.5, 1: 1.0, 2: 4.0})
    {2: 0.25}
    """
    return {
        replica: float(torch.tensor(max_norm / norm, dtype=torch.float32, device="cpu"))
        for replica, norm in sorted(norms.items())
        if norm > max_norm
    }


def vector_norm(values: Tensor) -> float:
    """Return the L2 norm of ``values``, ``(n,)`` float32, with equal bits on every processor.

    Squares are exact in float64. They are summed over ranges of 2^20 values, and then the sums of the ranges. Each sum
    folds: the second half is added to the first, value by value, until one value is left.

    >>> vector_norm(torch.tensor([3.0, 4.0]))
    5.0
    """
    if not values.numel():
        return 0.0
    starts = range(0, values.numel(), CHUNK_VALUES)
    sums = [_folded(values[start : start + CHUNK_VALUES].to(torch.float64).square_()) for start in starts]
    return math.sqrt(float(_folded(torch.stack(sums))))


def _folded(values: Tensor) -> Tensor:
    """Return the sum of ``values``, ``(n,)`` float64 with n > 0, as a ``()`` tensor. Overwrites ``values``."""
    count = len(values)
    while count > 1:
        half = (count + 1) // 2
        values[: count - half] += values[half:count]  # an odd number's middle value waits for the next fold
        count = half
    return values[0]


def check_mean(values: Tensor, addends: Mapping[int, tuple[Codec, Tensor, float]]) -> None:
    """Check a mean or a part of it, which may overflow even if all addends are finite.

    Args:
        values: ``(n,)`` float32, the mean.
        addends: Replica -> codec, payload of ``n`` values, and the weight with which they were added.

    Raises:
        CodecError: if a magnitude is not finite or above 2^100. The error names the replica that contributed most.
    """
    largest = largest_magnitude(values)
    if not largest <= LARGEST_MEAN:
        replica = _largest_contributor(addends, values.numel())
        what = "is not finite" if not math.isfinite(largest) else f"has values up to {largest:.3g}"
        raise CodecError(f"the mean {what}; replica {replica} contributed most to it", replica=replica)


def _largest_contributor(addends: Mapping[int, tuple[Codec, Tensor, float]], numel: int) -> int:
    """Return the replica with the largest weighted magnitude, the lowest on a tie."""

    def largest(replica: int) -> float:
        codec, payload, weight = addends[replica]
        return weight * largest_magnitude(codec.decode(payload, numel))

    return max(sorted(addends), key=largest)
