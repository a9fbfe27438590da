"""The first weights are compared when `DiLoCo` is constructed, unless a replica goes on from a saved state or joins."""

import copy
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

from diloco import DiLoCo, InProcessTransport, SyncSchedule
from diloco.errors import ConfigurationError
from diloco.protocol import Rules
from diloco.transport import Place, Transport, connect
from tests.replicas import Swarm, quadratic
from tests.transport.wires import QUICK, Wires, at_once

SCHEDULE = SyncSchedule(inner_steps=100)
ADVICE = r"first weights \(seed all replicas alike, not by rank.*\)"


@pytest.fixture
def wires() -> Iterator[Wires]:
    with closing(Wires()) as made:
        yield made


def net(weight: float = 0.5, mean: float = 0.0, *, trains: bool = True) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for parameter in model.parameters():
        nn.init.constant_(parameter, weight)
    model[0].bias.requires_grad_(trains)
    model.get_buffer("1.running_mean").fill_(mean)
    return model


def made(transport: Transport, model: nn.Module | None = None, **more: Any) -> DiLoCo:
    model = model or net()
    inner = more.pop("inner", torch.optim.SGD)([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return DiLoCo(model, inner, transport=transport, **{"schedule": SCHEDULE, **more})


OTHERS: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: net(0.25), f"replica 0 .*has {ADVICE} = 0.weight .*; 1.bias .* and replica 1 .*has {ADVICE} = 0.weight"),
    (lambda: net(mean=1.0), rf"has {ADVICE} = 1.running_mean \w+ and replica 1 .*has {ADVICE} = 1.running_mean \w+\. "),
    (lambda: net(trains=False), "has fragment 0 = .*0.bias.*"),
]


@pytest.mark.parametrize(("other", "words"), OTHERS)
def test_other_first_weights_are_refused_by_name(other: Callable[[], nn.Module], words: str, wires: Wires) -> None:
    hub = InProcessTransport(2)
    first = made(hub.endpoint(0))
    with pytest.raises(ConfigurationError, match=words):
        made(hub.endpoint(1), other())
    with pytest.raises(ConfigurationError, match=words):
        [first.step() for _ in range(100)]
    ways = wires.meet(2)
    for each in at_once([lambda: made(ways[0]), lambda: made(ways[1], other())]):
        with pytest.raises(ConfigurationError, match=words):
            raise each


def test_a_joiner_with_other_weights_takes_over_those_of_the_members(wires: Wires) -> None:
    rules = {"continue_without_lost": True, "late_s": 10.0}
    ways = wires.meet(2, **rules)
    members = at_once([lambda m=m: made(ways[m]) for m in range(2)])
    assert all(isinstance(each, DiLoCo) for each in members), members
    ways[1].leave()
    ways[1].close()
    place = Place(replica=1, num_replicas=2, rendezvous=ways[0].address)
    joiner = connect(place, Rules(**(QUICK | rules)))
    assert joiner.joining
    with closing(joiner.transport):
        taken = made(joiner.transport, net(0.25, 1.0))
        taken.take_over([0])
        assert taken.digest() == members[0].digest()
    members[0].step()


def resumed(hub: InProcessTransport, saved: list[tuple[Any, ...]], **more: Any) -> list[DiLoCo]:
    """Construct replicas around models and optimizers that already have the saved state, as many scripts do."""
    replicas = []
    for m, (model_state, inner_state, _) in enumerate(saved):
        model = net()
        model.load_state_dict(model_state)
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        if inner_state:
            inner.load_state_dict(inner_state)
        replicas.append(DiLoCo(model, inner, transport=hub.endpoint(m), schedule=SCHEDULE, **more))
    return replicas


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_saved_run_goes_on_with_local_weights_that_differ(*, with_optimizer: bool) -> None:
    swarm = Swarm(
        2, SCHEDULE, make_model=net, make_inner=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1), outer=None
    )
    swarm.run(3, quadratic())
    parts = zip(swarm.models, swarm.inner, swarm.replicas, strict=True)
    saved = [copy.deepcopy(tuple(each.state_dict() for each in part)) for part in parts]
    saved = [(model, inner if with_optimizer else None, diloco) for model, inner, diloco in saved]
    again = resumed(InProcessTransport(2), saved, compare_weights=with_optimizer, outer_optimizer=swarm_outer(swarm))
    for diloco, (*_, state) in zip(again, saved, strict=True):
        diloco.load_state_dict(state)
        diloco.step()
    assert [diloco.steps for diloco in again] == [4, 4]
    first, second = resumed(InProcessTransport(2), saved, compare_weights=with_optimizer)
    if with_optimizer:  # nobody has loaded a state, so it is a new run
        first.step()
        with pytest.raises(ConfigurationError, match=ADVICE):
            second.step()


def swarm_outer(swarm: Swarm) -> Any:
    return swarm.replicas[0].fragments[0].state._optimizer


def test_optimizers_with_a_state_of_their_own_from_the_start_are_compared_in_the_first_step() -> None:
    """Adagrad makes its state when it is constructed. The first step has already moved the local weights."""
    for weight in (0.5, 0.25):
        hub = InProcessTransport(2)
        pair = [made(hub.endpoint(m), net(each), inner=torch.optim.Adagrad) for m, each in enumerate((0.5, weight))]
        for m, diloco in enumerate(pair):
            for parameter in diloco.model.parameters():
                parameter.data.add_(m)
        pair[0].step()
        if weight == 0.5:
            pair[1].step()
            continue
        with pytest.raises(ConfigurationError, match=ADVICE):
            pair[1].step()
