"""Dynamic local updates (DyLU): a slow replica takes fewer inner steps, so that the others need not wait for it.

Asynchronous Local-SGD (2401.09135), section 4.2: worker w takes ``floor(v(w) / max_w' v(w') * H)`` inner steps of the
H, where v is its inner steps per second. Here they are spread evenly over the H scheduled steps, so that fragments sent
at different steps find about the same share of them. The others only pass: they advance the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from diloco.errors import ConfigurationError

__all__ = ["StepRate", "steps_to_train", "trains_at"]

_KEPT = 0.9  # what each step keeps of the mean before it: about the last ten steps count

_SHORTEST_S, _LONGEST_S = 1e-9, 1e9

_MOST_TIMES = 8  # no replica is taken to be faster than so many times the second fastest
_ENOUGH_STEPS = 6  # a mean of fewer says little


def steps_to_train(replica: int, steps_per_s: Mapping[int, float], inner_steps: int) -> int:
    """``k = floor(v / max v * H)``, at least 1: how many of ``inner_steps`` scheduled ones a replica trains.

    Args:
        replica: w.
        steps_per_s: replica -> v, its inner steps per second, where known.
        inner_steps: H.

    Returns:
        k; H for the fastest replica, and for one whose own speed is not known.

    >>> speeds = {0: 4.0, 1: 2.0, 2: 0.9, 3: 0.001}
    >>> [steps_to_train(replica, speeds, inner_steps=10) for replica in (0, 1, 2, 3, 4)]
    [10, 5, 2, 1, 10]

    Replicas tell their speeds themselves, so one counts for at most eight times the second fastest:

    >>> steps_to_train(0, {0: 4.0, 1: 4.0, 2: 1e308}, inner_steps=80)
    10
    """
    if replica not in steps_per_s:
        return inner_steps
    mine, speeds = steps_per_s[replica], sorted(steps_per_s.values())
    fastest = min(speeds[-1], _MOST_TIMES * speeds[-2]) if len(speeds) > 1 else speeds[-1]
    return inner_steps if mine >= fastest else max(1, math.floor(mine / fastest * inner_steps))


def trains_at(step: int, steps: int, inner_steps: int) -> bool:
    """Whether scheduled step ``step`` (t, from 0) is trained: ``floor((t + 1) k / H) > floor(t k / H)``.

    Exactly ``steps`` (k) of any ``inner_steps`` (H) in a row are, as evenly as whole steps can be.

    >>> ["." if not trains_at(step, 3, inner_steps=8) else "x" for step in range(8)]
    ['.', '.', 'x', '.', '.', 'x', '.', 'x']
    """
    if not 1 <= steps <= inner_steps:
        raise ConfigurationError(f"{steps} steps to train of {inner_steps} were given; use 1 to {inner_steps}.")
    return (step + 1) * steps // inner_steps > step * steps // inner_steps


class StepRate:
    """Inner steps per second of one replica, smoothed: one over the mean time of its last steps, about ten.

    The first step is not counted, since it may hold a compilation, and nothing is said before the sixth.

    >>> rate = StepRate()
    >>> for seconds in (30.0, 0.5, 0.5, 0.5, 0.5):
    ...     rate.add(seconds)
    >>> rate.steps_per_s is None
    True
    >>> rate.add(0.5)
    >>> rate.steps_per_s
    2.0
    """

    def __init__(self) -> None:
        self._steps = 0
        self._sum_s = 0.0
        self._weight = 0.0

    def add(self, compute_s: float) -> None:
        """Count a step that took this long to compute, without waiting for others; impossible times are ignored."""
        if not _SHORTEST_S <= compute_s <= _LONGEST_S:
            return
        self._steps += 1
        if self._steps > 1:
            self._sum_s = _KEPT * self._sum_s + compute_s
            self._weight = _KEPT * self._weight + 1

    @property
    def steps_per_s(self) -> float | None:
        """None until enough steps were counted."""
        return self._weight / self._sum_s if self._steps >= _ENOUGH_STEPS else None
