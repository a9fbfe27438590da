"""Measurements of rounds without extra traffic: norms, cosines, and the gain of outer steps.

The norm of the mean is exact; all others are estimates from samples of a fragment, so they cost almost nothing. They
have no effect on training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from diloco.algorithm.codec.base import Codec
from diloco.algorithm.optim import OuterOptimizer, OuterState

_SAMPLED_BLOCKS, _SAMPLED_BLOCK = 128, 128  # 16384 values: the standard error of a cosine is 0.008

_RANGE, _VALUES_PER_RANGE, _MAX_RANGES = 1 << 12, 1 << 18, 16
"""A range of 4096 values of each contribution is decoded for every 262144 values of the fragment, up to 16 ranges."""

_PIECE = 1 << 20  # values whose squares are summed in float32; longer sums would lose precision


def measured_outer_step(
    optimizer: OuterOptimizer, mean: Tensor, state: OuterState, values: Tensor, last: Tensor | None
) -> tuple[dict[str, float | None], Tensor]:
    """Take an outer step, ``optimizer.update(mean, state, values)``, and measure its effect.

    ``mean`` and ``values``, the global parameters, are ``(numel,)`` float32; ``last`` is the sample of the last mean.

    Returns:
        The measures by name, None where one is undefined, and the sample of this mean:

        - mean_norm: ``|Delta|``, the L2 norm of the mean pseudo-gradient.
        - mean_cosine: the cosine of this mean and the fragment's last one.
        - momentum_cosine: the cosine of this mean and the momentum before the step.
        - gain: the step along the mean in lengths of the mean, ``<theta before - theta after, Delta> / |Delta|^2``. For
          Nesterov ``lr (1 + mu)`` in the first step, and ``lr / (1 - mu)`` after many equal means.
    """
    delta, before = _sample(mean), _sample(values)
    momentum = _sample(state.slots["momentum"]) if "momentum" in state.slots else None
    optimizer.update(mean, state, values)
    zero = torch.zeros_like(delta)  # its cosines are undefined
    others = [before.sub_(_sample(values)), zero if last is None else last, zero if momentum is None else momentum]
    dots = [delta.dot(delta), *(delta.dot(each) for each in others), *(each.dot(each) for each in others[1:])]
    squares = [piece.dot(piece) for piece in torch.split(mean, _PIECE)]
    numbers = torch.stack([*dots, *squares]).tolist()  # waits for the device once
    square, moved, with_last, with_momentum, of_last, of_momentum = numbers[: len(dots)]
    measures = {
        "mean_norm": math.sqrt(sum(numbers[len(dots) :])),
        "mean_cosine": _ratio(with_last, math.sqrt(square * of_last)),
        "momentum_cosine": _ratio(with_momentum, math.sqrt(square * of_momentum)),
        "gain": _ratio(moved, square),
    }
    return measures, delta


def _sample(values: Tensor) -> Tensor:
    """Return a copy of at most 16384 of ``values``, ``(numel,)``: 128 evenly spaced ranges of 128, or all if fewer."""
    if values.numel() <= _SAMPLED_BLOCKS * _SAMPLED_BLOCK:
        return values.clone()
    stride = values.numel() // _SAMPLED_BLOCKS
    return values.as_strided((_SAMPLED_BLOCKS, _SAMPLED_BLOCK), (stride, 1)).clone().flatten()  # flatten may be a view


def sampled_ranges(numel: int, block_size: int) -> list[tuple[int, int]]:
    """Return the ranges ``(start, stop)`` whose spread between replicas is measured, in whole blocks of a codec.

    >>> sampled_ranges(1000, 256), sampled_ranges(600_000, 256)
    ([(0, 1000)], [(0, 4096), (300032, 304128)])
    """
    count = max(1, min(_MAX_RANGES, numel // _VALUES_PER_RANGE))
    blocks, length = -(-numel // block_size), max(1, _RANGE // block_size) * block_size
    starts = (position * blocks // count * block_size for position in range(count))
    return [(start, min(start + length, numel)) for start in starts]


def spread_terms(
    codec: Codec, payloads: Sequence[tuple[float, Tensor]], numel: int, ranges: Iterable[tuple[int, int]]
) -> tuple[float, float]:
    """Return the terms of `spread`, ``(sum_m w_m |Delta_m|^2, |sum_m w_m Delta_m|^2)``, over some ranges of values.

    ``payloads`` are the weight and the payload of each contributor; ranges consist of whole blocks.
    """
    squares, of_sum = 0.0, 0.0
    for start, stop in ranges:
        total = None
        for weight, payload in payloads:
            values = codec.decode(codec.cut(payload, numel, start, stop), stop - start)
            squares += weight * float(values.dot(values))
            total = values.mul_(weight) if total is None else total.add_(values, alpha=weight)
        of_sum += 0.0 if total is None else float(total.dot(total))
    return squares, of_sum


def spread(squares: float, of_sum: float, total_weight: float) -> float | None:
    """Return the root-mean-square distance of contributions from their weighted mean, in lengths of that mean.

    It is 0 if all are equal, ``sqrt(M - 1)`` if M of equal norm are orthogonal, and None if the mean is zero.

    >>> spread(squares=2.0, of_sum=4.0, total_weight=2.0), spread(squares=4.0, of_sum=4.0, total_weight=4.0)
    (0.0, 1.7320508075688772)
    """
    ratio = _ratio(squares * total_weight, of_sum)
    return None if ratio is None else math.sqrt(max(0.0, ratio - 1))


def _ratio(one: float, other: float) -> float | None:
    return one / other if other > 0 and math.isfinite(one) and math.isfinite(other) else None
