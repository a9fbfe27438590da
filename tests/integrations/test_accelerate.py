"""A loop with `AcceleratedDiLoCo` gives the results of diloco's own trainer, and resumes exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco import SyncSchedule
from diloco.events import Event, RoundSent
from diloco.transport import Transport
from tests.integrations.reference import assert_equal, example, options, trained_by_us
from tests.integrations.turns import in_turns
from tests.lazy import Lazy

accelerate, ours = Lazy("accelerate"), Lazy("diloco.integrations.accelerate")


def logits(module: nn.Module, tokens: Tensor) -> Tensor:
    found: Tensor = module(tokens)
    return found


def train(given: Any, transport: Transport | None = None) -> nn.Module:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=given.accumulation)
    model: nn.Module = example("accelerate_loop").train(accelerator, given, transport)
    return model


def test_one_replica_is_one_of_ours(tmp_path: Path) -> None:
    """With two micro-batches per step."""
    given = options(tmp_path, "--accumulation 2")
    model = train(given)
    (expected,), _ = trained_by_us([given], example("plain_pytorch").make_model(given), logits)
    assert_equal(dict(model.named_parameters()), expected)


def test_two_replicas_are_two_of_ours(tmp_path: Path) -> None:
    given = [options(tmp_path / str(m), "", m, 2) for m in (0, 1)]
    models = in_turns(lambda replica, transport: train(given[replica], transport))
    expected, _ = trained_by_us(given, example("plain_pytorch").make_model(given[0]), logits)
    for model, local in zip(models, expected, strict=True):
        assert_equal(dict(model.named_parameters()), local)


def test_stopped_with_a_round_in_flight_and_resumed_it_is_the_same(tmp_path: Path) -> None:
    straight = train(options(tmp_path, "--save-steps 22 --codec int8"))
    resumed = train(options(tmp_path / "resumed", f"--resume {tmp_path / 'step-22'} --codec int8"))
    for name, values in straight.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], values), name


class Loop:
    """A small model whose micro-batches the test controls."""

    def __init__(self, accumulation: int, scale: float | None = None, **arguments: Any) -> None:
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        if scale is not None:
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.events: list[Event] = []
        self.diloco = ours.AcceleratedDiLoCo(
            self.accelerator, self.model, self.optimizer, on_event=self.events.append, **arguments
        )

    def micro_batch(self, loss_factor: float = 1.0) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(loss_factor * self.model(torch.ones(1, 2)).sum())
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.diloco.step()


def test_micro_batches_are_no_steps_and_skipped_steps_are_not_trained() -> None:
    """12 micro-batches make 3 steps, of which the scaler skips the second."""
    loop = Loop(4, 1024.0, schedule=SyncSchedule(inner_steps=3))
    for number in range(12):
        loop.micro_batch(float("inf") if number == 5 else 1.0)
        assert loop.diloco.steps == (number + 1) // 4
    (sent,) = (event for event in loop.events if isinstance(event, RoundSent))
    assert sent.weight == 2 / 3
    loop.diloco.close()


@pytest.mark.parametrize(("micro_batches", "overlap"), [(12, 0), (26, 3)])
def test_steps_are_those_of_the_optimizer_where_a_loop_accumulates_by_itself(micro_batches: int, overlap: int) -> None:
    loop = Loop(1, schedule=SyncSchedule(inner_steps=3, overlap_steps=overlap))
    for number in range(micro_batches):
        loop.accelerator.backward(loop.model(torch.ones(1, 2)).sum())
        if number % 4 == 3:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        loop.diloco.step()
    assert (loop.diloco.steps, loop.diloco.rounds_committed) == (micro_batches // 4, 1)
    assert loop.diloco.figures()["diloco/rounds"] == 1
    loop.diloco.close()
