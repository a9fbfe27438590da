"""The agreed buffers: where the global parameters are in the model, its buffers are those of the last average."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from diloco import DiLoCo, Sgd, SyncSchedule
from diloco.algorithm import partition
from diloco.events import RoundVoid
from diloco.outer import Fragment
from tests.replicas import Swarm
from tests.same import same

H = 4
SCHEDULE = SyncSchedule(inner_steps=H, num_fragments=2, overlap_steps=1)


class Odd(nn.Module):
    """A model with buffers of every kind: of BatchNorm, bfloat16, integers, shared, not persistent, and None."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.second, self.plain = nn.Linear(4, 2), nn.BatchNorm1d(2, track_running_stats=False)  # buffers that are None
        self.register_buffer("scale", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("derived", torch.zeros(1), persistent=False)
        self.holder = nn.Module()
        self.holder.register_buffer("shared", self.norm.running_mean)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.get_buffer("scale").copy_(1 + inputs.abs().mean() / 4)
            self.get_buffer("derived").add_(1)
        out: Tensor = self.plain(self.second(torch.tanh(self.norm(self.first(inputs))))) * self.get_buffer("scale")
        return out


FRAGMENTS = partition(Odd(), num_fragments=2, strategy="balanced")


def batch(replica: int, step: int) -> Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(100 * replica + step)) * (1 + replica) + replica


def gradient(replica: int, step: int, model: nn.Module) -> None:
    model(batch(replica, step)).pow(2).mean().backward()


def swarm_of(replicas: int = 2) -> Swarm:
    return Swarm(replicas, SCHEDULE, make_model=Odd, fragments=FRAGMENTS)


def outputs(diloco: DiLoCo) -> Tensor:
    """Return what the global model computes in evaluation mode."""
    with diloco.global_model() as model, torch.no_grad():
        model.eval()
        out: Tensor = model(batch(7, 7))
        model.train()
        return out


@pytest.mark.parametrize("steps", [0, 2, H + 5, 2 * H + 4, 3 * H + 1])
def test_the_global_model_gives_the_same_outputs_on_all_replicas_at_any_step(steps: int) -> None:
    swarm = swarm_of()
    swarm.run(steps, gradient)
    first, second = swarm.replicas
    local = [copy.deepcopy(model.state_dict()) for model in swarm.models]
    assert first.digest() == second.digest()
    assert torch.equal(outputs(first), outputs(second))
    assert same(first.global_values(), second.global_values())
    assert all(map(same, (model.state_dict() for model in swarm.models), local))  # the local buffers are back
    assert steps == 0 or not same(local[0]["norm.running_mean"], local[1]["norm.running_mean"])
    for diloco in swarm.replicas:
        diloco.drain()
    assert torch.equal(outputs(first), outputs(second))


def test_the_agreed_buffers_are_those_of_the_last_average_in_their_own_dtypes() -> None:
    swarm = swarm_of()
    means = swarm.models[0].get_buffer("norm.running_mean"), swarm.models[1].get_buffer("norm.running_mean")
    swarm.run(H + SCHEDULE.fragment_offsets[1], gradient)  # the last fragment is in flight
    mean = (means[0] + means[1]) / 2
    swarm.run(1, gradient)
    swarm.run(2, gradient)
    agreed = swarm.replicas[1].global_values()
    torch.testing.assert_close(agreed["norm.running_mean"], mean)
    assert not torch.equal(means[0], mean)
    assert agreed["norm.num_batches_tracked"] == H + SCHEDULE.fragment_offsets[1]
    assert agreed["norm.num_batches_tracked"].dtype == torch.int64
    assert agreed["scale"].dtype == torch.bfloat16
    assert same(agreed["holder.shared"], agreed["norm.running_mean"])
    assert not {"derived", "plain.running_mean"} & agreed.keys()


def test_a_resumed_replica_has_the_agreed_and_the_local_buffers_of_before() -> None:
    whole, first, second = swarm_of(), swarm_of(), swarm_of()
    whole.run(3 * H, gradient)
    first.run(2 * H - 1, gradient)
    second.resume_from(first)
    assert same(second.replicas[1].global_values(), first.replicas[1].global_values())
    second.run(H + 1, gradient)
    assert same(second.models[1].state_dict(), whole.models[1].state_dict())
    assert second.replicas[0].digest() == whole.replicas[0].digest()
    assert torch.equal(outputs(second.replicas[0]), outputs(whole.replicas[1]))


@pytest.mark.parametrize("keep_work", [False, True])
def test_who_takes_over_gets_the_agreed_buffers(keep_work: bool) -> None:
    """A joiner continues with them; one that keeps its work keeps its own buffers, as it keeps its parameters."""
    swarm = swarm_of()
    swarm.run(2 * H - 1, gradient)
    for diloco in swarm.replicas:
        diloco.drain()
    donor, model = swarm.replicas[0], Odd()
    joiner = DiLoCo(
        model,
        torch.optim.SGD(model.parameters()),
        transport=swarm.transport.endpoint(1),
        schedule=SCHEDULE,
        fragments=FRAGMENTS,
        outer_optimizer=Sgd(learning_rate=1.0),
        compare_arguments=False,
    )
    joiner.take_over([0], keep_work=keep_work)
    assert torch.equal(outputs(joiner), outputs(donor))
    assert same(model.state_dict()["scale"], Odd().state_dict()["scale"]) == keep_work
    assert keep_work or same(joiner.local_values(), donor.global_values())


def flip(buffers: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {**buffers, name: (buffers[name].view(torch.uint8) ^ 1).view(buffers[name].dtype)}


@pytest.mark.parametrize("name", ["buffers", "integers"])
def test_agreed_buffers_that_differ_by_a_bit_are_found_at_the_next_exchange_and_healed(name: str) -> None:
    swarm = swarm_of(3)
    swarm.run(2 * H, gradient)
    last: Fragment = swarm.replicas[2].fragments[-1]
    last.state.buffers = flip(dict(last.state.buffers), name)
    swarm.run(H, gradient)
    assert any(isinstance(event, RoundVoid) for event in swarm.events)
    swarm.run(H, gradient)
    assert same(swarm.replicas[2].global_values(), swarm.replicas[0].global_values())


def without_buffers(model: nn.Module) -> nn.Module:
    for module in model.modules():
        module._buffers.clear()
    return model


@pytest.mark.parametrize("make", [Odd, lambda: without_buffers(nn.Linear(3, 2))])
def test_what_is_held_and_what_is_agreed_have_the_same_names_and_shapes(make: Callable[[], nn.Module]) -> None:
    model = make()
    diloco = DiLoCo(model, torch.optim.SGD(model.parameters()))
    held, agreed = diloco.local_values(), diloco.global_values()
    assert {name: each.shape for name, each in held.items()} == {name: each.shape for name, each in agreed.items()}
    assert held.keys() == model.state_dict().keys()
