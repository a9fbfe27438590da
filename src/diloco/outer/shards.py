"""The ranks that shard one replica, and how they decide together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from diloco.algorithm import named_parameters


@dataclass(frozen=True)
class ShardRanks:
    """The ranks of a replica that shard its trainable parameters, on a device mesh of torch, or one rank alone."""

    mesh: Any = None  # None: this rank has all parameters

    @property
    def sharded(self) -> bool:
        return self.mesh is not None

    def greatest(self, values: Sequence[float]) -> list[float]:
        """Return the greatest of all ranks for each number. All ranks must call it in the same order."""
        if not self.sharded:
            return list(values)
        import torch.distributed as dist

        numbers = torch.tensor(values, dtype=torch.float64, device=self.mesh.device_type)
        for dimension in range(self.mesh.ndim):
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.mesh.get_group(dimension))
        return [float(number) for number in numbers.tolist()]


ALONE = ShardRanks()


def shard_ranks(model: nn.Module) -> ShardRanks:
    """Return the ranks that shard the trainable parameters of a model."""
    for parameter in named_parameters(model).values():
        if parameter.requires_grad and hasattr(parameter, "device_mesh"):
            return ShardRanks(parameter.device_mesh)
    return ALONE
