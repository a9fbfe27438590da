"""Several replicas on one device: taking turns in one process, and in a process each."""

import time
from typing import Any

import torch
import torch.multiprocessing
from torch.multiprocessing.spawn import spawn

from benchmarks.gpu.sessions import free, make_session, settle, time_session
from benchmarks.gpu.sizes import Job, Sizes


def measure_sharing(job: Job, sizes: Sizes, device: torch.device) -> list[dict[str, Any]]:
    """Return rows with the tokens per second of all replicas together. The replicas exchange nothing."""
    rows = []
    for compiled in (False, True) if sizes.backend is not None else (False,):
        session = make_session(job, device, sizes.precision, sizes.replicas, compile=compiled)
        measured = time_session(session, warmup_steps=sizes.warmup_steps, steps=sizes.steps)
        del session
        free()
        tokens = sizes.replicas * job.batch_size * job.sequence_length
        suffix = ", compiled" if compiled else ""
        rows.append({"name": f"one process{suffix}", "tokens_per_s": tokens / measured.step_s})
        rows.append(
            {"name": f"{sizes.replicas} processes{suffix}", "tokens_per_s": _processes(job, sizes, device, compiled)}
        )
        print(f"  {rows[-2:]}", flush=True)
    return rows


def _processes(job: Job, sizes: Sizes, device: torch.device, compiled: bool) -> float:
    """Return the tokens per second of all processes, by the slowest one's time after a common start."""
    context = torch.multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(sizes.replicas), context.SimpleQueue()
    arguments = (job, sizes, str(device), compiled, barrier, results)
    spawn(_one, arguments, nprocs=sizes.replicas)  # type: ignore[no-untyped-call]  # torch's
    slowest_s: float = max(results.get() for _ in range(sizes.replicas))
    return sizes.replicas * sizes.steps * job.batch_size * job.sequence_length / slowest_s


def _one(number: int, job: Job, sizes: Sizes, device_name: str, compiled: bool, barrier: Any, results: Any) -> None:
    device = torch.device(device_name)
    session = make_session(job, device, sizes.precision, compile=compiled)
    for _ in range(sizes.warmup_steps):
        session.step()
    settle(device)
    barrier.wait()
    started_s = time.perf_counter()
    for _ in range(sizes.steps):
        session.step()
    settle(device)
    results.put(time.perf_counter() - started_s)
