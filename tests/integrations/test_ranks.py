"""Replicas of several processes, as a host framework starts them: `connect_tcp` for whole and sharded models."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from diloco import DiLoCo, SyncSchedule, connect_tcp
from diloco.algorithm import local_shard
from diloco.errors import ConfigurationError
from diloco.integrations import load_state, save_state, unwrapped
from diloco.transport import Address, InProcessTransport
from tests.processes import Processes
from tests.transport.nowhere import free_address
from tests.transport.wires import QUICK

Held = Literal["whole", "sharded"]
PATIENT = QUICK | {"round_timeout_s": 300.0, "silence_s": 300.0, "rendezvous_timeout_s": 300.0}


def model_of(held: Held) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(4, 2)
    if held == "whole":
        return DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model)  # type: ignore[return-value]  # returns the module itself with another class


def trained(rank: int, held: Held, address: Address, folder: Path) -> dict[str, Any]:
    """Train three steps, save and load the state with a round in flight, and train two more steps."""
    replica, position = divmod(rank, 2)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / f"store-{replica}"), 2), rank=position, world_size=2
    )
    model = model_of(held)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, Any] = {}
    with pytest.raises(ConfigurationError, match=rf"connect_tcp\(..., ranks='{held}'\)"):
        unwrapped(model, optimizer, _unfit(held))
    where = {"replica": replica, "num_replicas": 2, "rendezvous": str(address)}
    with connect_tcp(**where, ranks=held, **PATIENT) as transport:
        bare, _ = unwrapped(model, optimizer, transport)
        schedule = SyncSchedule(inner_steps=2, overlap_steps=1)
        with DiLoCo(bare, optimizer, transport=transport, schedule=schedule, codec="int8") as diloco:
            for step in range(5):
                model(torch.full((1, 4), float(1 + rank + step))).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                diloco.begin()
                if step == 2:
                    save_state(folder / f"of-{replica}", diloco)
                diloco.finish()
        found["digest"] = diloco.fragments[0].state.digest()
        found["local"] = torch.cat([local_shard(p).flatten() for p in model.parameters()])
        found["rounds"] = diloco.rounds_committed
    alone = InProcessTransport(2).endpoint(replica)
    again = DiLoCo(bare, optimizer, transport=alone, schedule=schedule, codec="int8")
    load_state(folder / f"of-{replica}", again, check_model=False)
    found["steps"] = again.steps
    dist.destroy_process_group()
    return found


def _unfit(held: Held) -> Any:
    """Return a transport that does not fit ``held``."""
    if held == "whole":
        return InProcessTransport(2).endpoint(0)
    from diloco.transport import LeaderTransport

    return LeaderTransport.__new__(LeaderTransport)


@pytest.mark.parametrize("held", ["whole", "sharded"])
def test_two_replicas_of_two_ranks(held: Held, tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(4, trained, held, free_address(), tmp_path)
        found = processes.results(timeout_s=240)
    for position in (0, 1):  # ranks 0 and 1 are replica 0, ranks 2 and 3 are replica 1
        assert found[position]["digest"] == found[2 + position]["digest"]
        assert found[position]["rounds"] == 2
        assert found[position]["steps"] == 3
    if held == "whole":
        assert torch.equal(found[0]["local"], found[1]["local"])
        assert found[0]["digest"] == found[1]["digest"]
    assert not torch.equal(found[0]["local"], found[2]["local"])  # they saw different data after the merge
    saved = sorted(path.name for path in (tmp_path / "of-0" / "diloco").iterdir())
    assert saved == (["replica-0"] if held == "whole" else ["replica-0-rank-0-of-2", "replica-0-rank-1-of-2"])
