"""Summarises the durations of the members' inner steps before, while and after a replica joins."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

__all__ = ["PHASES", "summarise"]

PHASES = (
    ("before", "", "started"),
    ("it starts and looks for us", "started", "built"),
    ("it takes over the state", "built", "has state"),
    ("it becomes a member and catches up", "has state", "contributed everywhere"),
    ("after", "contributed everywhere", ""),
)
"""The names of the phases, and the joiner's events at which each begins and ends."""

_WARM_S = 3.0
"""The time at the beginning that is not counted: the first rounds allocate memory and open connections."""


def summarise(replicas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the workers' measurements with the steps of each member summarised by phase.

    Args:
        replicas: ``steps`` of each member, as in `Trainer.steps`, and last ``guest`` of the joiner's host.
    """
    *members, host = replicas
    guest = host["guest"]
    summed = []
    for member in members:
        steps = member["steps"]
        phases = {}
        for name, begin, end in PHASES:
            since_s = guest[begin] if begin else steps[0][0] + _WARM_S
            until_s = guest[end] if end else host["ended_s"]
            phases[name] = _of_phase(steps, since_s, until_s)
        summed.append({"phases": phases})
    return [*summed, host]


def _of_phase(steps: Sequence[Sequence[float]], since_s: float, until_s: float) -> dict[str, float]:
    """Return the number of the steps that begin in this time, and their durations in seconds.

    >>> _of_phase([[0.0, 1.0, 0.5], [2.0, 1.0, 0.0], [3.0, 1.5, 0.0]], 0.0, 3.0)
    {'steps': 2, 'mean_s': 1.5, 'longest_s': 2.0, 'products_s': 1.0, 'longest_wait_s': 0.5}
    """
    within = [(after[0] - step[0], step[1], step[2]) for step, after in pairwise(steps) if since_s <= step[0] < until_s]
    if not within:
        return {"steps": 0}
    whole, products, waits = zip(*within, strict=True)
    return {
        "steps": len(within),
        "mean_s": round(statistics.mean(whole), 5),
        "longest_s": round(max(whole), 5),
        "products_s": round(statistics.mean(products), 5),
        "longest_wait_s": round(max(waits), 5),
    }
