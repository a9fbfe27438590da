"""What a round has settled when its event is emitted: residuals, buffers, finished rounds, fragments in flight."""

import copy
from typing import Any

import pytest
import torch

from diloco.algorithm import Nesterov, RoundId, SyncSchedule, partition
from diloco.events import Event, RoundCommitted
from diloco.outer import DiLoCo
from tests.faults import Fault
from tests.replicas import Vectors, quadratic, streaming

STEPS = 14


def train(began: dict[str, Any] | None = None) -> tuple[torch.Tensor, dict[int, dict[str, Any]]]:
    """Train one replica, resumed from ``began``. Return its final parameters and its state at each round's event."""
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
    """At its event the round is no longer in flight, and its residuals and counters are settled."""
    whole, saved = train()
    assert list(saved) == [5, 7, 9, 11, 13]
    for began in saved.values():
        assert torch.equal(train(began)[0], whole)


def residuals(diloco: DiLoCo) -> list[torch.Tensor]:
    """Return the error-feedback residual of each fragment."""
    return [fragment.residual.clone() for fragment in diloco.fragments if fragment.residual is not None]


@pytest.mark.parametrize("least", [None, 2])
def test_what_the_codec_lost_is_kept_only_of_work_that_a_mean_took(least: int | None) -> None:
    """If the round is void or excludes replica 2, the next pseudo-gradient contains that work and its residual."""
    fault = Fault(kind="drop", replica=2, round=RoundId(0, 1))
    swarm = streaming(faults=[fault], least=least, codec="int8", error_feedback=True)
    swarm.run(9, quadratic())  # round (0, 1) was sent at 8 and is merged at 10
    before = [residuals(diloco)[0] for diloco in swarm.replicas]
    assert all(bool(residual.any()) for residual in before)
    swarm.run(1, quadratic())
    after = [residuals(diloco)[0] for diloco in swarm.replicas]
    kept = [torch.equal(old, new) for old, new in zip(before, after, strict=True)]
    assert kept == ([False, False, True] if least else [True, True, True])
    swarm.run(4, quadratic())
    assert not any(torch.equal(old, residuals(diloco)[0]) for old, diloco in zip(after, swarm.replicas, strict=True))


def test_a_void_round_counts_as_finished() -> None:
    """The count is part of the state that others fetch and of checkpoints."""
    swarm = streaming(faults=[Fault(kind="drop", replica=1, round=RoundId(0, 1))])
    found, saved = [], []
    for steps in (6, 4, 4):
        swarm.run(steps, quadratic())
        fetched = swarm.transport.endpoint(1).fetch(0, [0]).result()
        found.append((fetched["finished_rounds"], fetched["outer_step"]))
        saved.append(swarm.replicas[0].state_dict()["fragments"][0]["finished_rounds"])
    assert found == [(1, 1), (2, 1), (3, 2)]
    assert saved == [1, 2, 3]
    again = streaming()
    again.replicas[0].load_state_dict(swarm.replicas[0].state_dict())
    assert again.transport.endpoint(1).fetch(0, [0]).result()["finished_rounds"] == 3
