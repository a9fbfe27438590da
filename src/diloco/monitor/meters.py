"""Meters: smoothed loss, throughput, time left. Pure: time is an argument."""

from __future__ import annotations

import math
from collections import deque

__all__ = ["Ema", "Throughput"]


class Ema:
    """Exponential moving average, corrected for its start at zero (Adam, equation 3 of section 3).

    ``s_n = decay * s_(n-1) + (1 - decay) * x_n``, and the value is ``s_n / (1 - decay^n)``.

    Args:
        decay: in [0, 1); 0 follows the last value.

    >>> loss = Ema(0.5)
    >>> loss.update(4.0), round(loss.update(1.0), 6)
    (4.0, 2.0)
    >>> loss.update(float("nan")), loss.value
    (nan, 2.0)
    """

    def __init__(self, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay} was given; 0 <= decay < 1 would work.")
        self.decay = decay
        self._sum = 0.0
        self._weight = 0.0

    @property
    def value(self) -> float:
        """The average so far; NaN before the first value."""
        return self._sum / self._weight if self._weight else math.nan

    def update(self, value: float) -> float:
        """Take in ``value`` and give the average; a value that is not finite is given back and not taken in."""
        if not math.isfinite(value):
            return value
        self._sum = self.decay * self._sum + (1 - self.decay) * value
        self._weight = self.decay * self._weight + (1 - self.decay)
        return self.value


class Throughput:
    """Steps and tokens per second over a sliding window of training time, and the time left.

    What lies between the last `update` and a `skip` (an evaluation, a checkpoint) is no training time. The first
    update only sets the mark, so that what the first step pays for (compilation, caches) is in no rate either.

    Args:
        window_s: training time that the rates look back on, in seconds.

    >>> speed = Throughput(window_s=10.0)
    >>> for step in range(1, 4):
    ...     speed.update(100.0 + step, steps=step, tokens=500 * step)
    >>> speed.tokens_per_s, speed.eta_s(total_steps=10)
    (500.0, 7.0)
    >>> speed.skip(105.0)
    >>> speed.update(106.0, steps=4, tokens=2000)
    >>> speed.tokens_per_s
    500.0

    The time left counts the pauses that will come, in proportion to those that were: here 2 s in 3 s of training.

    >>> speed.eta_s(total_steps=10)
    10.0
    """

    def __init__(self, window_s: float = 30.0) -> None:
        self.window_s = window_s
        self._marks: deque[tuple[float, int, int]] = deque()  # (training time, steps, tokens)
        self._now_s: float | None = None
        self._trained_s = 0.0
        self._skipped_s = 0.0

    def update(self, now_s: float, *, steps: int, tokens: int) -> None:
        """``steps`` and ``tokens``, counted since any fixed beginning, are done at ``now_s``."""
        if self._now_s is not None:
            self._trained_s += now_s - self._now_s
        self._now_s = now_s
        self._marks.append((self._trained_s, steps, tokens))
        while len(self._marks) > 2 and self._marks[1][0] <= self._trained_s - self.window_s:
            self._marks.popleft()

    def skip(self, now_s: float) -> None:
        """The time since the last `update` or `skip` was not spent on training."""
        if self._now_s is not None:
            self._skipped_s += now_s - self._now_s
            self._now_s = now_s

    @property
    def tokens_per_s(self) -> float | None:
        """None until two updates lie apart."""
        span_s = self._span_s()
        return (self._marks[-1][2] - self._marks[0][2]) / span_s if span_s else None

    def eta_s(self, total_steps: int) -> float | None:
        """Seconds until ``total_steps`` are done, pauses included; None until there is a rate."""
        span_s = self._span_s()
        done = self._marks[-1][1] - self._marks[0][1] if span_s else 0
        if not done:
            return None
        paused = 1 + self._skipped_s / self._trained_s
        return max(0, total_steps - self._marks[-1][1]) * span_s / done * paused

    def _span_s(self) -> float:
        return self._marks[-1][0] - self._marks[0][0] if self._marks else 0.0
