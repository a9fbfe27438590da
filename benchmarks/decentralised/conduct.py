"""The cues of one run: workers begin together whatever they begin, as often as they like."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.wan.run import Worker, answer_all, await_phase, measure_cpu

__all__ = ["conduct"]

_LEAD_S = 0.3
"""From the last worker's being ready to the beginning: more than any needs to hear of it."""


def conduct(workers: Sequence[Worker], deadline_s: float) -> dict[str, Any]:
    """prepared -> known -> warm -> (ready-1 -> begin at -> ready-2 ...) -> measured -> counted -> close.

    Returns:
        ``outcome``, ``replicas`` (what each worker measured), ``cpu_busy`` and ``cpu_workers`` (share of all cores'
        time in use by anybody, or kept from this machine, and by the workers, from "warm" to "measured").
    """
    await_phase(workers, "prepared", deadline_s)
    answer_all(workers, [worker.reported["info"] for worker in workers])
    await_phase(workers, "warm", deadline_s)
    cpu_shares = measure_cpu(workers)
    answer_all(workers, None)
    turn = 1
    while await_phase(workers, f"ready-{turn}", deadline_s, or_phase="measured") != "measured":
        answer_all(workers, time.monotonic() + _LEAD_S)
        turn += 1
    shares = cpu_shares()
    answer_all(workers, None)
    await_phase(workers, "counted", deadline_s)
    replicas = [json.loads(worker.result.read_text(encoding="utf-8")) for worker in workers]
    answer_all(workers, None)
    return {"outcome": "finished", "replicas": replicas, **shares}
