"""Clipping of contributions that are too large, with equal bits on every replica, and a bound on the mean.

A contribution of norm n keeps its weight, but its values are multiplied by ``min(1, c / n)``. The bound c is a number,
or a multiple of the median norm of the round's contributors. So a faulty or malicious replica moves the mean by at most
its weight times c.

Norms must have equal bits on all replicas, or the replicas would diverge. The summation order of a library depends on
the processor's vector width. So norms are summed here in float64 by elementwise additions of halves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.algorithm.codec import Codec
from diloco.algorithm.codec.base import largest_magnitude
from diloco.algorithm.numbers import check_number
from diloco.errors import CodecError

__all__ = ["CHUNK_VALUES", "LARGEST_MEAN", "UNCLIPPED", "Clipping", "check_mean", "scale_factors", "vector_norm"]

LARGEST_MEAN = 2.0**100  # a larger mean makes the round void: momentum and outer steps would overflow

CHUNK_VALUES = 1 << 20
"""The number of values whose squares are summed at a time, 8 MiB of float64. It defines the order of summation."""

_FEWEST = 3  # the lower median of two norms is the smaller one, and a single norm can't be compared


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """Bounds on the norms of contributions. By default there are none.

    Args:
        max_norm: Contributions with a larger L2 norm are scaled down to it. None: no such bound.
        median_norm_factor: Contributions whose L2 norm exceeds this multiple of the median of the contributors' norms
            are scaled down to that multiple. With an even number of norms it is the lower median. It has no effect with
            fewer than three contributors or if the median is 0. None: no such bound.

    Raises:
        ConfigurationError: if a bound is not a finite number above 0.
    """

    max_norm: float | None = None
    median_norm_factor: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("max_norm", self.max_norm), ("median_norm_factor", self.median_norm_factor)):
            if value is not None:
                check_number(name, value, 0, above=True)

    @property
    def active(self) -> bool:
        """Whether there is a bound, so that the mean needs whole contributions."""
        return self.max_norm is not None or self.median_norm_factor is not None

    def bound(self, norms: Mapping[int, float]) -> float:
        """Return the largest norm allowed in a round with these ``norms`` by replica; infinity without a bound.

        >>> Clipping(median_norm_factor=2.0).bound({0: 1.0, 1: 1.5, 2: 9.0, 3: 2.0})
        3.0
        """
        bounds = [math.inf if self.max_norm is None else self.max_norm]
        if self.median_norm_factor is not None and len(norms) >= _FEWEST:
            median = sorted(norms.values())[(len(norms) - 1) // 2]
            if median > 0:  # at 0 most contributors did nothing, which gives no measure of what is too large
                bounds.append(self.median_norm_factor * median)
        return min(bounds)


UNCLIPPED = Clipping()  # contributions of any size


def scale_factors(clipping: Clipping, norms: Mapping[int, float]) -> dict[int, float]:
    """Return ``c / n``, rounded to float32, for each contributor whose norm n exceeds the bound c.

    Args:
        clipping: The bounds.
        norms: Replica -> norm of its contribution, for all contributors.

    >>> scale_factors(Clipping(max_norm=1.0), {0: 0.5, 1: 1.0, 2: 4.0})
    {2: 0.25}
    """
    bound = clipping.bound(norms)
    return {
        replica: float(torch.tensor(bound / norm, dtype=torch.float32, device="cpu"))
        for replica, norm in sorted(norms.items())
        if norm > bound
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
