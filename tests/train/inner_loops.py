"""Inner loops of a small decoder, and the values that tests read from them."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from diloco.algorithm import ValueSchedule
from diloco.model import DecoderSettings, build_model
from diloco.train import InnerLoop, OptimizerSettings, ParallelModel, make_inner_optimizer

MODEL = DecoderSettings(layers=1, width=16, ffn_width=32, heads=2, vocab_size=17, max_sequence_length=16)
CONSTANT = ValueSchedule(peak=1e-2)


def batch(seed: int, size: int = 6) -> tuple[Tensor, Tensor]:
    """Return sequences that count upwards modulo the vocabulary, which are learnt in a few steps."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, 17, (size, 1), generator=generator)
    tokens = (starts + torch.arange(9)) % 17
    return tokens[:, :-1], tokens[:, 1:]


def make_loop(
    precision: Literal["float32", "bfloat16", "float16"] = "float32",
    *,
    name: str = "AdamW",
    arguments: dict[str, Any] | None = None,
    rate: ValueSchedule = CONSTANT,
    clip_norm: float | None = 1.0,
    accumulation: int = 1,
) -> InnerLoop:
    model = build_model(MODEL, seed=0)
    given = {"weight_decay": 0.1} if arguments is None else arguments
    optimizer = make_inner_optimizer(OptimizerSettings(name=name, arguments=given, learning_rate=rate.peak), model)
    return InnerLoop(
        ParallelModel(model),
        optimizer,
        learning_rate=rate,
        clip_norm=clip_norm,
        precision=precision,
        accumulation=accumulation,
    )


def train(loop: InnerLoop, steps: int, *, start: int = 0) -> list[float]:
    losses = []
    for step in range(start, start + steps):
        losses.append(float(loop.accumulate_gradients(*batch(step))))
        loop.unscale()
        loop.apply(step)
    return losses


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def optimizer_state(loop: InnerLoop) -> Tensor:
    """Return all numbers in the state of the inner optimizer."""
    kept = [value for state in loop.optimizer.state.values() for value in state.values()]
    return torch.cat([torch.as_tensor(value, dtype=torch.float64).flatten() for value in kept])


def spoil(model: nn.Module, value: float) -> None:
    """Set one gradient value to NaN or infinity."""
    parameter = next(model.parameters())
    assert parameter.grad is not None
    parameter.grad[3, 2] = value
