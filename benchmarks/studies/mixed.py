"""Tried and left out: Muon that leans, between rounds, to where the global parameters went in the last one.

It finds rounds by itself: parameters that are not as it left them are new global ones. That needs a schedule without an
overlap, and a run that is not resumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from diloco.algorithm.muon import Muon, muon, orthogonalised


class Mixed(Muon):
    """``O(U / |U| + mix W / |W|)`` for hidden matrices in the place of ``O(U)``, with W the last outer step."""

    mix: float
    left: dict[nn.Parameter, Tensor]  # as the last step left it
    global_params: dict[nn.Parameter, Tensor]
    way: dict[nn.Parameter, Tensor]  # from one to the next

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        matrices = [p for group in self.param_groups if group["orthogonalise"] for p in group["params"]]
        for matrix in matrices:
            before = self.global_params.setdefault(matrix, matrix.clone())
            if matrix in self.left and not torch.equal(self.left[matrix], matrix):
                self.way[matrix], self.global_params[matrix] = before - matrix, matrix.clone()
        result = super().step(closure)
        self.left = {matrix: matrix.clone() for matrix in matrices}
        return result

    def _step_matrices(self, group: Mapping[str, Any]) -> None:
        alike: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = {}
        for matrix in group["params"]:
            buffer = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))
            momentum = buffer.mul_(group["momentum"]).add_(matrix.grad)
            update = matrix.grad.add(momentum, alpha=group["momentum"])
            if matrix in self.way:
                update = _unit(update) + self.mix * _unit(self.way[matrix])
            alike.setdefault(matrix.shape, []).append((matrix, update))
        for (rows, columns), pairs in alike.items():
            updates = orthogonalised(torch.stack([update for _, update in pairs]), group["newton_schulz_steps"])
            for (matrix, _), update in zip(pairs, updates, strict=True):
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * math.sqrt(max(1.0, rows / columns)))


def _unit(values: Tensor) -> Tensor:
    unit: Tensor = values / values.norm().clamp(min=1e-12)
    return unit


def make(model: nn.Module, lr: float, *, mix: float, **arguments: Any) -> Mixed:
    """As `muon`; ``mix`` is how much of the last outer step is added."""
    made = muon(model, lr, **arguments)
    made.__class__ = Mixed
    assert isinstance(made, Mixed)
    made.mix, made.left, made.global_params, made.way = mix, {}, {}, {}
    return made
