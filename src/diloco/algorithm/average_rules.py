"""Rules that average the contributions of a round, as alternatives to their weighted mean.

=============  ==================================================================  ===================================
rule           equation, w_m the weights and D_m the decoded contributions          source
=============  ==================================================================  ===================================
none           ``sum_m w_m D_m / sum_m w_m``                                        the papers; SparseLoCo's sum / R
`SendersMean`  the same for each value, over those m whose value is not zero       the code of Templar (SparseLoCo)
`Rda`          for each tensor ``(sum w |D| / W) phi(sum w phi(D) / W)``            Decoupled DiLoCo (2604.21428)
=============  ==================================================================  ===================================

Rules need whole contributions, so rounds that use one are always all-gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from diloco.algorithm.clipping import vector_norm
from diloco.algorithm.codec.base import divisor

__all__ = ["AverageRule", "Rda", "SendersMean"]

_SMALLEST_DIRECTION = 1e-12  # if the mean of the directions is shorter than this, they cancel out
_SMALLEST_NORM = 1e-20  # a shorter contribution has no direction: ``w / |D|`` would exceed the range of float32


class AverageRule(Protocol):
    """A rule that averages the contributions of a round. Equal inputs must give equal bits on every replica."""

    @property
    def elementwise(self) -> bool:
        """Whether each value of the average depends only on the same value of the contributions.

        Other rules need whole tensors, which the ranks of a sharded model (FSDP) do not have.
        """

    def combine(self, contributions: Iterable[tuple[float, Tensor]], tensors: Sequence[int]) -> Tensor:
        """Return the average of the contributions.

        Args:
            contributions: The weight and the values, ``(numel,)`` float32, of each contributor in ascending order of
                replicas. There is at least one. Fetching the next one overwrites the values.
            tensors: The sizes of the tensors that the values consist of, in order. Their sum is numel.

        Returns:
            ``(numel,)`` float32, sharing no memory with the contributions.
        """


@dataclass(frozen=True)
class SendersMean:
    """The weighted mean of each value over those contributors whose value is not zero, or 0 if all are zero.

    If every replica sends different values, as with `topk2`, each value counts in full: the result is up to M times the
    mean over all replicas. Templar's code, which trained a 72B model, does this; the SparseLoCo paper divides by the
    number of all replicas.

    >>> SendersMean().combine([(1.0, torch.tensor([4.0, 0.0, 3.0])), (1.0, torch.tensor([2.0, 0.0, 0.0]))], [3])
    tensor([3., 0., 3.])
    """

    elementwise = True

    def combine(self, contributions: Iterable[tuple[float, Tensor]], tensors: Sequence[int]) -> Tensor:
        total = sent = torch.zeros((), dtype=torch.float32, device="cpu")
        for weight, values in contributions:
            if not total.dim():
                total, sent = torch.zeros_like(values), torch.zeros_like(values)
            total.add_(values * weight)
            sent.add_((values != 0).to(torch.float32).mul_(weight))
        return total.div_(sent.masked_fill_(sent == 0, 1.0))


@dataclass(frozen=True)
class Rda:
    """Direction and length averaged separately, for each tensor: ``(sum w |D| / W) phi(sum w phi(D) / W)``.

    phi(x) = x / |x|, phi(0) = 0, W = sum w. The plain mean of differing contributions is shorter than they are, by
    ``sqrt(M)`` if they are orthogonal. This average is as long as they are on average, so the same outer learning rate
    moves further. If the directions cancel out (their mean is shorter than 1e-12) the result is the weighted mean.

    >>> Rda().combine([(1.0, torch.tensor([3.0, 0.0])), (1.0, torch.tensor([0.0, 1.0]))], [2])
    tensor([1.4142, 1.4142])
    """

    elementwise = False

    def combine(self, contributions: Iterable[tuple[float, Tensor]], tensors: Sequence[int]) -> Tensor:
        directions = mean = torch.zeros((), dtype=torch.float32, device="cpu")
        lengths, total = [0.0] * len(tensors), 0.0
        for weight, values in contributions:
            if not directions.dim():
                directions, mean = torch.zeros_like(values), torch.zeros_like(values)
            total += weight
            mean.add_(values * weight)
            for index, (direction, part) in enumerate(
                zip(_split(directions, tensors), _split(values, tensors), strict=True)
            ):
                norm = vector_norm(part)
                lengths[index] += weight * norm
                if norm > _SMALLEST_NORM:
                    direction.add_(part * (weight / norm))
        for length, direction, plain in zip(lengths, _split(directions, tensors), _split(mean, tensors), strict=True):
            norm = vector_norm(direction)
            if norm / total > _SMALLEST_DIRECTION:
                direction.mul_(length / total / norm)
            else:
                torch.div(plain, divisor(total, plain), out=direction)
        return directions


def _split(values: Tensor, tensors: Sequence[int]) -> Sequence[Tensor]:
    return torch.split(values, list(tensors))
