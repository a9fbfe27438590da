"""What is told of a round is told when it is over."""

from __future__ import annotations

import copy
from typing import Any

import torch

from diloco.algorithm.fragments import partition
from diloco.algorithm.outer_optimizer import Nesterov
from diloco.algorithm.schedule import SyncSchedule
from diloco.events import Event, RoundCommitted
from diloco.outer.diloco import DiLoCo
from tests.replicas import Vectors, quadratic

STEPS = 14


def train(began: dict[str, Any] | None = None) -> tuple[torch.Tensor, dict[int, dict[str, Any]]]:
    """One replica, from ``began`` on: its parameters at the end, and its state as of the event of each round."""
    model = Vectors()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    saved: dict[int, dict[str, Any]] = {}

    def save(event: Event) -> None:
        if isinstance(event, RoundCommitted):
            saved[event.step] = copy.deepcopy({"model": model.state_dict(), "diloco": diloco.state_dict()})

    diloco = DiLoCo(
        model,
        inner,
        schedule=SyncSchedule(inner_steps=4, num_fragments=2, overlap_steps=1),
        fragments=partition(model, num_fragments=2, strategy="balanced"),
        outer_optimizer=Nesterov(learning_rate=0.4),
        codec="int8",
        error_feedback=True,
        on_event=save,
    )
    if began is not None:
        model.load_state_dict(began["model"])
        diloco.load_state_dict(began["diloco"])
    while diloco.steps < STEPS:
        quadratic()(0, diloco.steps, model)
        inner.step()
        diloco.step()
    return model.vector().detach(), saved


def test_a_state_saved_at_the_event_of_a_round_goes_on_as_if_never_stopped() -> None:
    """The round is neither in flight any more, nor is what it settled still open."""
    whole, saved = train()
    assert list(saved) == [5, 7, 9, 11, 13]
    for began in saved.values():
        assert torch.equal(train(began)[0], whole)
