"""torch's all-reduce of one flat tensor over gloo: unencrypted, with a coordinator."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.decentralised.methods import base
from benchmarks.wan.methods.base import ring_bytes

__all__ = ["Program"]


class Program(base.Rounds):
    """The option ``dtype`` is that in which values are sent and summed; casting to it and back is part of the round."""

    def prepare(self) -> Mapping[str, Any]:
        if self.replica:
            return {}
        with socket.socket() as free:
            free.bind((self.address, 0))
            return {"port": free.getsockname()[1]}

    def connect(self, known: Sequence[Mapping[str, Any]]) -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{self.job.addresses[0]}:{known[0]['port']}",
            rank=self.replica,
            world_size=self.job.num_replicas,
            timeout=timedelta(seconds=self.job.timeout_s),
        )

    def average(self, number: int, begin: base.Begin) -> tuple[dict[str, Any], Tensor]:
        began_s = begin()
        base.sleep_until(began_s)
        summed = self.values.to(getattr(torch, self.options["dtype"]), copy=True)
        dist.all_reduce(summed)
        mean = summed.to(torch.float32).div_(self.job.num_replicas)
        had_s = time.monotonic()
        moved = ring_bytes(self.job.values, self.job.num_replicas, self.options["bytes_per_value"])
        return {"began_s": began_s, "had_s": had_s, "sent_bytes": moved, "received_bytes": moved}, mean

    def close(self) -> None:
        dist.destroy_process_group()
