"""hivemind's DecentralizedAverager: one average of all pseudo-gradients every H steps, as OpenDiLoCo does it.

Matchmaking starts before the average is due, so that it costs no time if it succeeds; the values are submitted when the
average is due. The outer step is torch's SGD with Nesterov momentum, on every replica.
"""

import importlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.wan.methods import base
from benchmarks.wan.plan import Job
from benchmarks.wan.work import digest

MATCHMAKING_S = 5.0
"""How long before an average is due the matchmaking for it starts; hivemind's default."""


class Program(base.Program):
    """DiLoCo with one fragment. The option ``compression`` names one of hivemind's classes."""

    def __init__(self, job: Job, replica: int) -> None:
        super().__init__(job, replica)
        self.global_params = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.outer = torch.optim.SGD(self.global_params, lr=0.7, momentum=0.9, nesterov=True)
        self._control: Any = None

    def prepare(self) -> Mapping[str, Any]:
        self.library: Any = importlib.import_module("hivemind")
        if self.replica:
            return {}
        self._start_dht(initial_peers=[])
        return {"peers": [str(address) for address in self.dht.get_visible_maddrs()]}

    def connect(self, known: Sequence[Mapping[str, Any]]) -> None:
        if self.replica:
            self._start_dht(initial_peers=known[0]["peers"])
        self.averager = self.library.DecentralizedAverager(
            [torch.zeros_like(values) for values in self.global_params],
            self.dht,
            start=True,
            prefix="wan",
            target_group_size=self.job.num_replicas,
            min_group_size=self.job.num_replicas,
            min_matchmaking_time=MATCHMAKING_S,
            allreduce_timeout=self.job.timeout_s,
            compression=getattr(self.library.compression, self.options["compression"])(),
        )

    def step(self, step: int) -> None:
        self.loop.compute()
        self.loop.update(step)
        lead_steps = min(self.work.inner_steps - 1, round(MATCHMAKING_S / self.work.step_s))
        if (step + lead_steps) % self.work.inner_steps == 0:
            self._control = self.averager.step(
                wait=False,
                require_trigger=True,
                scheduled_time=self.library.utils.get_dht_time() + lead_steps * self.work.step_s,
                timeout=self.job.timeout_s,
            )
        if step % self.work.inner_steps == 0:
            self._synchronise()

    def digest(self) -> str:
        return digest(self.global_params)

    def close(self) -> None:
        self.averager.shutdown()
        self.dht.shutdown()

    def _start_dht(self, initial_peers: Sequence[str]) -> None:
        maddr = f"/ip4/{self.address}/tcp/0"
        self.dht = self.library.DHT(host_maddrs=[maddr], initial_peers=list(initial_peers), start=True)

    def _synchronise(self) -> None:
        started_s = time.perf_counter()
        local = [parameter.detach() for parameter in self.model.parameters()]
        with self.averager.get_tensors() as tensors:
            for tensor, mine, agreed in zip(tensors, local, self.global_params, strict=True):
                torch.sub(agreed, mine, out=tensor)
        self._control.allow_allreduce()
        if self._control.result() is None:
            self.failures += 1
        else:
            with self.averager.get_tensors() as tensors:
                for tensor, agreed in zip(tensors, self.global_params, strict=True):
                    agreed.grad = tensor.clone()
            self.outer.step()
            for mine, agreed in zip(local, self.global_params, strict=True):
                mine.copy_(agreed)
        self.waits_s.append(time.perf_counter() - started_s)
        self.transfers_s.append(self.waits_s[-1])
        replicas, size = self.job.num_replicas, self.options["bytes_per_value"]
        self.payload_bytes += base.ring_bytes(self.work.values, replicas, size)
