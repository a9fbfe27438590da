"""Dynamic local updates (DyLU): a slow replica takes fewer inner steps, so that the others need not wait for it.

In Asynchronous Local-SGD (2401.09135), section 4.2, worker w takes ``floor(v(w) / max_w' v(w') * H)`` of H inner steps,
where v is its number of inner steps per second. Here they are spread evenly over the H scheduled steps, so that
fragments sent at different steps contain about the same share of them. The remaining steps train nothing and only
advance the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from diloco.errors import ConfigurationError

__all__ = ["StepRate", "steps_to_train", "trains_at"]

_KEPT = 0.9  # the weight that each step leaves to the earlier ones, so that about ten steps count

_SHORTEST_S, _LONGEST_S = 1e-9, 1e9

_MOST_TIMES = 8  # the fastest replica counts as at most this many times as fast as the second fastest
_ENOUGH_STEPS = 6  # the least number of steps for a meaningful mean


def steps_to_train(replica: int, steps_per_s: Mapping[int, float], inner_steps: int) -> int:
    """Return ``k = floor(v / max v * H)``, at least 1: the scheduled steps of H that a replica trains.

    It is H for the fastest replica, and for one whose speed is not in ``steps_per_s``.

    >>> speeds = {0: 4.0, 1: 2.0, 2: 0.9, 3: 0.001}
    >>> [steps_to_train(replica, speeds, inner_steps=10) for replica in (0, 1, 2, 3, 4)]
    [10, 5, 2, 1, 10]

    Replicas report their own speeds, so the fastest counts as at most eight times as fast as the second fastest:

    >>> steps_to_train(0, {0: 4.0, 1: 4.0, 2: 1e308}, inner_steps=80)
    10
    """
    if replica not in steps_per_s:
        return inner_steps
    mine, speeds = steps_per_s[replica], sorted(steps_per_s.values())
    fastest = min(speeds[-1], _MOST_TIMES * speeds[-2]) if len(speeds) > 1 else speeds[-1]
    return inner_steps if mine >= fastest else max(1, math.floor(mine / fastest * inner_steps))


def trains_at(step: int, steps: int, inner_steps: int) -> bool:
    """Return whether the scheduled step ``step`` (t, from 0) is trained: ``floor((t + 1) k / H) > floor(t k / H)``.

    Exactly ``steps`` (k) of any ``inner_steps`` (H) consecutive steps are trained, spread as evenly as possible.

    >>> ["." if not trains_at(step, 3, inner_steps=8) else "x" for step in range(8)]
    ['.', '.', 'x', '.', '.', 'x', '.', 'x']
    """
    if not 1 <= steps <= inner_steps:
        raise ConfigurationError(f"The number of trained steps must be from 1 to {inner_steps}, got {steps}.")
    return (step + 1) * steps // inner_steps > step * steps // inner_steps


class StepRate:
    """The smoothed inner steps per second of a replica: the inverse of the mean time of about its last ten steps.

    The first step does not count, since it may include compilation. The rate is known from the sixth step on.

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
        """Count a step with this compute time, which excludes waiting for others. Ignore impossible times."""
        if not _SHORTEST_S <= compute_s <= _LONGEST_S:
            return
        self._steps += 1
        if self._steps > 1:
            self._sum_s = _KEPT * self._sum_s + compute_s
            self._weight = _KEPT * self._weight + 1

    @property
    def steps_per_s(self) -> float | None:
        """The inner steps per second, or None before enough steps were counted."""
        return self._weight / self._sum_s if self._steps >= _ENOUGH_STEPS else None
