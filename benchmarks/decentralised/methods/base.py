"""The interface of a method. The rivals' workers import this module, so it must not import ``diloco``."""

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
"""Waits until all workers have called it, and returns the time at which they begin, on the clock `time.monotonic`."""


class Program(abc.ABC):
    """One worker of a case."""

    def __init__(self, job: Job, replica: int) -> None:
        self.job = job
        self.replica = replica
        self.options = job.method.options
        self.address = job.addresses[replica]

    def prepare(self) -> Mapping[str, Any]:
        """Start listening, and return what the other workers must know, as JSON values."""
        return {}

    @abc.abstractmethod
    def connect(self, known: Sequence[Mapping[str, Any]]) -> None:
        """Connect; all workers have prepared, and ``known`` holds what `prepare` returned, by worker."""

    @abc.abstractmethod
    def measure(self, begin: Begin) -> None:
        """Run the measured part; `result` is called when all workers have finished it."""

    @abc.abstractmethod
    def result(self) -> dict[str, Any]:
        """Return the measurements as JSON values."""

    def close(self) -> None:  # noqa: B027 - not every program has to
        """Release everything."""

    def wire_bytes(self) -> tuple[int, int]:
        """Return the bytes received and sent on this worker's interface so far; (0, 0) on the shared loopback."""
        return interface_bytes() if self.job.wan else (0, 0)


class Rounds(Program):
    """Averages the same values repeatedly; every peer has values of its own."""

    def __init__(self, job: Job, replica: int) -> None:
        super().__init__(job, replica)
        self.values = values_of(replica, job.values)
        self.rounds: list[dict[str, Any]] = []

    @abc.abstractmethod
    def average(self, number: int, begin: Begin) -> tuple[dict[str, Any], Tensor]:
        """Run one round; ``number`` counts from 0, the warm-up.

        Returns:
            The record of the round, and the mean. The record has ``began_s``, the time at which all peers begin,
            ``had_s``, the time at which this peer has the mean, and more.
        """

    def measure(self, begin: Begin) -> None:
        total = sum(values_of(peer, self.job.values) for peer in range(self.job.num_replicas))
        assert isinstance(total, Tensor)
        mean = total.div_(self.job.num_replicas)
        for number in range(self.job.rounds + 1):
            before = self.wire_bytes()
            used_s = sessions_s([os.getsid(0)])
            record, got = self.average(number, begin)
            record["cpu_s"] = sessions_s([os.getsid(0)]) - used_s
            record["digest"] = digest([got])
            record["error"] = float((got - mean).norm() / mean.norm())
            begin()  # now no peer is sending
            after = self.wire_bytes()
            record |= {"wire_received_bytes": after[0] - before[0], "wire_sent_bytes": after[1] - before[1]}
            if number:
                self.rounds.append(record)

    def result(self) -> dict[str, Any]:
        return {"rounds": self.rounds}


def values_of(peer: int, values: int) -> Tensor:
    """Return a peer's values, ``(values,)`` float32, as large as pseudo-gradients."""
    return torch.randn(values, generator=torch.Generator().manual_seed(peer)).mul_(1e-3)


def sleep_until(clock_s: float) -> None:
    """Sleep until `time.monotonic` reaches ``clock_s``."""
    time.sleep(max(0.0, clock_s - time.monotonic()))
