"""Muon whose matrices are orthogonalised by several ranks: sharded by FSDP2, or copied by DDP."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco.algorithm import Muon, local_shard, muon
from diloco.errors import ConfigurationError
from diloco.transport import ReplicaGroup
from tests.processes import Processes
from tests.train.ranks import STEPS, Rank, Setup, largest_difference, open_group, unequal, whole

SHAPES = [(8, 16), (33, 8), (8, 16), (3, 5), (8, 16), (8, 16), (33, 8), (8, 16)]
"""A number of each shape that no number of ranks divides, uneven rows, and shards without rows on four ranks."""


def steps_of_muon(group: ReplicaGroup, sharded: bool) -> dict[str, Tensor]:
    """Take three steps with the same gradients on any number of ranks. The second has none for the last matrix."""
    from torch.distributed.tensor import Shard, distribute_tensor

    def placed(value: Tensor) -> Tensor:
        return distribute_tensor(value, group.mesh(value.device), [Shard(0)]) if sharded else value

    random = torch.Generator().manual_seed(0)
    matrices = [nn.Parameter(placed(torch.randn(shape, generator=random))) for shape in SHAPES]
    optimizer = Muon([{"params": matrices, "orthogonalise": True}], lr=0.1, ranks=group)
    for step in range(3):
        for matrix in matrices:
            matrix.grad = placed(torch.randn(matrix.shape, generator=random))
        if step == 1:
            matrices[-1].grad = None
        optimizer.step()
    done = {str(number): whole(matrix.detach()) for number, matrix in enumerate(matrices)}
    return done | {f"B {n}": whole(optimizer.state[m]["momentum_buffer"]) for n, m in enumerate(matrices)}


def rank_with_muon(position: int, setup: Setup, folder: Path) -> dict[str, Any]:
    group = open_group(setup, position, folder)
    done: dict[str, Any] = {"steps": steps_of_muon(group, setup.strategy == "fsdp")}
    rank = Rank(setup, group)
    done["losses"], done["norms"] = rank.train(STEPS)
    done["values"] = rank.values()
    slots = [local_shard(slots["momentum_buffer"]) for slots in rank.inner.optimizer.state.values() if len(slots) == 1]
    done["held"] = sum(slot.numel() for slot in slots)
    if setup.strategy == "fsdp":
        for ranks in (None, ReplicaGroup()):
            with pytest.raises(ConfigurationError, match=r"Muon on 1 ranks can't gather .* pass muon.*ranks="):
                muon(rank.model, ranks=ranks)
    group.close()
    return done


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    rank = Rank(Setup(optimizer="Muon"), ReplicaGroup())
    losses, _ = rank.train(STEPS)
    return {"losses": losses, "values": rank.values(), "steps": steps_of_muon(ReplicaGroup(), False)}


@pytest.mark.parametrize(("strategy", "size"), [("fsdp", 4), ("ddp", 2)])
def test_ranks_share_the_work_of_muon(strategy: Any, size: int, alone: dict[str, Any], tmp_path: Path) -> None:
    """From the same gradients ranks make the same bits as one; in training they differ as their gradients do.

    Sums of gradients over ranks differ in the last bits, as with any optimizer. The largest difference of a value was
    1.3e-6 after 19 steps. The iteration multiplies that of a gradient by up to 3.4445^5 = 485 where a singular value
    is next to zero.
    """
    setup = Setup(strategy=strategy, size=size, optimizer="Muon")
    with Processes() as processes:
        processes.start(size, rank_with_muon, setup, tmp_path)
        ranks = list(processes.results(timeout_s=300).values())
    for rank in ranks:
        assert unequal(rank["steps"], alone["steps"]) == []
        assert rank["losses"] == ranks[0]["losses"]
        assert rank["losses"] == pytest.approx(alone["losses"], abs=2e-6)
        assert largest_difference(rank["values"], alone["values"]) < 1e-5
        assert unequal(rank["values"], ranks[0]["values"]) == []
    held = sum(slot.numel() for name, slot in alone["values"].items() if name.startswith("inner/momentum_buffer/"))
    assert sum(rank["held"] for rank in ranks) == held * (1 if strategy == "fsdp" else size)
