"""The time of a round of the whole model on the device, as a share of the inner steps between two rounds."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.sessions import free, make_session, settle, time_session
from benchmarks.gpu.sizes import Job, Sizes
from diloco import DiLoCo
from diloco.algorithm import (
    AlphaMerge,
    Contribution,
    Nesterov,
    RoundId,
    digest_state,
    make_codec,
    weighted_mean,
)
from diloco.devices import to_device, to_host
from diloco.model import build_model


def measure_rounds(job: Job, sizes: Sizes, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each place of the global parameters: seconds per part, and their share of H inner steps.

    The replica decodes the whole payloads of all contributors, which come from host memory, as their mean goes there.
    Time on the network is not included.
    """
    compiled = sizes.backend is not None
    session = make_session(job, device, sizes.precision, compile=compiled)
    step_s = time_session(session, warmup_steps=sizes.warmup_steps, steps=sizes.steps).step_s
    del session
    free()
    rows = []
    for place in ("beside the model", "in host memory"):
        parts = _parts(job, sizes, device, device if place == "beside the model" else torch.device("cpu"))
        total_s = sum(parts.values())
        rows.append(
            {
                "global_params": place,
                "step_s": step_s,
                "parts_s": parts,
                "round_s": total_s,
                "share": total_s / (sizes.inner_steps * step_s),
                "inner_steps": sizes.inner_steps,
                "contributors": sizes.contributors,
            }
        )
        print(f"  {rows[-1]}", flush=True)
        free()
    return rows


def _parts(job: Job, sizes: Sizes, device: torch.device, home: torch.device) -> dict[str, float]:
    model = build_model(job.model, seed=0, device=device)
    outer, inner = Nesterov(learning_rate=0.4), torch.optim.SGD(model.parameters())
    (fragment,) = DiLoCo(model, inner, outer_optimizer=outer, global_device=home).fragments
    state = fragment.state
    state.digest()  # otherwise its thread's copies run beside the first measurements
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.001)
    codec = make_codec("fp4")
    delta, _, _ = fragment.pseudo_gradient()
    payload, numel = to_host(codec.encode(delta)), delta.numel()
    contributions = [
        Contribution(round=RoundId(0, 0), replica=m, codec=codec, numel=numel, payload=payload)
        for m in range(sizes.contributors)
    ]

    def average() -> torch.Tensor:
        given = [replace(each, payload=to_device(each.payload, home)) for each in contributions]
        return to_host(weighted_mean(given).values)

    mean = average().to(home)
    return {
        "pseudo-gradient": _time(fragment.pseudo_gradient, device),
        "fp4 encode": _time(lambda: codec.encode(delta), device),
        "digest, in its thread": _time(lambda: digest_state(state.values, state.outer), device),
        f"fp4 decode and mean of {sizes.contributors}, in its thread": _time(average, device),
        "outer step": _time(lambda: outer.update(mean, state.outer, state.values), device),
        "merge": _time(lambda: fragment.reset_local(AlphaMerge()), device),
    }


def _time(act: Callable[[], Any], device: torch.device, times: int = 5) -> float:
    taken_s = []
    for _ in range(times + 1):
        settle(device)
        started_s = time.perf_counter()
        act()
        settle(device)
        taken_s.append(time.perf_counter() - started_s)
    return statistics.median(taken_s[1:])
