"""Only rounds: torch's all-reduce of one flat tensor over gloo, unencrypted and with a coordinator."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.wan.methods import base


class Program(base.Rounds):
    """The option ``dtype`` is that in which values are sent and summed; casting to it and back is part of a round."""

    def connect(self, known: Sequence[Mapping[str, Any]]) -> None:
        self.join_gloo()

    def average(self, index: int, number: int, values: Tensor) -> Tensor:
        summed = values.to(getattr(torch, self.options["dtype"]), copy=True)
        dist.all_reduce(summed)
        self.payload_bytes += base.ring_bytes(values.numel(), self.job.num_replicas, summed.element_size())
        return summed.to(torch.float32).div_(self.job.num_replicas)

    def close(self) -> None:
        dist.destroy_process_group()
