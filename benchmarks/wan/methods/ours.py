"""This package: DiLoCo and Streaming DiLoCo over its own transports."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.wan.connector import Connector
from benchmarks.wan.methods import base
from benchmarks.wan.plan import Job
from benchmarks.wan.work import digest
from diloco import DiLoCo, SyncSchedule
from diloco.transport import PeerTransport


class Program(base.Program):
    """Options: ``codec``, ``mean_codec`` (by default `DiLoCo`'s), and ``streaming`` for P fragments and tau overlap
    steps."""

    def __init__(self, job: Job, replica: int) -> None:
        super().__init__(job, replica)
        streaming = bool(self.options.get("streaming"))
        self.schedule = SyncSchedule(
            inner_steps=self.work.inner_steps,
            num_fragments=self.work.num_fragments if streaming else 1,
            overlap_steps=self.work.overlap_steps if streaming else 0,
        )
        self._connector = Connector(job, replica)
        self._blocked_s = 0.0
        # the first round of the first fragment ends here, and that of the second has not begun
        self.warmup_steps = self.work.inner_steps + self.schedule.overlap_steps

    def prepare(self) -> Mapping[str, Any]:
        return self._connector.prepare()

    def connect(self, known: Sequence[Mapping[str, Any]]) -> None:
        self.transport = self._connector.connect(known)
        self.diloco = DiLoCo(
            self.model,
            self.loop.optimizer,
            transport=self.transport,
            schedule=self.schedule,
            codec=self.options["codec"],
            mean_codec=self.options.get("mean_codec", "auto"),
        )

    def step(self, step: int) -> None:
        self.loop.compute()
        self.loop.update(step)
        started_s = time.perf_counter()
        self.diloco.step()
        self._blocked_s += time.perf_counter() - started_s
        self.payload_bytes = self.transport.sent_bytes
        self.failures = self.diloco.rounds_void
        if self.diloco.rounds_committed + self.diloco.rounds_void > len(self.waits_s):
            self.waits_s.append(self._blocked_s)
            self._blocked_s = 0.0
            if isinstance(self.transport, PeerTransport) and self.transport.last_transfer is not None:
                self.transfers_s.append(self.transport.last_transfer[1])

    def digest(self) -> str:
        return digest(self.diloco.named_global_params().values())

    def close(self) -> None:
        self._connector.close()
