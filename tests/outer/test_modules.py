"""Odd parameters, buffers and wrappers, and models that change: averaged with the same bits, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

from diloco import DiLoCo, SyncSchedule
from diloco.errors import ConfigurationError
from diloco.events import RoundCommitted
from tests.replicas import Swarm

H = 2


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def with_buffer(buffer: Tensor, name: str = "buffer", model: nn.Module | None = None, **kind: bool) -> nn.Module:
    model = model or linear()
    model.register_buffer(name, buffer, **kind)
    return model


def with_parameter(parameter: Any, name: str = "odd", model: nn.Module | None = None) -> nn.Module:
    model = model or linear()
    model.register_parameter(name, parameter if isinstance(parameter, nn.Parameter) else nn.Parameter(parameter))
    return model


class Wrapping(torch.Tensor):
    """A tensor whose values are in another one, as those of quantised weights are."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapping:
        made: Wrapping = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]  # missing in torch's stubs
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*(each.inner if isinstance(each, Wrapping) else each for each in args), **(kwargs or {}))
        return Wrapping(out) if func is torch.ops.aten.detach.default else out

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None


def pair(make: Callable[[], nn.Module], other: Callable[[], nn.Module] | None = None) -> Swarm:
    """Return two replicas, of ``make()`` and of ``other()`` or else ``make()``."""
    return Swarm(
        2,
        SyncSchedule(inner_steps=H),
        make_model=iter([make(), (other or make)()]).__next__,
        make_inner=lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5),
    )


def rounds(swarm: Swarm, count: int = 1) -> None:
    """Move the trainable parameters of replica m by m, and merge, ``count`` times."""

    def gradient(replica: int, step: int, model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, -float(replica))

    swarm.run(count * H, gradient)


def committed(swarm: Swarm) -> bool:
    """Return whether every round has been committed, and there was one."""
    void = [diloco.rounds_void for diloco in swarm.replicas]
    return void == [0, 0] and any(isinstance(event, RoundCommitted) for event in swarm.events)


LARGE = torch.finfo(torch.float32).max
MASK = torch.full((4, 4), -math.inf).triu(1)

# kind -> buffer of replica 0, of replica 1, and of both after a round
AVERAGED: dict[str, tuple[Tensor, Tensor, Tensor]] = {
    "float32": (torch.zeros(3), torch.full((3,), 3.0), torch.full((3,), 1.5)),
    "bfloat16": (torch.zeros(3).bfloat16(), torch.ones(3).bfloat16(), torch.full((3,), 0.5).bfloat16()),
    "float8": (*(torch.tensor([x]).to(torch.float8_e4m3fn) for x in (0.0, 1.0, 0.5)),),  # type: ignore[dict-item]  # a float8, not a pair
    "nothing": (torch.empty(0, 3), torch.empty(0, 3), torch.empty(0, 3)),
    "of no dimension": (torch.tensor(1.0), torch.tensor(2.0), torch.tensor(1.5)),
    "transposed": (torch.zeros(2, 3).t(), torch.arange(6.0).view(2, 3).t(), torch.arange(6.0).view(2, 3).t() / 2),
    "bool": (torch.tensor([True]), torch.tensor([False]), torch.tensor([True])),
    "int64": (torch.tensor([2**62 + 1]), torch.tensor([3]), torch.tensor([2**62 + 1])),
    "a mask of -inf": (MASK, MASK, MASK),
    "large and not equal": (torch.tensor([LARGE]), torch.tensor([LARGE / 2]), torch.tensor([LARGE / 4 * 3])),
    "NaN on both": (torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 2.0]), torch.tensor([math.nan, 1.5])),
    "NaN on one": (torch.tensor([math.nan]), torch.tensor([3.0]), torch.tensor([3.0])),
}


def test_buffers_are_averaged_with_the_same_bits() -> None:
    def holding(replica: int) -> nn.Module:
        model = linear()
        for number, buffers in enumerate(AVERAGED.values()):
            buffer = buffers[replica]
            with_buffer(buffer.clone() if buffer.is_contiguous() else buffer, f"buffer_{number}", model)
        return model

    swarm = pair(lambda: holding(0), lambda: holding(1))
    rounds(swarm, 2)
    assert committed(swarm)
    for number, (kind, (*_, mean)) in enumerate(AVERAGED.items()):
        for model in swarm.models:
            buffer = model.get_buffer(f"buffer_{number}")
            assert buffer.dtype == mean.dtype
            torch.testing.assert_close(buffer, mean, rtol=0, atol=0, equal_nan=True, msg=kind)


NOT_BUFFERS: dict[str, Callable[[], Tensor]] = {
    "float64": lambda: torch.ones(2, dtype=torch.float64),
    "complex64": lambda: torch.ones(2, dtype=torch.complex64),
    "expanded": lambda: torch.tril(torch.ones(4, 4)).expand(3, 4, 4),
    "not a dense": lambda: torch.eye(4).to_sparse(),
    "Wrapping": lambda: Wrapping(torch.ones(3)),
}
REFUSED: dict[str, Callable[[], nn.Module]] = {
    **{f"'odd' .*{why}": lambda make=make: with_buffer(make(), "odd") for why, make in NOT_BUFFERS.items()},  # type: ignore[misc]  # bound now
    "'odd' has no shape yet": lambda: with_buffer(nn.parameter.UninitializedBuffer(), "odd"),
    "odd.*float64.* Use ": lambda: with_parameter(torch.ones(2, dtype=torch.float64)),
    "odd.*expanded.* Train ": lambda: with_parameter(torch.ones(1).expand(4)),
    "odd.*has no shape yet.* Run ": lambda: with_parameter(nn.UninitializedParameter()),
    "odd.*meta.* Load ": lambda: with_parameter(torch.ones(3, device="meta")),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("words", REFUSED)
def test_a_tensor_that_can_not_be_averaged_is_refused_by_name(words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        pair(REFUSED[words])


@pytest.mark.parametrize("kind", NOT_BUFFERS)
def test_a_derived_buffer_is_left_alone(kind: str) -> None:
    rounds(pair(lambda: with_buffer(NOT_BUFFERS[kind](), "odd", persistent=False)))


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_two_objects_on_the_same_memory_are_refused_by_name(kind: str) -> None:
    def twins() -> nn.Module:
        model = linear()
        weight = model.get_parameter("weight").detach()
        return with_parameter(weight, "twin", model) if kind == "parameter" else with_buffer(weight, "twin", model)

    with pytest.raises(ConfigurationError, match=r"'weight' and 'twin' (are two objects on the same|share) memory"):
        pair(twins)


def columns() -> nn.Module:
    both, model = torch.arange(16.0).view(4, 4), nn.Module()
    model.register_parameter("left", nn.Parameter(both[:, :2]))
    model.register_parameter("right", nn.Parameter(both[:, 2:]))
    return model


def masks() -> nn.Module:
    table, model = torch.ones(8, 8).tril(), nn.Sequential(linear(), nn.Module(), nn.Module())
    for number, size in ((1, 4), (2, 6)):
        model[number].register_buffer("mask", table[:size, :size])
    return model


def shared() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].weight = model[0].weight
    model[2].register_buffer("alias", model[2].running_mean)
    model.append(model[2])
    return model


def odd_state_dict() -> nn.Module:
    class Bare(nn.BatchNorm1d):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {}

    return nn.Sequential(linear(), Bare(4))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "an own state_dict": odd_state_dict,
    "tied and shared": shared,
    "views of one mask": masks,
    "alternating columns of one matrix": columns,
    "a parametrisation": lambda: parametrizations.weight_norm(linear()),
    "bfloat16 and float16 parameters": lambda: with_parameter(torch.ones(2).half()).bfloat16(),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", MODULES)
def test_every_tensor_of_an_odd_module_is_averaged_once(kind: str) -> None:
    swarm = pair(MODULES[kind])
    start = {name: tensor.detach().clone() for name, tensor in swarm.models[0].named_parameters()}
    for m, model in enumerate(swarm.models):
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.fill_(float(m))
    rounds(swarm)
    assert committed(swarm)
    assert len({diloco.digest() for diloco in swarm.replicas}) == 1
    for model in swarm.models:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), start[name] + 0.5, rtol=0, atol=1e-2, msg=name)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                assert buffer.tolist() == [0.5] * 4


def norm() -> nn.Module:
    return nn.Sequential(linear(), nn.BatchNorm1d(4))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when it imports its compiler
@pytest.mark.parametrize(
    "wrap",
    [
        torch.compile,
        checkpoint_wrapper,
        lambda model: nn.Sequential(*(checkpoint_wrapper(each) for each in model)),
        lambda model: torch.compile(nn.DataParallel(nn.Sequential(*(torch.compile(each) for each in model)))),
    ],
)
def test_a_wrapped_replica_works_beside_a_plain_one(wrap: Callable[[nn.Module], Any]) -> None:
    mixed, plain = pair(norm, lambda: wrap(norm())), pair(norm)
    for swarm in (mixed, plain):
        mean = next(buffer for name, buffer in swarm.models[1].named_buffers() if name.endswith("running_mean"))
        mean.fill_(1.0)
        rounds(swarm, 2)
    assert committed(mixed)
    assert [diloco.digest() for diloco in mixed.replicas] == [diloco.digest() for diloco in plain.replicas]
    assert torch.equal(mixed.models[0].get_buffer("1.running_mean"), plain.models[0].get_buffer("1.running_mean"))
    mixed.replicas[1].load_state_dict(plain.replicas[1].state_dict())


@pytest.fixture
def ranks() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


@pytest.mark.usefixtures("ranks")
@pytest.mark.filterwarnings("ignore:FSDP will not all-gather")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when it imports its compiler
@pytest.mark.parametrize(
    "wrap", [DistributedDataParallel, lambda model: torch.compile(DistributedDataParallel(model)), sharded]
)
def test_a_replica_of_ranks_works_beside_a_plain_one(wrap: Callable[[nn.Module], Any]) -> None:
    swarm = pair(norm, lambda: wrap(norm()))
    rounds(swarm, 2)
    assert committed(swarm)
    assert swarm.replicas[0].digest() == swarm.replicas[1].digest()


@pytest.mark.usefixtures("ranks")
@pytest.mark.filterwarnings("ignore:FSDP will not all-gather")
def test_a_sharded_model_may_be_evaluated_before_any_call() -> None:
    """FSDP2 leaves the whole parameters in the root module after a forward pass without a backward pass."""
    model = sharded(norm())

    def evaluated() -> None:
        with torch.no_grad():
            model(torch.ones(2, 4))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    evaluated()
    diloco = DiLoCo(model, optimizer, schedule=SyncSchedule(inner_steps=1))
    for _ in range(2):
        evaluated()
        diloco.step()
        evaluated()
        with diloco.global_model():
            evaluated()
    assert diloco.rounds_committed == 2


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: with_buffer(torch.ones(3)), r"buffers = \d.buffer \(2,\).* and replica 1 has .* = \d.buffer \(3,\)"),
        (lambda: with_buffer(torch.ones(2).half()), r"buffers = \d.buffer .*float16"),
        (lambda: with_buffer(torch.ones(2), persistent=False), r"buffers = \d.buffer .* has buffers = none"),
        (lambda: with_buffer(torch.ones(2), "other"), r"buffers = \d.other"),
    ],
)
def test_buffers_that_differ_are_refused_by_name(other: Callable[[], nn.Module], words: str) -> None:
    def after(make: Callable[[], nn.Module]) -> nn.Module:
        return nn.Sequential(*(nn.BatchNorm1d(1, momentum=None) for _ in range(6)), make())

    with pytest.raises(ConfigurationError, match=words):
        pair(lambda: after(lambda: with_buffer(torch.ones(2))), lambda: after(other))


def resized(model: nn.Module) -> None:
    model.get_parameter("weight").data = torch.ones(5, 4)


def integer_buffer(model: nn.Module) -> None:
    model.scale = torch.ones(2, dtype=torch.int64)


def half_frozen() -> nn.Module:
    model = with_buffer(torch.ones(2), "scale")
    model.register_parameter("still", nn.Parameter(torch.ones(3), requires_grad=False))
    return model


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
    ],
)
def test_what_changes_after_the_start_and_is_not_synchronised_is_named(
    change: Callable[[nn.Module], object], words: str
) -> None:
    swarm = pair(half_frozen)
    rounds(swarm)
    change(swarm.models[0])
    first = swarm.replicas[0]
    for act in (lambda: rounds(swarm), first.global_model().__enter__, first.end):
        with pytest.raises(ConfigurationError, match=words):
            act()


@pytest.mark.parametrize("names", [("weight",), ("weight", "bias")])
def test_a_parameter_that_is_frozen_afterwards_is_still_synchronised(names: tuple[str, ...]) -> None:
    swarms = pair(linear), pair(linear)
    for swarm, freezing in zip(swarms, (True, False), strict=True):
        rounds(swarm)
        for m, model in enumerate(swarm.models):
            for name in names:
                model.get_parameter(name).data.add_(float(m))  # work to be shared by the next round
                model.get_parameter(name).requires_grad_(not freezing)
        swarm.run(H, lambda replica, step, model: None)
    assert len({diloco.digest() for swarm in swarms for diloco in swarm.replicas}) == 1
    diloco, model = swarms[0].replicas[0], swarms[0].models[0]
    model.get_parameter("weight").data.add_(1.0)  # work of this replica alone
    agreed, local = diloco.named_global_params(), model.get_parameter("weight").detach().clone()
    with diloco.global_model() as shown:
        assert all(torch.equal(parameter, agreed[name]) for name, parameter in shown.named_parameters())
    assert torch.equal(model.get_parameter("weight"), local)


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
