"""A replica of several GPUs, a process each."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.multiprocessing.spawn import spawn

from benchmarks.gpu.sizes import Sizes
from diloco.transport.replica_group import open_replica_group

__all__ = ["train_on_ranks"]


def train_on_ranks(sizes: Sizes, size: int) -> list[list[float]]:
    """The losses that each rank of a sharded replica has."""
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        spawn(_rank, (sizes, size, store, results), nprocs=size)  # type: ignore[no-untyped-call]  # torch's
    return [results.get() for _ in range(size)]


def _rank(position: int, sizes: Sizes, size: int, store: str, results: Any) -> None:
    from benchmarks.gpu.checks import _loop, _model, _train

    device = torch.device("cuda", position)
    torch.cuda.set_device(device)
    meeting = dist.FileStore(store, size)  # type: ignore[attr-defined]  # it has
    group = open_replica_group(meeting, replica=0, position=position, size=size, device=device, timeout_s=100.0)
    results.put(_train(_loop(_model(sizes, device), "bfloat16", "fsdp", group), 3))
    group.close()
