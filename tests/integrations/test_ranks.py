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
from diloco.integrations import load_state, save_state, unwrapped
from diloco.transport import Address, InProcessTransport
from tests.processes import Processes
from tests.transport.nowhere import free_address
from tests.transport.wires import QUICK

Held = Literal["whole", "sharded"]
PATIENT = QUICK | {"round_timeout_s": 300.0, "silence_s": 300.0, "rendezvous_timeout_s": 300.0}


def trained(rank: int, held: Held, address: Address, folder: Path) -> tuple[str, int, torch.Tensor]:
    """Train three steps, save and load the state with a round in flight, and train two more steps."""
    from torch.distributed.fsdp import fully_shard

    replica, position = divmod(rank, 2)
    store = dist.FileStore(str(folder / f"store-{replica}"), 2)
    dist.init_process_group("gloo", store=store, rank=position, world_size=2)
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    wrapped: Any = DistributedDataParallel(model) if held == "whole" else fully_shard(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    alone = InProcessTransport(2).endpoint(replica)
    where = {"replica": replica, "num_replicas": 2, "rendezvous": str(address)}
    with connect_tcp(**where, ranks=held, **PATIENT) as transport:
        bare, _ = unwrapped(wrapped, optimizer)
        schedule = SyncSchedule(inner_steps=2, overlap_steps=1)
        with DiLoCo(bare, optimizer, transport=transport, schedule=schedule, codec="int8") as diloco:
            for step in range(5):
                wrapped(torch.full((1, 4), float(1 + rank + step))).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                diloco.begin()
                if step == 2:
                    save_state(folder / f"of-{replica}", diloco)
                diloco.finish()
        digest, rounds = diloco.fragments[0].state.digest(), diloco.rounds_committed
        local = torch.cat([local_shard(p).flatten() for p in wrapped.parameters()])
    again = DiLoCo(bare, optimizer, transport=alone, schedule=schedule, codec="int8")
    load_state(folder / f"of-{replica}", again, check_model=False)
    assert again.steps == 3
    dist.destroy_process_group()
    return digest, rounds, local


@pytest.mark.parametrize("held", ["whole", "sharded"])
def test_two_replicas_of_two_ranks(held: Held, tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(4, trained, held, free_address(), tmp_path)
        ranks = processes.results(timeout_s=240)
    digests, rounds, local = zip(*(ranks[rank] for rank in range(4)), strict=True)
    assert digests[:2] == digests[2:], "ranks 0 and 1 are replica 0, ranks 2 and 3 are replica 1"
    assert rounds == (2, 2, 2, 2)
    if held == "whole":
        assert torch.equal(local[0], local[1])
        assert digests[0] == digests[1]
    assert not torch.equal(local[0], local[2])  # they saw different data after the merge
    saved = sorted(path.name for path in (tmp_path / "of-0" / "diloco").iterdir())
    assert saved == (["replica-0"] if held == "whole" else ["replica-0-rank-0-of-2", "replica-0-rank-1-of-2"])
