"""Replicas that train, and one more that fetches their state, joins and contributes.

The last worker is not a replica; it starts the joiner as a process of its own in the same node.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.decentralised.guest import Guest
from benchmarks.decentralised.methods import base
from benchmarks.decentralised.peers import addresses_of, become_member, key_file, make_peer, wait_for_members
from benchmarks.decentralised.plan import Job
from benchmarks.decentralised.training import Trainer, work_of
from diloco.transport import load_identity

__all__ = ["Program"]

_BEFORE_S = 12.0
_AFTER_S = 8.0


class Program(base.Program):
    """The option ``state_bytes_per_s`` limits the rate at which each member sends its state; None: no limit."""

    def __init__(self, job: Job, replica: int) -> None:
        super().__init__(job, replica)
        self.hosts = replica == job.num_replicas - 1
        self._stops = threading.Event()
        self._result: dict[str, Any] = {}

    def prepare(self) -> Mapping[str, Any]:
        if self.replica:
            return {}
        self.transport = self._make([]).transport
        return {"addresses": addresses_of(self.transport)}

    def connect(self, known: Sequence[Mapping[str, Any]]) -> None:
        self.known: list[str] = known[0]["addresses"]
        if self.hosts:
            load_identity(key_file(self.job, self.replica))  # making a key takes seconds, once per peer
            return
        if self.replica:
            self.transport = become_member(self._make(self.known), self.job.timeout_s)
        wait_for_members(self.transport, self.job.num_replicas - 1, self.job.timeout_s)
        self.trainer = Trainer(work_of(self.job.values), self.transport, computes=True)
        self._training = threading.Thread(target=self._train, daemon=True)

    def measure(self, begin: base.Begin) -> None:
        base.sleep_until(begin())
        if not self.hosts:
            self._training.start()
            return
        time.sleep(_BEFORE_S)
        before = self.wire_bytes()
        number = self.job.num_replicas - 1
        guest = Guest(self.job, number, self.address, self.known, "benchmarks.decentralised.joining")
        try:
            guest.wait_for("contributed everywhere")
            after = self.wire_bytes()
            time.sleep(_AFTER_S)
            ended_s = time.monotonic()
        finally:
            guest.end()
        self._result = {
            "guest": guest.events,
            "ended_s": ended_s,
            "wire_received_bytes": after[0] - before[0],
            "wire_sent_bytes": after[1] - before[1],
        }

    def result(self) -> dict[str, Any]:
        if self.hosts:
            return self._result
        self._stops.set()
        self._training.join()
        return {"steps": [[round(each, 5) for each in step] for step in self.trainer.steps]}

    def close(self) -> None:
        if not self.hosts:
            self.transport.close()

    def _make(self, known: Sequence[str]) -> Any:
        limit = self.options["state_bytes_per_s"]
        return make_peer(self.job, self.replica, self.address, known, state_bytes_per_s=limit)

    def _train(self) -> None:
        while not self._stops.is_set():
            self.trainer.step()
