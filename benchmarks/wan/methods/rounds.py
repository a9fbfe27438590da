"""Only rounds of this package, of several sizes in turn, each after a pause, to time them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.wan.methods import base
from benchmarks.wan.methods.make_transport import Connector
from benchmarks.wan.plan import Job
from diloco.algorithm import Contribution, RoundId, make_codec

__all__ = ["Program"]


class Program(base.Program):
    """Options: ``codec``; ``values``, the sizes; ``repeats`` of all sizes; ``pause_s``; and those of `Connector`."""

    def __init__(self, job: Job, replica: int) -> None:
        super().__init__(job, replica)
        self.codec = make_codec(self.options["codec"])
        self.sizes: list[int] = self.options["values"]
        values = 1e-3 * torch.randn(max(self.sizes), generator=torch.Generator().manual_seed(1 + replica))
        self.payloads: list[Tensor] = [self.codec.encode(values[:size]) for size in self.sizes]
        self.warmup_steps = len(self.sizes)
        self.measured_steps = self.options["repeats"] * len(self.sizes)
        self._connector = Connector(job, replica)

    def prepare(self) -> Mapping[str, Any]:
        return self._connector.prepare()

    def connect(self, known: Sequence[Mapping[str, Any]]) -> None:
        self._transport = self._connector.connect(known)

    def step(self, step: int) -> None:
        time.sleep(self.options["pause_s"])
        index = (step - 1) % len(self.sizes)
        started_s = time.perf_counter()
        pending = self._transport.average(
            Contribution(
                round=RoundId(index, (step - 1) // len(self.sizes) + 1),
                replica=self.replica,
                codec=self.codec,
                numel=self.sizes[index],
                payload=self.payloads[index],
            )
        )
        average = pending.wait()
        self.transfers_s.append(time.perf_counter() - started_s)
        self.waits_s.append(self.transfers_s[-1])
        self.payload_bytes += average.sent_bytes

    def digest(self) -> str:
        return ""

    def close(self) -> None:
        self._connector.close()
