"""Checks of how processes ended and of the final state and loss. Each is pure and returns the faults that it finds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.chaos.processes import Life

__all__ = ["loss_differs", "tracebacks", "unequal_ends", "unexpected_ends"]

_SCREEN = 50  # lines


def unequal_ends(summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a fault if peers ended with different global parameters; ``summaries`` maps a name to its summary."""
    by_digest: dict[str, list[str]] = defaultdict(list)
    for name, summary in summaries.items():
        by_digest[summary["global_params_digest"]].append(name)
    if not by_digest:
        return ["no peer finished"]
    if len(by_digest) == 1:
        return []
    each = "; ".join(f"{digest} in {', '.join(names)}" for digest, names in sorted(by_digest.items()))
    return [f"they ended with {len(by_digest)} different global parameters: {each}"]


_CODES: Mapping[str, tuple[int, ...]] = {
    "": (0,),
    "kill": (-9, 0, 130),
    "kill bootstrap": (-9,),
    "leave": (130, 0),
    "group SIGINT": (130, 0),
    "group SIGTERM": (130, 0),
    "thaw at the end": (0, 1, 130),
}
"""The kind of the event that ended a process -> its allowed exit codes. A process that thaws as the others finish may
have missed the end of the run."""


def unexpected_ends(lives: Sequence[Life]) -> list[str]:
    """Return a fault for each process whose exit code does not match the event that ended it."""
    faults = []
    for life in lives:
        expected = _CODES[life.ended_by]
        if life.code not in expected:
            ended = "was still running at the end of the run" if life.code is None else f"ended with {life.code}"
            cause = f" after {life.ended_by}" if life.ended_by else ""
            faults.append(f"{life.name}, started at {life.started_s:.1f}, {ended}{cause}, not with {expected[0]}")
    return faults


def tracebacks(lives: Sequence[Life]) -> list[str]:
    """Return a fault for each process that printed a traceback, or more than 50 lines, instead of a short message."""
    faults = []
    for life in lives:
        raw, lines = "Traceback (most recent call last)" in life.words, len(life.words.splitlines())
        if raw or lines > _SCREEN:
            what = "a traceback" if raw else f"{lines} lines"
            faults.append(f"{life.name}, started at {life.started_s:.1f}, printed {what}")
    return faults


def loss_differs(loss: float, undisturbed: Sequence[float], least_tolerance: float = 0.02) -> list[str]:
    """Return a fault if ``loss`` exceeds the mean of undisturbed runs by more than the tolerance.

    The tolerance is three times the distance between the best and the worst of them, or ``least_tolerance`` times their
    mean if that is larger.

    >>> loss_differs(1.5, [1.48, 1.50, 1.49]), len(loss_differs(1.6, [1.48, 1.50, 1.49]))
    ([], 1)
    """
    mean = sum(undisturbed) / len(undisturbed)
    tolerance = max(3 * (max(undisturbed) - min(undisturbed)), least_tolerance * mean)
    if loss <= mean + tolerance:
        return []
    return [f"the held-out loss is {loss:.4f}; without disturbance it is {mean:.4f} +- {tolerance:.4f}"]
