"""Measurements of rounds without extra traffic: norms, cosines, and the gain of outer steps.

The norm of the mean is exact; all others are estimates from samples of a fragment, so they cost almost nothing. They
have no effect on training.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from diloco.algorithm.optim import OuterOptimizer, OuterState

_SAMPLED_BLOCKS, _SAMPLED_BLOCK = 128, 128  # 16384 values: the standard error of a cosine is 0.008

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
    dots = [delta.dot(delta), *(delta.dot(other) for other in others), *(other.dot(other) for other in others[1:])]
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


def _ratio(one: float, other: float) -> float | None:
    is_defined = other > 0 and math.isfinite(one) and math.isfinite(other)
    return one / other if is_defined else None
