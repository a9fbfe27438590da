"""How the contributions of a round become one pseudo-gradient, where that is not their weighted mean.

=============  ==================================================================  ===================================
rule           equation, w_m the weights and D_m the decoded contributions          source
=============  ==================================================================  ===================================
none           ``sum_m w_m D_m / sum_m w_m``                                        the papers; SparseLoCo's sum / R
`SendersMean`  for each value the same over those m whose value is not zero        the code of Templar (SparseLoCo)
`Rda`          for each tensor ``(sum w |D| / W) phi(sum w phi(D) / W)``            Decoupled DiLoCo (2604.21428)
=============  ==================================================================  ===================================

A rule sees contributions whole, so that rounds with one are always all-gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from diloco.algorithm.clipping import vector_norm

__all__ = ["AverageRule", "Rda", "SendersMean"]

_SMALLEST_DIRECTION = 1e-12  # directions that cancel to less than this have no mean direction
_SMALLEST_NORM = 1e-20  # a shorter contribution has no direction: ``w / |D|`` would leave the range of float32


class AverageRule(Protocol):
    """What is done with the contributions of a round. It must give the same bits wherever it is given the same."""

    @property
    def elementwise(self) -> bool:
        """Whether each value depends on that value of the contributions alone; other rules need whole tensors, which
        the ranks of a sharded model (FSDP) do not have."""

    def combine(self, contributions: Iterable[tuple[float, Tensor]], tensors: Sequence[int]) -> Tensor:
        """One pseudo-gradient of all.

        Args:
            contributions: weight and values, ``(numel,)`` float32, of each contributor in ascending order of replicas.
                The next one overwrites the values; there is at least one.
            tensors: sizes of the tensors that the values are, one after the other; their sum is numel.

        Returns:
            ``(numel,)`` float32, a tensor of its own.
        """


@dataclass(frozen=True)
class SendersMean:
    """Each value is the weighted mean over those whose value is not zero; 0 where all are.

    Where every replica sends other values, as with `topk2`, each of them counts as if it were alone: the mean is up to
    M times that over all. The code with which Templar trained 72B does so; the paper divides by all.

    >>> SendersMean().combine([(1.0, torch.tensor([4.0, 0.0, 3.0])), (1.0, torch.tensor([2.0, 0.0, 0.0]))], [3])
    tensor([3., 0., 3.])
    """

    elementwise = True

    def combine(self, contributions: Iterable[tuple[float, Tensor]], tensors: Sequence[int]) -> Tensor:
        total = sent = torch.zeros(())
        for weight, values in contributions:
            if not total.dim():
                total, sent = torch.zeros_like(values), torch.zeros_like(values)
            total.add_(values * weight)
            sent.add_((values != 0).to(torch.float32).mul_(weight))
        return total.div_(sent.masked_fill_(sent == 0, 1.0))


@dataclass(frozen=True)
class Rda:
    """Direction and length averaged apart, for each tensor: ``(sum w |D| / W) phi(sum w phi(D) / W)``.

    phi(x) = x / |x|, phi(0) = 0, W = sum w. The mean of contributions that differ is shorter than each of them, by
    ``sqrt(M)`` where they are orthogonal; this is as long as they are on average. So the same outer learning rate does
    more. Where directions cancel out (their mean is shorter than 1e-12) it is the weighted mean.

    >>> Rda().combine([(1.0, torch.tensor([3.0, 0.0])), (1.0, torch.tensor([0.0, 1.0]))], [2])
    tensor([1.4142, 1.4142])
    """

    elementwise = False

    def combine(self, contributions: Iterable[tuple[float, Tensor]], tensors: Sequence[int]) -> Tensor:
        directions = mean = torch.zeros(())
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
                torch.div(plain, total, out=direction)
        return directions


def _split(values: Tensor, tensors: Sequence[int]) -> Sequence[Tensor]:
    return torch.split(values, list(tensors))
