"""Rules that average the contributions of a round, as alternatives to ``sum_m w_m D_m / sum_m w_m``.

Rules need whole contributions, so rounds that use one are always all-gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["AverageRule", "SendersMean"]


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
