"""hivemind's DecentralizedAverager; its trigger separates matchmaking and all-reduce."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.decentralised.methods import base
from benchmarks.wan.methods.base import ring_bytes

__all__ = ["Program"]

_POLL_S = 0.002


class Program(base.Rounds):
    """One tensor of all values. The option ``compression`` names one of hivemind's classes."""

    def prepare(self) -> Mapping[str, Any]:
        self.library: Any = importlib.import_module("hivemind")
        if self.replica:
            return {}
        self._start_dht([])
        return {"peers": [str(address) for address in self.dht.get_visible_maddrs()]}

    def connect(self, known: Sequence[Mapping[str, Any]]) -> None:
        if self.replica:
            self._start_dht(known[0]["peers"])
        self.averager = self.library.DecentralizedAverager(
            [torch.zeros_like(self.values)],
            self.dht,
            start=True,
            prefix="benchmark",
            target_group_size=self.job.num_replicas,
            min_group_size=self.job.num_replicas,
            allreduce_timeout=self.job.timeout_s,
            compression=getattr(self.library.compression, self.options["compression"])(),
        )

    def average(self, number: int, begin: base.Begin) -> tuple[dict[str, Any], Tensor]:
        requested_s = begin()
        base.sleep_until(requested_s)
        control = self.averager.step(wait=False, require_trigger=True, timeout=self.job.timeout_s)
        stages: Any = importlib.import_module("hivemind.averaging.control").AveragingStage
        while control.stage not in (stages.AWAITING_TRIGGER, stages.FINISHED):
            time.sleep(_POLL_S)
        matched_s = time.monotonic()
        began_s = begin()
        base.sleep_until(began_s)
        with self.averager.get_tensors() as tensors:
            tensors[0].copy_(self.values)
        control.allow_allreduce()
        done = control.result() is not None
        had_s = time.monotonic()
        with self.averager.get_tensors() as tensors:
            got = tensors[0].clone()
        moved = ring_bytes(self.job.values, self.job.num_replicas, self.options["bytes_per_value"])
        record = {
            "began_s": began_s,
            "had_s": had_s,
            "matchmaking_s": matched_s - requested_s,
            "failed": not done,
            "sent_bytes": moved,
            "received_bytes": moved,
        }
        return record, got

    def close(self) -> None:
        self.averager.shutdown()
        self.dht.shutdown()

    def _start_dht(self, initial_peers: Sequence[str]) -> None:
        maddr = f"/ip4/{self.address}/tcp/0"
        self.dht = self.library.DHT(host_maddrs=[maddr], initial_peers=list(initial_peers), start=True)
