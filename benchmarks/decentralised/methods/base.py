"""What a case must offer to be measured. The rivals' workers import this, so nothing of ``diloco`` is imported here."""

from __future__ import annotations

import abc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.decentralised.plan import Job
from benchmarks.wan.counters import interface_bytes, sessions_s
from benchmarks.wan.work import digest

__all__ = ["Begin", "Program", "Rounds", "sleep_until", "values_of"]

Begin = Callable[[], float]
"""Called when this worker is ready; waits until all are, and returns when all begin, on the clock `time.monotonic`."""


class Program(abc.ABC):
    """One worker of a case."""

    def __init__(self, job: Job, replica: int) -> None:
        self.job = job
        self.replica = replica
        self.options = job.method.options
        self.address = job.addresses[replica]

    def prepare(self) -> Mapping[str, Any]:
        """Open what listens; returns what the other workers must know, as JSON."""
        return {}

    @abc.abstractmethod
    def connect(self, known: Sequence[Mapping[str, Any]]) -> None:
        """All workers have prepared; ``known`` holds what each returned."""

    @abc.abstractmethod
    def measure(self, begin: Begin) -> None:
        """The measured part; all workers end it before `result` is asked for."""

    @abc.abstractmethod
    def result(self) -> dict[str, Any]:
        """What was measured, as JSON."""

    def close(self) -> None:  # noqa: B027 - not every program has to
        """Let go of everything."""

    def wire_bytes(self) -> tuple[int, int]:
        """Return the bytes received and sent on this worker's interface so far; (0, 0) on the shared loopback."""
        return interface_bytes() if self.job.wan else (0, 0)


class Rounds(Program):
    """Averages the same values again and again; every peer has values of its own."""

    def __init__(self, job: Job, replica: int) -> None:
        super().__init__(job, replica)
        self.values = values_of(replica, job.values)
        self.rounds: list[dict[str, Any]] = []

    @abc.abstractmethod
    def average(self, number: int, begin: Begin) -> tuple[dict[str, Any], Tensor]:
        """One round, and what it gave; ``number`` counts from 0, the warm-up.

        Returns:
            ``began_s`` and ``had_s`` (clock time: values at hand on all peers, mean at hand on this one), and more.
        """

    def measure(self, begin: Begin) -> None:
        total = sum(values_of(peer, self.job.values) for peer in range(self.job.num_replicas))
        assert isinstance(total, Tensor)
        mean = total.div_(self.job.num_replicas)
        for number in range(self.job.rounds + 1):
            before = self.wire_bytes()
            used_s = sessions_s([os.getsid(0)])
            said, got = self.average(number, begin)
            said["cpu_s"] = sessions_s([os.getsid(0)]) - used_s
            said["digest"] = digest([got])
            said["error"] = float((got - mean).norm() / mean.norm())
            begin()  # nobody sends any more
            after = self.wire_bytes()
            said |= {"wire_received_bytes": after[0] - before[0], "wire_sent_bytes": after[1] - before[1]}
            if number:
                self.rounds.append(said)

    def result(self) -> dict[str, Any]:
        return {"rounds": self.rounds}


def values_of(peer: int, values: int) -> Tensor:
    """``(values,)`` float32: what a peer brings, as large as pseudo-gradients are."""
    return torch.randn(values, generator=torch.Generator().manual_seed(peer)).mul_(1e-3)


def sleep_until(clock_s: float) -> None:
    """Until `time.monotonic` says ``clock_s``."""
    time.sleep(max(0.0, clock_s - time.monotonic()))
