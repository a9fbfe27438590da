"""The interface of a method to measure."""

import abc
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.wan.plan import ROUND_VALUES, Job
from benchmarks.wan.work import InnerLoop, Layers, digest

REPEATS, PAUSE_S = 4, 1.5
GLOO_PORT = 29500


class Program(abc.ABC):
    """One replica that runs one method.

    Attributes:
        warmup_steps: the inner steps before the measured part; nothing is in flight after them.
        measured_steps: the inner steps of the measured part; nothing is in flight after them.
        waits_s: for each synchronisation, the total time for which it blocked the training loop.
        transfers_s: for each synchronisation, the time from submitting to having the average, if the method reports it.
        payload_bytes: the payload sent by this replica so far, without framing, votes and heartbeats.
        failures: the number of synchronisations that failed or were abandoned.
    """

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
        """Start listening, and return what the other replicas must know, as JSON values."""
        return {}

    def connect(self, known: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027 - not every method has to
        """Connect; all replicas have prepared, and ``known`` holds what `prepare` returned, by replica."""

    @abc.abstractmethod
    def step(self, step: int) -> None:
        """Take one inner step, counted from 1, with all that the method does in it."""

    @abc.abstractmethod
    def digest(self) -> str:
        """Return the digest of the values that should be equal on all replicas; empty if the method has none."""

    def join_gloo(self) -> None:
        """Join the process group of all replicas on gloo."""
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{self.job.addresses[0]}:{GLOO_PORT}",
            rank=self.replica,
            world_size=self.job.num_replicas,
            timeout=timedelta(seconds=self.job.timeout_s),
        )

    def close(self) -> None:  # noqa: B027 - not every method has to
        """Release everything; all replicas have been measured."""


class Rounds(Program):
    """Only rounds: the sizes in turn, each after a pause, and all of them `REPEATS` times."""

    def __init__(self, job: Job, replica: int) -> None:
        super().__init__(job, replica)
        generator = torch.Generator().manual_seed(1 + replica)
        self.values = [1e-3 * torch.randn(size, generator=generator) for size in ROUND_VALUES]
        self.warmup_steps = len(self.values)
        self.measured_steps = REPEATS * len(self.values)
        self._mean = torch.empty(0)

    def before(self, index: int) -> None:
        """Prepare a round of ``values[index]``, in the pause before it."""

    @abc.abstractmethod
    def average(self, index: int, number: int, values: Tensor) -> Tensor:
        """Return the mean of all replicas' values, in round ``number`` of their size."""

    def step(self, step: int) -> None:
        number, index = divmod(step - 1, len(self.values))
        time.sleep(PAUSE_S)
        self.before(index)
        started_s = time.perf_counter()
        self._mean = self.average(index, number, self.values[index])
        self.transfers_s.append(time.perf_counter() - started_s)
        self.waits_s.append(self.transfers_s[-1])

    def digest(self) -> str:
        return digest([self._mean])


def ring_bytes(values: int, num_replicas: int, bytes_per_value: int = 4) -> int:
    """Return the bytes that one replica sends in one ring all-reduce: ``2 (M - 1) / M`` times the tensor.

    >>> ring_bytes(1000, 2), ring_bytes(1000, 4)
    (4000, 6000)
    """
    return 2 * (num_replicas - 1) * values * bytes_per_value // num_replicas
