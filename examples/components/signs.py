"""Outer steps of one size, by the sign of a running mean."""

from dataclasses import dataclass

import torch

from diloco import OuterState


@dataclass(frozen=True)
class Signs:
    learning_rate: float = 1e-3
    momentum: float = 0.9

    def init(self, values):
        return OuterState(slots={"mean": torch.zeros_like(values)})

    def update(self, mean, state, values):
        rate = self.learning_rate(state.step) if callable(self.learning_rate) else self.learning_rate
        running = state.slots["mean"]
        running.mul_(self.momentum).add_(mean * (1 - self.momentum))
        values.sub_(running.sign().mul_(rate))
        state.step += 1
