"""Contributions that are too large are scaled down before they are averaged: the same on every replica, to the bit.
A mean that is too large all the same is refused.

A contribution of norm n keeps its weight, but its values are multiplied by ``min(1, c / n)``, where the bound c is a
number, or a multiple of the median norm of the round's contributors. A replica that is wrong, or malicious, then moves
the mean by no more than its weight times c.

Norms must be the same on all replicas, or these would diverge. The order in which a library sums depends on the width
of the processor's vectors, so here sums are made of elementwise additions alone, halves upon halves, in float64.
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

__all__ = ["LARGEST_MEAN", "STRETCH", "UNCLIPPED", "Clipping", "check_mean", "scale_factors", "vector_norm"]

LARGEST_MEAN = 2.0**100  # a mean with a larger value is void: momentum and outer steps would make infinity of it

STRETCH = 1 << 20
"""Values whose squares are summed at a time: 8 MiB of float64. Part of the definition, since it decides the order."""

_FEWEST = 3  # of two norms the lower median is the smaller one, and a single one has nothing to compare it with


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """How large a contribution may be; by default, any size.

    Args:
        max_norm: contributions of a larger L2 norm are scaled down to it. None: no such bound.
        median_norm_factor: contributions whose norm exceeds this multiple of the median of the contributors' norms are
            scaled down to that. The lower median, where their number is even; without effect with fewer than three
            contributors, or where the median is 0. None: no such bound.

    Raises:
        ConfigurationError: for a bound that is not a finite number above 0.
    """

    max_norm: float | None = None
    median_norm_factor: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("max_norm", self.max_norm), ("median_norm_factor", self.median_norm_factor)):
            if value is not None:
                check_number(name, value, 0, above=True)

    @property
    def active(self) -> bool:
        """Whether there is any bound; whole contributions are then needed to take the mean."""
        return self.max_norm is not None or self.median_norm_factor is not None

    def bound(self, norms: Mapping[int, float]) -> float:
        """The largest norm allowed among contributors of these ``norms``, by replica; infinite for none.

        >>> Clipping(median_norm_factor=2.0).bound({0: 1.0, 1: 1.5, 2: 9.0, 3: 2.0})
        3.0
        """
        bounds = [math.inf if self.max_norm is None else self.max_norm]
        if self.median_norm_factor is not None and len(norms) >= _FEWEST:
            median = sorted(norms.values())[(len(norms) - 1) // 2]
            if median > 0:  # else most have done nothing, and say nothing about how much is too much
                bounds.append(self.median_norm_factor * median)
        return min(bounds)


UNCLIPPED = Clipping()  # contributions of any size


def scale_factors(clipping: Clipping, norms: Mapping[int, float]) -> dict[int, float]:
    """``c / n``, rounded to float32, for those contributors whose norm n is above the bound c; nothing for the others.

    Args:
        norms: replica -> norm of its contribution, of all contributors.

    >>> scale_factors(Clipping(max_norm=1.0), {0: 0.5, 1: 1.0, 2: 4.0})
    {2: 0.25}
    """
    bound = clipping.bound(norms)
    return {
        replica: float(torch.tensor(bound / norm, dtype=torch.float32))
        for replica, norm in sorted(norms.items())
        if norm > bound
    }


def vector_norm(values: Tensor) -> float:
    """The L2 norm of ``values``, ``(n,)`` float32: the same bits on any processor.

    Squares are exact in float64. They are added in stretches of 2^20 values, and then the sums of the stretches, each
    time by folding: the second half is added to the first, value by value, until one is left.

    >>> vector_norm(torch.tensor([3.0, 4.0]))
    5.0
    """
    if not values.numel():
        return 0.0
    starts = range(0, values.numel(), STRETCH)
    sums = [_folded(values[start : start + STRETCH].to(torch.float64).square_()) for start in starts]
    return math.sqrt(float(_folded(torch.stack(sums))))


def _folded(values: Tensor) -> Tensor:
    """The sum of ``values``, ``(n,)`` float64 with n > 0, which are overwritten; ``()``."""
    count = len(values)
    while count > 1:
        half = (count + 1) // 2
        values[: count - half] += values[half:count]  # the one in the middle of an odd number waits for the next fold
        count = half
    return values[0]


def check_mean(values: Tensor, addends: Mapping[int, tuple[Codec, Tensor, float]]) -> None:
    """Check (a part of) a mean: its addends may all be finite and their sum not.

    Args:
        values: ``(n,)`` float32, the mean.
        addends: replica -> codec, payload of ``n`` values, and the weight with which they were added.

    Raises:
        CodecError: a value is not finite, or above 2^100. It names the replica that contributed most to it.
    """
    largest = largest_magnitude(values)
    if not largest <= LARGEST_MEAN:
        replica = _largest_contributor(addends, values.numel())
        what = "is not finite" if not math.isfinite(largest) else f"has values up to {largest:.3g}"
        raise CodecError(f"the mean {what}, to which replica {replica} contributed most", replica=replica)


def _largest_contributor(addends: Mapping[int, tuple[Codec, Tensor, float]], numel: int) -> int:
    """The replica with the largest weighted value, the lowest of several; arguments as of `check_mean`."""

    def largest(replica: int) -> float:
        codec, payload, weight = addends[replica]
        return weight * largest_magnitude(codec.decode(payload, numel))

    return max(sorted(addends), key=largest)
