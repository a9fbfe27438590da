"""What a method must offer to be measured."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.wan.plan import Job
from benchmarks.wan.work import InnerLoop, Layers

__all__ = ["Program", "ring_bytes"]


class Program(abc.ABC):
    """One replica under one method.

    Attributes:
        warmup_steps: inner steps before the measured part; afterwards nothing is in flight.
        measured_steps: inner steps of the measured part; afterwards nothing is in flight.
        waits_s: for each synchronisation, how long the loop stood still for it, everything included.
        transfers_s: for each synchronisation, from handing in to having the average, where the method tells.
        payload_bytes: sent by this replica so far, without framing, votes or heartbeats.
        failures: synchronisations that failed or were given up.
        in_flight: whether something of this replica is on its way.
    """

    in_flight = False

    def __init__(self, job: Job, replica: int) -> None:
        self.job = job
        self.work = job.work
        self.replica = replica
        self.options = job.method.options
        self.address = job.addresses[replica]
        self.model = Layers(job.work)
        self.loop = InnerLoop(job.work, self.model, replica)
        self.warmup_steps = self.work.inner_steps
        self.measured_steps = self.work.cycles * self.work.inner_steps
        self.waits_s: list[float] = []
        self.transfers_s: list[float] = []
        self.payload_bytes = 0
        self.failures = 0

    def prepare(self) -> Mapping[str, Any]:
        """Open what listens; returns what the other replicas must know, as JSON."""
        return {}

    def connect(self, known: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027 - not every method has to
        """All replicas have prepared; ``known`` holds what each returned, by replica."""

    @abc.abstractmethod
    def step(self, step: int) -> None:
        """One inner step, counted from 1, and all that the method does about it."""

    @abc.abstractmethod
    def digest(self) -> str:
        """Of what all replicas should agree on; empty where nothing is agreed on."""

    def close(self) -> None:  # noqa: B027 - not every method has to
        """Let go of everything; all replicas have been measured."""


def ring_bytes(values: int, num_replicas: int, bytes_per_value: int = 4) -> int:
    """Sent by one replica in one all-reduce: ``2 (M - 1) / M`` times the tensor.

    >>> ring_bytes(1000, 2), ring_bytes(1000, 4)
    (4000, 6000)
    """
    return 2 * (num_replicas - 1) * values * bytes_per_value // num_replicas
