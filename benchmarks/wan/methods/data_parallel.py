"""torch's DistributedDataParallel on gloo: an all-reduce of all float32 gradients at every step."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.wan.methods import base
from benchmarks.wan.plan import Job
from benchmarks.wan.work import digest


class Program(base.Program):
    """The pause takes the place of forward and backward pass; the all-reduce does not overlap it."""

    def __init__(self, job: Job, replica: int) -> None:
        super().__init__(job, replica)
        self.warmup_steps = 1  # DDP rebuilds its buckets after the first step
        self.measured_steps = self.work.data_parallel_steps

    def connect(self, known: Sequence[Mapping[str, Any]]) -> None:
        self.join_gloo()
        self.parallel = DistributedDataParallel(self.model)

    def step(self, step: int) -> None:
        self.loop.compute()
        loss = self.parallel(torch.tensor(float(1 + self.replica)))
        started_s = time.perf_counter()
        torch.autograd.backward(loss)
        self.waits_s.append(time.perf_counter() - started_s)
        self.loop.optimizer.step()
        self.loop.optimizer.zero_grad()
        self.payload_bytes += base.ring_bytes(self.work.values, self.job.num_replicas)

    def digest(self) -> str:
        return digest(self.model.parameters())

    def close(self) -> None:
        dist.destroy_process_group()
