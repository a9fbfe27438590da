"""Numbers for people.

Scales are decimal (1 MB = 1000 kB = 1,000,000 bytes), with one decimal below 100 and none above, so that a value that
grows does not make a column jump.
"""

from __future__ import annotations

import math

__all__ = [
    "format_bytes",
    "format_count",
    "format_duration",
    "format_perplexity",
    "format_ratio",
    "perplexity",
]


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
