"""What happens to a model after its `DiLoCo` was constructed: it is handled, or said by name, never in silence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco.errors import ConfigurationError
from diloco.events import Event, Note, RoundCommitted, RoundVoid
from tests.odd_modules import H, Wrapping, committed, linear, pair, rounds, with_buffer
from tests.replicas import Swarm


def of(swarm: Swarm, kind: type[Event]) -> list[Any]:
    return [event for event in swarm.events if isinstance(event, kind)]


@pytest.mark.parametrize("least", [1, 2])
def test_a_buffer_that_becomes_nan_in_mid_run_is_refused_and_named(least: int) -> None:
    """Invariant 11. Values that were not finite from the start, such as those of a mask, stay as they are."""
    swarm = pair(lambda: with_buffer(torch.tensor([-math.inf, 1.0]), "scale"), least=least)
    rounds(swarm)
    swarm.models[1].get_buffer("scale")[0] = math.nan
    rounds(swarm)
    reasons = [event.reason for event in of(swarm, RoundVoid)] + [event.note for event in of(swarm, RoundCommitted)[2:]]
    assert len(reasons) == 2
    assert all("replica 1 was refused: its buffer 'scale' became NaN or infinite" in reason for reason in reasons)
    assert swarm.models[0].get_buffer("scale").tolist() == [-math.inf, 1.0]
    if least == 1:  # the replica gets the buffer of the others, and is in the next round
        rounds(swarm)
        assert [event.contributors for event in of(swarm, RoundCommitted)[-2:]] == [(0, 1), (0, 1)]


def test_a_replica_that_a_buffer_keeps_out_of_a_round_stays_out_after_a_resume() -> None:
    """Invariant 6, with the round in flight."""
    first = pair(lambda: with_buffer(torch.ones(1), "scale"), least=1)
    first.models[1].get_buffer("scale").fill_(math.nan)
    for _ in range(H):
        for diloco in first.replicas:
            diloco.begin()
    second = pair(lambda: with_buffer(torch.ones(1), "scale"), least=1)
    second.resume_from(first)
    for diloco in second.replicas:
        diloco.finish()
    assert [event.contributors for event in of(second, RoundCommitted)] == [(0,), (0,)]


def resized(model: nn.Module) -> None:
    model.get_parameter("weight").data = torch.ones(5, 4)


def tied_by_memory(model: nn.Module) -> None:
    model.get_parameter("twin").data = model.get_parameter("weight").data


def integer_buffer(model: nn.Module) -> None:
    model.scale = torch.ones(2, dtype=torch.int64)


def half_frozen() -> nn.Module:
    model = with_buffer(torch.ones(2), "scale")
    model.register_parameter("twin", nn.Parameter(torch.ones(4, 4)))
    model.register_parameter("still", nn.Parameter(torch.ones(3), requires_grad=False))
    return model


@pytest.mark.parametrize(
    "act", [rounds, lambda swarm: swarm.replicas[0].global_model().__enter__(), lambda swarm: swarm.replicas[0].end()]
)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda model: model.register_parameter("weight", nn.Parameter(torch.ones(4, 4))),
            r"parameter weight, parameter weight \(4, 4\) is gone or new",
        ),
        (lambda model: delattr(model, "bias"), r"parameter bias \(4,\) is gone"),
        (resized, r"parameter weight \(4, 4\), parameter weight \(5, 4\)"),
        (lambda model: model.register_parameter("more", nn.Parameter(torch.ones(2))), "parameter more is gone or new"),
        (lambda model: model.get_parameter("still").requires_grad_(True), "parameter still is gone or new"),
        (lambda model: model.register_buffer("late", torch.ones(2)), r"buffer late \(2,\) is"),
        (integer_buffer, r"scale \(2,\), buffer scale \(2,\) torch.int64"),
        (tied_by_memory, "'weight' and 'twin' are two objects on the same memory"),
    ],
)
def test_what_changes_after_the_start_and_is_not_synchronised_is_named(
    change: Callable[[nn.Module], object], words: str, act: Callable[[Swarm], object]
) -> None:
    swarm = pair(half_frozen)
    rounds(swarm)
    change(swarm.models[0])
    with pytest.raises(ConfigurationError, match=words):
        act(swarm)


@pytest.mark.parametrize("names", [("weight",), ("weight", "bias")])
def test_a_parameter_that_is_frozen_afterwards_is_still_synchronised(names: tuple[str, ...]) -> None:
    def run(*, freezing: bool) -> Swarm:
        swarm = pair(linear)
        rounds(swarm)
        for m, model in enumerate(swarm.models):
            for name in names:
                model.get_parameter(name).data.add_(float(m))  # work to be shared by the next round
                model.get_parameter(name).requires_grad_(not freezing)
        swarm.run(H, lambda replica, step, model: None)
        swarm.models[0].get_parameter("weight").data.add_(1.0)  # work of this replica alone
        return swarm

    swarm = run(freezing=True)
    diloco, model = swarm.replicas[0], swarm.models[0]
    assert diloco.digest() == swarm.replicas[1].digest() == run(freezing=False).replicas[0].digest()
    agreed = diloco.named_global_params()
    local = model.get_parameter("weight").detach().clone()
    with diloco.global_model() as shown:
        assert all(torch.equal(parameter, agreed[name]) for name, parameter in shown.named_parameters())
    assert torch.equal(model.get_parameter("weight"), local)
    assert not torch.equal(local, agreed["weight"])


def new_memory(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def hidden_again(model: nn.Module) -> None:
    """Gradients with respect to a frozen parameter, for a figure."""
    model.get_parameter("still").requires_grad_(True)
    model.get_parameter("still").requires_grad_(False)


@pytest.mark.parametrize("change", [nn.Module.half, new_memory, hidden_again])
def test_what_keeps_its_names_and_shapes_goes_on(change: Callable[[nn.Module], object]) -> None:
    swarm = pair(half_frozen)
    rounds(swarm)
    for model in swarm.models:
        change(model)
    before = swarm.models[0].get_parameter("weight").detach().clone()
    rounds(swarm)
    assert committed(swarm)
    after = swarm.models[0].get_parameter("weight").detach()
    torch.testing.assert_close(after.float(), before.float() + 0.5, rtol=0, atol=1e-3)
    assert torch.equal(swarm.models[0].get_buffer("scale"), swarm.models[1].get_buffer("scale"))


def router(bias: float = 0.0, *, quantised: bool = False) -> nn.Module:
    model = linear()
    values: Tensor = torch.full((3,), bias)
    model.register_parameter("router", nn.Parameter(Wrapping(values) if quantised else values, requires_grad=False))
    return model


@pytest.mark.parametrize("quantised", [False, True])
def test_frozen_values_that_differ_at_the_start_are_refused_by_name(quantised: bool) -> None:
    with pytest.raises(ConfigurationError, match=r"frozen parameters.*router"):
        pair(lambda: router(quantised=quantised), lambda: router(1.0, quantised=quantised))
    rounds(pair(lambda: router(quantised=quantised)))


@pytest.mark.parametrize("quantised", [False, True])
def test_a_frozen_parameter_that_changes_is_named_once(quantised: bool) -> None:
    swarm = pair(lambda: router(quantised=quantised))
    rounds(swarm)
    assert not of(swarm, Note)
    for _ in range(3):
        router_of_one = swarm.models[1].get_parameter("router")
        (router_of_one.inner if isinstance(router_of_one, Wrapping) else router_of_one.data).add_(1.0)
        rounds(swarm)
    (note,) = of(swarm, Note)
    assert "The frozen parameter router has changed since the start" in note.text
    assert committed(swarm)
