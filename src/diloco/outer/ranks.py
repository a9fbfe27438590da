"""Decisions of all ranks that shard the parameters of a replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from diloco.algorithm import named_parameters

__all__ = ["greatest_of_ranks"]


def greatest_of_ranks(model: nn.Module) -> Callable[[Sequence[float]], list[float]] | None:
    """Return a function that takes numbers and returns the greatest of all ranks for each, or None without shards.

    All ranks of the replica must call it in the same order.
    """
    meshes: list[Any] = [
        parameter.device_mesh
        for parameter in named_parameters(model).values()
        if parameter.requires_grad and hasattr(parameter, "device_mesh")
    ]
    if not meshes:
        return None
    mesh = meshes[0]

    def greatest(values: Sequence[float]) -> list[float]:
        import torch.distributed as dist

        numbers = torch.tensor(values, dtype=torch.float64, device=mesh.device_type)
        for dimension in range(mesh.ndim):
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=mesh.get_group(dimension))
        return [float(number) for number in numbers.tolist()]

    return greatest
