"""Meters and the way their readings are written. Pure: time is an argument.

Scales are decimal (1 MB = 1000 kB = 1,000,000 bytes), with one decimal below 100 and none above, so that a value that
grows does not make a column jump.
"""

from __future__ import annotations

import math
from collections import deque

__all__ = [
    "Ema",
    "Throughput",
    "format_bytes",
    "format_count",
    "format_duration",
    "format_perplexity",
    "format_ratio",
    "perplexity",
]


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


def perplexity(loss: float) -> float:
    """``exp(loss)`` for a loss in nats per token; infinity where that overflows.

    >>> perplexity(0.0), perplexity(1e9)
    (1.0, inf)
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def format_bytes(count: float) -> str:
    """A number of bytes with a decimal unit: 1 MB is 1,000,000 bytes.

    >>> [format_bytes(count) for count in (0, 999, 1000, 12_345_678, 999_960, 4.4e9)]
    ['0 B', '999 B', '1.0 kB', '12.3 MB', '1.0 MB', '4.4 GB']
    """
    return _scaled(count, (" B", " kB", " MB", " GB", " TB", " PB"))


def format_count(count: float) -> str:
    """A number with K, M, B (10^9) or T.

    >>> [format_count(count) for count in (0, 512, 1000, 1_086_720, 150e6, 2e12)]
    ['0', '512', '1.0K', '1.1M', '150M', '2.0T']
    """
    return _scaled(count, ("", "K", "M", "B", "T"))


def format_perplexity(value: float) -> str:
    """Two decimals, and from a thousand on a rounded count, so that a hopeless model does not burst its column.

    >>> format_perplexity(19.8312), format_perplexity(49_020.8), format_perplexity(float("inf"))
    ('19.83', '49.0K', 'inf')
    """
    return f"{value:.2f}" if value < 999.5 else format_count(value)


def format_ratio(ratio: float) -> str:
    """A ratio of at least one, with no more digits than it needs.

    >>> [format_ratio(ratio) for ratio in (412.4, 12.3, 3.14159, 1.04, 51_234)]
    ['412x', '12x', '3.1x', '1.04x', '51,234x']
    """
    if ratio < 1.95:
        return f"{ratio:.2f}x"
    return f"{ratio:.1f}x" if ratio < 9.95 else f"{ratio:,.0f}x"


def format_duration(seconds: float) -> str:
    """Seconds in the two largest units that matter, at most six characters below 100 days.

    >>> [format_duration(seconds) for seconds in (0, 0.25, 8.34, 9.96, 59.7, 3599.6, 11_220, 187_000)]
    ['0s', '250ms', '8.3s', '10s', '1m00s', '1h00m', '3h07m', '2d03h']
    """
    if not math.isfinite(seconds):
        return str(seconds)
    if 0 < seconds < 0.9995:
        return f"{1000 * seconds:.0f}ms"
    if 0 < seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02d}h"


def _scaled(count: float, units: tuple[str, ...]) -> str:
    index = 0
    # 999.5 would be written as 1000, which the next unit writes shorter
    while math.isfinite(count) and abs(count) >= 999.5 and index < len(units) - 1:
        count, index = count / 1000, index + 1
    decimals = 1 if index and abs(count) < 99.95 else 0
    return f"{count:.{decimals}f}{units[index]}"
