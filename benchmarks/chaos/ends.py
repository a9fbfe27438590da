"""How processes may end, and what a run must have come to: pure functions; each gives the faults it finds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.chaos.processes import Life

__all__ = ["loss_differs", "tracebacks", "unequal_ends", "unexpected_ends"]

_SCREEN = 50


def unequal_ends(summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Peers that did not end with the same global parameters; name -> summary."""
    by_digest: dict[str, list[str]] = defaultdict(list)
    for name, summary in summaries.items():
        by_digest[summary["global_params_digest"]].append(name)
    if not by_digest:
        return ["no peer came to the end"]
    if len(by_digest) == 1:
        return []
    told = "; ".join(f"{digest} has {', '.join(names)}" for digest, names in sorted(by_digest.items()))
    return [f"they ended with {len(by_digest)} different global parameters: {told}"]


_CODES: Mapping[str, tuple[int, ...]] = {
    "": (0,),
    "kill": (-9, 0, 130),
    "kill bootstrap": (-9,),
    "leave": (130, 0),
    "group SIGINT": (130, 0),
    "group SIGTERM": (130, 0),
    "thaw at the end": (0, 1, 130),
}
"""What made it end -> how it may; who thaws as the others end may have missed that the run is over."""


def unexpected_ends(lives: Sequence[Life]) -> list[str]:
    """Processes that ended otherwise than they were made to."""
    faults = []
    for life in lives:
        expected = _CODES[life.ended_by]
        if life.code not in expected:
            ended = "still ran when all was over" if life.code is None else f"ended with {life.code}"
            told = f" after {life.ended_by}" if life.ended_by else ""
            faults.append(f"{life.name}, started at {life.started_s:.1f}, {ended}{told}, not with {expected[0]}")
    return faults


def tracebacks(lives: Sequence[Life]) -> list[str]:
    """Processes that printed a traceback, or more than a screen, where a sentence should be."""
    faults = []
    for life in lives:
        raw, lines = "Traceback (most recent call last)" in life.words, len(life.words.splitlines())
        if raw or lines > _SCREEN:
            what = "a traceback" if raw else f"{lines} lines"
            faults.append(f"{life.name}, started at {life.started_s:.1f}, printed {what}")
    return faults


def loss_differs(loss: float, undisturbed: Sequence[float], least_tolerance: float = 0.02) -> list[str]:
    """Whether ``loss`` is worse than that of undisturbed runs by more than their noise.

    The tolerance is three times the distance between the best and the worst of them, and at least ``least_tolerance``
    of their mean.

    >>> loss_differs(1.5, [1.48, 1.50, 1.49]), len(loss_differs(1.6, [1.48, 1.50, 1.49]))
    ([], 1)
    """
    mean = sum(undisturbed) / len(undisturbed)
    tolerance = max(3 * (max(undisturbed) - min(undisturbed)), least_tolerance * mean)
    if loss <= mean + tolerance:
        return []
    return [f"held-out loss {loss:.4f}, and {mean:.4f} +- {tolerance:.4f} without disturbance"]
