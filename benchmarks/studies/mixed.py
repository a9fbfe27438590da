"""An experiment without a gain: Muon with the last outer step added to its updates, as FedCM adds it to gradients.

The optimizer detects rounds by itself: if a parameter differs from what its last step left, a round has replaced it
with the new global one. This requires a schedule without overlap, and a run that is not resumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from diloco.algorithm import Muon, muon, orthogonalised


class Mixed(Muon):
    """Muon with ``O(U / |U| + mix W / |W|)`` instead of ``O(U)`` for hidden matrices; W is the last outer step."""

    mix: float
    after_step: dict[nn.Parameter, Tensor]  # values after the last inner step
    global_params: dict[nn.Parameter, Tensor]
    outer_step: dict[nn.Parameter, Tensor]  # the previous global values minus the current ones

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        matrices = [p for group in self.param_groups if group["orthogonalise"] for p in group["params"]]
        for matrix in matrices:
            before = self.global_params.setdefault(matrix, matrix.clone())
            if matrix in self.after_step and not torch.equal(self.after_step[matrix], matrix):
                self.outer_step[matrix], self.global_params[matrix] = before - matrix, matrix.clone()
        result = super().step(closure)
        self.after_step = {matrix: matrix.clone() for matrix in matrices}
        return result

    def _step_matrices(self, group: Mapping[str, Any]) -> None:
        alike: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = {}
        for matrix in group["params"]:
            buffer = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))
            momentum = buffer.mul_(group["momentum"]).add_(matrix.grad)
            update = matrix.grad.add(momentum, alpha=group["momentum"])
            if matrix in self.outer_step:
                update = _unit(update) + self.mix * _unit(self.outer_step[matrix])
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
    """Return `muon` of ``model`` as a `Mixed`; ``mix`` is the length of the added outer step relative to the update."""
    made = muon(model, lr, **arguments)
    made.__class__ = Mixed
    assert isinstance(made, Mixed)
    made.mix, made.after_step, made.global_params, made.outer_step = mix, {}, {}, {}
    return made
