"""An experiment without a gain: a mean whose hidden matrices have flatter or steeper singular values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Spectral:
    """An average rule that replaces the mean ``U S V^T`` of each hidden matrix by ``U S^power V^T`` of the same norm.

    Args:
        power: 1 gives the mean, 0 its orthogonalisation.
        width: the native decoder's width. With ``ffn_width`` it tells hidden matrices from other tensors, by size.
        ffn_width: the width of its feed-forward layers.
    """

    power: float
    width: int = 64
    ffn_width: int = 176
    elementwise = False

    def combine(self, contributions: Iterable[tuple[float, Tensor]], tensors: Sequence[int]) -> Tensor:
        mean, total = torch.zeros(()), 0.0
        for weight, values in contributions:
            mean = mean + values * weight
            total += weight
        mean /= total
        wide = 0
        for part in torch.split(mean, list(tensors)):
            if len(part) == self.width * self.ffn_width:  # gate, up, down of each layer
                wide += 1
                rows = self.ffn_width if wide % 3 else self.width
            elif len(part) == self.width * self.width:
                rows, wide = self.width, 0
            else:
                continue
            left, values, right = torch.linalg.svd(part.view(rows, -1), full_matrices=False)
            if length := float(values.norm()):
                powers = values**self.power
                part.copy_(((left * (powers * (length / powers.norm()))) @ right).flatten())
        return mean
