"""Use of the device's peak by the package in several settings, and by Hugging Face's ``Trainer``."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from benchmarks.gpu.rival import time_rival
from benchmarks.gpu.sessions import ADAMW, Measured, free, make_session, time_session
from benchmarks.gpu.sizes import Job, Sizes
from diloco.devices import flops_utilization, known_peak_flops_per_s
from diloco.model import build_model

COMPILED: dict[str, Any] = {"compile": True}

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "diloco": {},
    "diloco, compiled": COMPILED,
    "diloco, compiled, selective checkpointing": COMPILED | {"activation_checkpointing": "selective"},
    "diloco, compiled, full checkpointing": COMPILED | {"activation_checkpointing": "full"},
    "diloco, compiled, documents apart": COMPILED | {"packing": "masked"},
    "diloco, compiled, Muon inside": COMPILED | {"inner": replace(ADAMW, name="Muon")},
}
"""Name -> what differs from the defaults of `make_session`. A tiny run compiles none of them."""

RIVALS = {"transformers Trainer": False, "transformers Trainer, compiled": True}


def measure_training(
    job: Job, sizes: Sizes, device: torch.device, peak_flops_per_s: float | None, only: str
) -> list[dict[str, Any]]:
    """Return a row for each way of training ``job``. The row of a failed one has the reason.

    Args:
        job: the model and its batch.
        sizes: the numbers of steps.
        device: the device to train on.
        peak_flops_per_s: the device's peak; None looks it up by the name of the device.
        only: measure only ways whose names contain this.
    """
    ways: dict[str, Callable[[], Measured]] = {}
    for name, changes in VARIANTS.items():
        if sizes.backend is None:
            changes = {**changes, "compile": False}
        ways[name] = lambda changes=changes: _ours(job, sizes, device, changes)  # type: ignore[misc]  # bound in this iteration
    for name, compiled in RIVALS.items():
        if sizes.backend is not None or not compiled:
            ways[name] = lambda compiled=compiled: time_rival(  # type: ignore[misc]  # bound in this iteration
                job,
                device,
                sizes.precision,
                warmup_steps=sizes.warmup_steps,
                steps=sizes.steps,
                compiled=compiled,
            )
    tokens = job.batch_size * job.sequence_length
    flops = tokens * build_model(job.model, seed=0, device="meta").flops_per_token(job.sequence_length)
    if peak_flops_per_s is None and device.type == "cuda":  # one count of operations and one peak for both sides
        peak_flops_per_s = known_peak_flops_per_s(torch.cuda.get_device_name(device), sizes.precision)
    rows = []
    for name, measure in ways.items():
        if only not in name:
            continue
        row: dict[str, Any] = {"name": name}
        try:
            measured = measure()
            row |= asdict(measured)
            row["tokens_per_s"] = tokens / measured.step_s
            row["model_flops_utilization"] = flops_utilization(flops, measured.step_s, peak_flops_per_s)
        except (ImportError, torch.OutOfMemoryError) as error:
            row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        rows.append(row)
        print(f"  {row}", flush=True)
        free()
    return rows


def _ours(job: Job, sizes: Sizes, device: torch.device, changes: Mapping[str, Any]) -> Measured:
    session = make_session(job, device, sizes.precision, **changes)
    return time_session(session, warmup_steps=sizes.warmup_steps, steps=sizes.steps)
