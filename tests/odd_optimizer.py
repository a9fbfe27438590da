"""An optimizer whose state has what `torch.optim.Optimizer.load_state_dict` would cast or spoil."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class OddAdam(torch.optim.Optimizer):
    """Adam without bias correction or weight decay, with bfloat16 moments, a mask, counters of integers, and text."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                state = self.state[parameter] or self._fresh(parameter)
                self.state[parameter] = state
                state["count"] += 1
                state["seen"][0]["steps"] += 1
                gradient = parameter.grad
                first, second = state["moments"]
                for moment, value, beta in zip(
                    (first, second), (gradient, gradient * gradient), group["betas"], strict=True
                ):
                    moment.copy_(moment.float() * beta + value * (1 - beta))
                state["positive"].copy_(gradient > 0)
                turned = 1.0 + 1e-2 * (int(state["seen"][0]["steps"]) % 7) + 0.1 * (state["mode"] == "normal")
                step = first.float() / (second.float().sqrt() + 1e-8) * (1.0 + 1e-3 * state["positive"].float())
                parameter.sub_(group["lr"] * turned * step)

    @staticmethod
    def _fresh(parameter: Tensor) -> dict[str, Any]:
        moments = [torch.zeros_like(parameter, dtype=torch.bfloat16) for _ in range(2)]
        return {
            "count": torch.tensor(0, dtype=torch.int64),
            "seen": [{"steps": torch.tensor(2**40 + 1, dtype=torch.int64)}],
            "moments": tuple(moments),
            "positive": torch.zeros_like(parameter, dtype=torch.bool),
            "mode": "normal",
        }
