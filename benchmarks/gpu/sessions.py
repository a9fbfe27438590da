"""The package's own training, as in ``diloco train``, on random tokens."""

import gc
import statistics
import time
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch

from benchmarks.gpu.sizes import Job
from diloco.algorithm import SyncSettings
from diloco.data import ByteTokenizer, Corpus, DataSettings, PackedTokens
from diloco.model import ModelSettings
from diloco.train import Fleet, OptimizerSettings, RunSettings, Session, TrainSettings, make_transport, resolve
from diloco.transport import NetworkSettings

NO_ROUNDS = 10**6
"""A number of inner steps between rounds that a run never reaches."""

ADAMW = OptimizerSettings(warmup_steps=0)
"""The default inner optimizer, without a warm-up."""


@dataclass(frozen=True)
class Measured:
    """Timed steps."""

    step_s: float  # the median
    fastest_s: float
    slowest_s: float
    peak_bytes: int | None  # of the device's memory; None on the CPU
    loss: float  # of the last step

    @classmethod
    def of(cls, taken_s: list[float], device: torch.device, loss: float) -> Self:
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        return cls(statistics.median(taken_s), min(taken_s), max(taken_s), peak, loss)


def _random_corpus(job: Job, batches: int) -> Corpus:
    """Return random tokens for ``batches`` batches."""
    vocab_size = job.model.vocab_size
    assert vocab_size is not None, "the model must set its vocabulary size"
    count = batches * job.batch_size * job.sequence_length + 1
    tokens = np.random.default_rng(0).integers(vocab_size, size=count, dtype=np.uint16)
    return Corpus(PackedTokens([tokens]), PackedTokens([tokens]), ByteTokenizer(), "random", {"data": "random tokens"})


def make_session(
    job: Job,
    device: torch.device,
    precision: str,
    replicas: int = 1,
    *,
    inner: OptimizerSettings = ADAMW,
    packing: Literal["joined", "masked"] = "joined",
    **train: Any,
) -> Session:
    """Return a session of replicas of ``job``'s model that never exchange anything; ``train``: further settings."""
    settings = RunSettings(
        train=TrainSettings(
            steps=NO_ROUNDS,
            batch_size=job.batch_size,
            sequence_length=job.sequence_length,
            precision=precision,  # type: ignore[arg-type]  # the settings check it
            **train,
        ),
        optimizer=inner,
        sync=SyncSettings(inner_steps=NO_ROUNDS),
        network=NetworkSettings(replicas=replicas),
        data=DataSettings(packing=packing),
        model=ModelSettings(arguments=job.model.arguments()),
    )
    settings = resolve(settings, num_layers=job.model.layers)
    fleet = Fleet(make_transport(settings).endpoints)
    return Session(settings, _random_corpus(job, 8 * replicas), fleet, device, lambda event: None)


def time_session(session: Session, *, warmup_steps: int, steps: int) -> Measured:
    """Time steps, with the device synchronised after each."""
    device = session.device
    for _ in range(warmup_steps):
        session.step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    taken_s: list[float] = []
    loss = 0.0
    for _ in range(steps):
        started_s = time.perf_counter()
        loss = session.step().loss
        settle(device)
        taken_s.append(time.perf_counter() - started_s)
    return Measured.of(taken_s, device, loss)


def settle(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free() -> None:
    """Release unused memory, including compiled code."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
