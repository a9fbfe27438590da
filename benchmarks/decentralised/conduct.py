"""Conducts one run: workers may wait for each other any number of times, and begin at the same moment each time."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.wan.run import Worker, answer_all, await_phase, measure_cpu

__all__ = ["conduct"]

_LEAD_S = 0.3
"""The time from the last worker being ready to the beginning; every worker receives the time earlier."""


def conduct(workers: Sequence[Worker], deadline_s: float) -> dict[str, Any]:
    """Conduct workers that report prepared, warm, (ready-1, ready-2, ...), measured and counted.

    The answer to prepared is the information about all workers, that to ready-N is the time to begin.

    Returns:
        ``outcome``, ``replicas`` (the measurements of each worker), and the values of `measure_cpu` from "warm" to
        "measured".
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
