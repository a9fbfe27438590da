"""Odd parameters, buffers and wrappers, and models that change: averaged with the same bits, or refused by name."""

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
from torch.testing._internal.two_tensor import TwoTensor

from diloco import DiLoCo, SyncSchedule
from diloco.errors import ConfigurationError
from diloco.events import RoundCommitted
from tests.replicas import Swarm

H = 2
pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP will not all-gather"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch, when it imports its compiler
]


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def holding(tensor: Tensor, name: str = "odd", model: nn.Module | None = None, **kind: bool) -> nn.Module:
    """Return ``model``, or else a linear layer, with one more parameter or buffer."""
    model = model or linear()
    if isinstance(tensor, nn.Parameter):
        model.register_parameter(name, tensor)
    else:
        model.register_buffer(name, tensor, **kind)
    return model


def wrapping(values: Tensor) -> Tensor:
    """Return a tensor whose values are in others, as those of quantised weights are."""
    return TwoTensor(values, values)


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
}


def test_buffers_are_averaged_with_the_same_bits() -> None:
    def with_all(replica: int) -> nn.Module:
        model = linear()
        for number, buffers in enumerate(AVERAGED.values()):
            holding(buffers[replica].clone(), f"buffer_{number}", model)
        return model

    swarm = pair(lambda: with_all(0))
    swarm.models[1].load_state_dict(with_all(1).state_dict())
    rounds(swarm, 2)
    assert committed(swarm)
    for number, (kind, (*_, mean)) in enumerate(AVERAGED.items()):
        for model in swarm.models:
            buffer = model.get_buffer(f"buffer_{number}")
            assert buffer.dtype == mean.dtype
            torch.testing.assert_close(buffer, mean, rtol=0, atol=0, msg=kind)


NOT_BUFFERS: dict[str, Callable[[], Tensor]] = {
    "float64": lambda: torch.ones(2, dtype=torch.float64),
    "complex64": lambda: torch.ones(2, dtype=torch.complex64),
    "expanded": lambda: torch.tril(torch.ones(4, 4)).expand(3, 4, 4),
    "not a dense": lambda: torch.eye(4).to_sparse(),
    "TwoTensor": lambda: wrapping(torch.ones(3)),
}
REFUSED: dict[str, Callable[[], nn.Module]] = {
    **{f"'odd' .*{why}": lambda make=make: holding(make()) for why, make in NOT_BUFFERS.items()},  # type: ignore[misc]  # bound now
    "'odd' has no shape yet": lambda: holding(nn.parameter.UninitializedBuffer()),
    "odd.*float64.* Use ": lambda: holding(nn.Parameter(torch.ones(2, dtype=torch.float64))),
    "odd.*expanded.* Train ": lambda: holding(nn.Parameter(torch.ones(1).expand(4))),
    "odd.*has no shape yet.* Run ": lambda: holding(nn.UninitializedParameter()),
    "odd.*meta.* Load ": lambda: holding(nn.Parameter(torch.ones(3, device="meta"))),
    "odd.*repeats its own memory.* Train ": lambda: holding(nn.Parameter(torch.arange(5.0).as_strided((3, 3), (1, 1)))),
}
BASE = torch.arange(24.0)
# how a second tensor may lie on the memory of a 4 x 4 matrix at its values 4 to 19
SHARED: dict[str, Callable[[], Tensor]] = {
    "all of it": lambda: BASE[4:20].view(4, 4),
    "its end and more": lambda: BASE[19:],
    "its beginning and less": lambda: BASE[:5],
    "its transpose": lambda: BASE[4:20].view(4, 4).t(),
    "one row": lambda: BASE[8:12],
    "one column": lambda: BASE[4:20].view(4, 4)[:, 3],
    "a value in each row, from before it": lambda: BASE[::4],
    "the bytes of one value, as bfloat16": lambda: BASE[10:11].view(torch.bfloat16)[1:],
    "the last value": lambda: BASE[19],
}


def with_another(other: Tensor) -> nn.Module:
    """Return a model with the matrix ``weight`` and ``other``, a parameter or a buffer."""
    return holding(other, "other", holding(nn.Parameter(BASE[4:20].view(4, 4)), "weight", nn.Module()))


@pytest.mark.parametrize("kind", ["trained", "frozen", "buffer"])
@pytest.mark.parametrize("place", SHARED)
def test_a_parameter_that_shares_memory_is_refused_with_both_names(place: str, kind: str) -> None:
    other = {"trained": nn.Parameter, "frozen": frozen, "buffer": torch.detach}[kind](SHARED[place]())
    with pytest.raises(
        ConfigurationError, match=r"'(weight|other)' and '(weight|other)' (are two objects that )?share"
    ):
        pair(lambda: with_another(other))


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


@pytest.mark.parametrize("start", [0, 3, 20])
def test_views_of_one_memory_that_have_no_value_in_common_are_fine(start: int) -> None:
    """Neighbours, and every fourth value of a storage between those of the other."""
    other = {0: BASE[:4], 3: BASE[3::4], 20: BASE[20:]}[start]
    matrix = BASE[4:20].view(4, 4)[:, :3]
    rounds(pair(lambda: holding(nn.Parameter(other), "other", holding(nn.Parameter(matrix), "weight", nn.Module()))))


def test_two_frozen_parameters_may_share_memory() -> None:
    rounds(pair(lambda: holding(frozen(BASE[2:6]), "late", holding(frozen(BASE[:4]), "early", linear()))))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("words", REFUSED)
def test_a_tensor_that_can_not_be_averaged_is_refused_by_name(words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        pair(REFUSED[words])


@pytest.mark.parametrize("kind", NOT_BUFFERS)
def test_a_derived_buffer_is_left_alone(kind: str) -> None:
    rounds(pair(lambda: holding(NOT_BUFFERS[kind](), persistent=False)))


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
    "bfloat16 and float16 parameters": lambda: holding(nn.Parameter(torch.ones(2).half())).bfloat16(),
}


def running_means(model: nn.Module) -> list[Tensor]:
    return [buffer for name, buffer in model.named_buffers() if name.endswith("running_mean")]


@pytest.mark.parametrize("kind", MODULES)
def test_every_tensor_of_an_odd_module_is_averaged_once(kind: str) -> None:
    swarm = pair(MODULES[kind])
    start = {name: tensor.detach().clone() for name, tensor in swarm.models[0].named_parameters()}
    means = [mean for model in swarm.models for mean in running_means(model)]
    for number, mean in enumerate(means):
        mean.fill_(float(number))
    rounds(swarm)
    assert committed(swarm)
    assert len({diloco.digest() for diloco in swarm.replicas}) == 1
    for model in swarm.models:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), start[name] + 0.5, rtol=0, atol=1e-2, msg=name)
    assert all(mean.tolist() == [0.5] * 4 for mean in means)


@pytest.fixture
def ranks() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def norm() -> nn.Module:
    return nn.Sequential(linear(), nn.BatchNorm1d(4))


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    "wrap",
    [
        torch.compile,
        checkpoint_wrapper,
        lambda model: nn.Sequential(*(checkpoint_wrapper(each) for each in model)),
        lambda model: torch.compile(nn.DataParallel(nn.Sequential(*(torch.compile(each) for each in model)))),
        lambda model: torch.compile(DistributedDataParallel(model)),
        sharded,
    ],
)
def test_a_wrapped_replica_works_beside_a_plain_one(wrap: Callable[[nn.Module], Any]) -> None:
    mixed, plain = pair(norm, lambda: wrap(norm())), pair(norm)
    for swarm in (mixed, plain):
        running_means(swarm.models[1])[0].fill_(1.0)
        rounds(swarm, 2)
    assert committed(mixed)
    assert [diloco.digest() for diloco in mixed.replicas] == [diloco.digest() for diloco in plain.replicas]
    assert torch.equal(mixed.models[0].get_buffer("1.running_mean"), plain.models[0].get_buffer("1.running_mean"))
    mixed.replicas[1].load_state_dict(plain.replicas[1].state_dict())


@pytest.mark.usefixtures("ranks")
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


def after_others(buffer: Tensor, name: str = "buffer", **kind: bool) -> nn.Module:
    return nn.Sequential(*(nn.BatchNorm1d(1, momentum=None) for _ in range(6)), holding(buffer, name, **kind))


def router(bias: float, kind: Callable[[Tensor], Tensor]) -> nn.Module:
    return holding(nn.Parameter(kind(torch.full((3,), bias)), requires_grad=False), "router")


TWO = lambda: after_others(torch.ones(2))  # noqa: E731


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (TWO, lambda: after_others(torch.ones(3)), r"buffers = \d.buffer \(2,\).* 1 has .* = \d.buffer \(3,\)"),
        (TWO, lambda: after_others(torch.ones(2).half()), r"buffers = \d.buffer .*float16"),
        (TWO, lambda: after_others(torch.ones(2), persistent=False), r"buffers = \d.buffer .* has buffers = none"),
        (TWO, lambda: after_others(torch.ones(2), "other"), r"buffers = \d.other"),
        (lambda: router(0.0, torch.clone), lambda: router(1.0, torch.clone), r"frozen parameters.*router"),
        (lambda: router(0.0, wrapping), lambda: router(1.0, wrapping), r"frozen parameters.*router"),
    ],
)
def test_what_differs_at_the_start_is_refused_by_name(
    one: Callable[[], nn.Module], other: Callable[[], nn.Module], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        pair(one, other)
    rounds(pair(one))


def half_frozen() -> nn.Module:
    return holding(nn.Parameter(torch.ones(3), requires_grad=False), "still", holding(torch.ones(2), "scale"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: setattr(model, "weight", nn.Parameter(torch.ones(4, 4))), r"weight, .* weight \(4, 4\) is"),
        (lambda model: delattr(model, "bias"), r"parameter bias \(4,\) is gone"),
        (lambda model: setattr(model.weight, "data", torch.ones(5, 4)), r"\(4, 4\), parameter weight \(5, 4\)"),
        (lambda model: model.register_parameter("more", nn.Parameter(torch.ones(2))), "parameter more is gone or new"),
        (lambda model: model.get_parameter("still").requires_grad_(True), "parameter still is gone or new"),
        (lambda model: model.register_buffer("late", torch.ones(2)), r"buffer late \(2,\) is"),
        (lambda model: setattr(model, "scale", torch.ones(2).long()), r"buffer scale \(2,\) torch.int64"),
    ],
)
def test_what_changes_and_is_not_synchronised_is_named(change: Callable[[nn.Module], object], words: str) -> None:
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


@pytest.mark.parametrize(
    "change",
    [
        nn.Module.half,
        lambda model: model._apply(torch.clone),  # new memory
        lambda model: model.still.requires_grad_(True).requires_grad_(False),  # its gradient was needed for a figure
    ],
)
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
