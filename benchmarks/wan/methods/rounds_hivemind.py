"""Only rounds: Hivemind's DecentralizedAverager. Matchmaking takes place before a round and is not timed."""

import importlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.wan.methods import base


class Program(base.Rounds):
    """One averager for each size. The option ``compression`` names one of hivemind's classes."""

    def prepare(self) -> Mapping[str, Any]:
        self.library: Any = importlib.import_module("hivemind")
        if self.replica:
            return {}
        self._start_dht([])
        return {"peers": [str(address) for address in self.dht.get_visible_maddrs()]}

    def connect(self, known: Sequence[Mapping[str, Any]]) -> None:
        if self.replica:
            self._start_dht(known[0]["peers"])
        self.averagers = [
            self.library.DecentralizedAverager(
                [torch.zeros_like(values)],
                self.dht,
                start=True,
                prefix=f"benchmark{index}",
                target_group_size=self.job.num_replicas,
                min_group_size=self.job.num_replicas,
                allreduce_timeout=self.job.timeout_s,
                compression=getattr(self.library.compression, self.options["compression"])(),
            )
            for index, values in enumerate(self.values)
        ]

    def before(self, index: int) -> None:
        self._control = self.averagers[index].step(wait=False, require_trigger=True, timeout=self.job.timeout_s)
        stages: Any = importlib.import_module("hivemind.averaging.control").AveragingStage
        while self._control.stage not in (stages.AWAITING_TRIGGER, stages.FINISHED):
            time.sleep(0.002)

    def average(self, index: int, number: int, values: Tensor) -> Tensor:
        with self.averagers[index].get_tensors() as tensors:
            tensors[0].copy_(values)
        self._control.allow_allreduce()
        self.failures += self._control.result() is None
        with self.averagers[index].get_tensors() as tensors:
            mean: Tensor = tensors[0].clone()
        size = self.options["bytes_per_value"]
        self.payload_bytes += base.ring_bytes(values.numel(), self.job.num_replicas, size)
        return mean

    def close(self) -> None:
        for averager in self.averagers:
            averager.shutdown()
        self.dht.shutdown()

    def _start_dht(self, initial_peers: Sequence[str]) -> None:
        maddr = f"/ip4/{self.address}/tcp/0"
        self.dht = self.library.DHT(host_maddrs=[maddr], initial_peers=list(initial_peers), start=True)
