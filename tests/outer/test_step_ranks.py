"""What communicates at every step among the ranks of several replicas is refused; inside one replica it is right."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from diloco import DiLoCo, SyncSchedule, connect_process_group, connect_tcp
from diloco.errors import ConfigurationError
from diloco.transport import Address, Transport
from tests.processes import Processes
from tests.transport.nowhere import free_address
from tests.transport.wires import QUICK

PATIENT = QUICK | {"round_timeout_s": 300.0, "silence_s": 300.0, "rendezvous_timeout_s": 300.0}
SCHEDULE = SyncSchedule(inner_steps=4)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def kept(*objects: Any) -> tuple[nn.Module, Any, Any]:
    """Return a model, its optimizer, and what must stay alive."""
    model, *_ = objects
    return model, sgd(model), objects


def inside(model: nn.Module) -> nn.Module:
    """Return a module, a part of which DistributedDataParallel wraps."""
    return nn.Sequential(DistributedDataParallel(model), nn.Identity())


def around(model: nn.Module) -> tuple[nn.Module, Any, Any]:
    """Return a part of what is wrapped, such as the generator of a pair."""
    return kept(model, DistributedDataParallel(nn.ModuleList([model, nn.Linear(2, 2)])))


def with_zero(model: nn.Module) -> tuple[nn.Module, Any, Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns of itself

    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1), None


# what a loop may do -> what it passes, and the words of the refusal
AVERAGING: dict[str, tuple[Callable[[nn.Module], tuple[nn.Module, Any, Any]], str]] = {
    "wrapped": (lambda model: kept(DistributedDataParallel(model)), "DistributedDataParallel averages"),
    "its module": (lambda model: kept(model, DistributedDataParallel(model)), "train the model without it"),
    "compiled": (
        lambda model: kept(torch.compile(DistributedDataParallel(model), backend="eager")),
        "DistributedDataParallel averages",
    ),
    "inside": (lambda model: kept(inside(model)), "DistributedDataParallel averages"),
    "around": (around, "DistributedDataParallel averages"),
    "batch norm": (lambda model: kept(nn.SyncBatchNorm.convert_sync_batchnorm(model)), "The SyncBatchNorm '1'"),
    "zero": (with_zero, "ZeroRedundancyOptimizer communicates among ranks 0, 1"),
    "sharded": (lambda model: kept(fully_shard(model)), "sharded over ranks 0, 1 .* consists of rank "),
}


def begin(rank: int, folder: Path, size: int) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)


def refused(transport: Transport, *names: str) -> list[str]:
    """Return the cases that were not refused with their words."""
    wrong = []
    for name in names or AVERAGING:
        make, words = AVERAGING[name]
        model, optimizer, alive = make(layers())
        try:
            with pytest.raises(ConfigurationError, match=words):
                DiLoCo(model, optimizer, transport=transport, schedule=SCHEDULE)
        except BaseException as error:
            wrong.append(f"{name}: {error!r}")
        del alive
    return wrong


def late(transport: Transport) -> list[str]:
    """Return which wrappers, made after the constructor, were not refused at the first step."""
    wrong = []
    for wrap in (DistributedDataParallel, replicate):
        model = layers()
        diloco = DiLoCo(model, optimizer := sgd(model), transport=transport, schedule=SCHEDULE)
        wrapped = wrap(model)
        wrapped(torch.ones(8, 4)).sum().backward()
        optimizer.step()
        try:
            with pytest.raises(ConfigurationError, match="DistributedDataParallel averages"):
                diloco.step()
        except BaseException as error:
            wrong.append(f"{wrap.__name__}: {error!r}")
        del wrapped
    return wrong


def each_rank_a_replica(rank: int, folder: Path, address: Address) -> tuple[list[str], torch.Tensor]:
    begin(rank, folder, 2)
    with connect_process_group() as transport:
        wrong = refused(transport) + late(transport)
        # switched off, it is a plain model
        model = DistributedDataParallel(layers())
        model.require_backward_grad_sync = False
        optimizer = sgd(model)
        with DiLoCo(model, optimizer, transport=transport, schedule=SCHEDULE) as diloco:
            for step in range(6):
                model(torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * rank + step))).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                diloco.step()
    local = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    with connect_tcp(replica=rank, num_replicas=2, rendezvous=str(address), **PATIENT) as transport:
        wrong += [f"tcp {each}" for each in refused(transport, "its module", "sharded")]
    dist.destroy_process_group()
    return wrong, local


def test_gradients_averaged_over_several_replicas_are_refused(tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(2, each_rank_a_replica, tmp_path, free_address())
        (wrong, one), (also, other) = processes.results(timeout_s=240).values()
    assert wrong == also == []
    assert not torch.equal(one, other), "without averages the replicas are apart in mid-round"


def four_ranks(rank: int, folder: Path) -> dict[str, Any]:
    begin(rank, folder, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    found: dict[str, Any] = {}

    def steps(model: nn.Module, transport: Transport) -> str:
        optimizer = sgd(model)
        with DiLoCo(model, optimizer, transport=transport, schedule=SCHEDULE) as diloco:
            for step in range(6):
                model(torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * rank + step))).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                diloco.step()
        return diloco.digest()

    with connect_process_group(mesh, ranks="whole") as transport:
        found["whole"] = steps(DistributedDataParallel(layers(), process_group=mesh.get_group("shard")), transport)
        for name, group in (("replica", mesh.get_group("replica")), ("world", None)):
            with pytest.raises(ConfigurationError) as raised:
                steps(DistributedDataParallel(layers(), process_group=group), transport)
            found[f"whole over {name}"] = str(raised.value)
        with pytest.raises(ConfigurationError, match="ranks='sharded'"):
            steps(fully_shard(layers()[2], mesh=mesh["shard"]), transport)
    with connect_process_group(mesh) as transport:
        found["both"] = steps(DistributedDataParallel(layers(), process_group=mesh.get_group("shard")), transport)
        with pytest.raises(ConfigurationError) as raised:
            steps(fully_shard(nn.Linear(4, 4), mesh=mesh["replica"]), transport)
        found["sharded over replicas"] = str(raised.value)
        found["sharded"] = steps(fully_shard(nn.Linear(4, 4), mesh=mesh["shard"]), transport)
    dist.destroy_process_group()
    return found


def test_inside_a_replica_of_several_ranks_they_are_right(tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(4, four_ranks, tmp_path)
        ranks = processes.results(timeout_s=240)
    assert len({found["whole"] for found in ranks.values()}) == 1
    assert [ranks[0]["both"], ranks[1]["both"]] == [ranks[2]["both"], ranks[3]["both"]]
    assert ranks[0]["sharded"] == ranks[2]["sharded"]
    assert "over ranks 1, 3 of torch.distributed at every step" in ranks[1]["whole over replica"]
    assert "over ranks 0, 1, 2, 3 of" in ranks[1]["whole over world"]
    assert "consists of ranks 2, 3 of" in ranks[3]["sharded over replicas"]
