"""Numbers for people: decimal units, one digit after the point."""

from __future__ import annotations

import math

__all__ = ["format_bytes", "format_count"]


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


def _scaled(count: float, units: tuple[str, ...]) -> str:
    index = 0
    # 999.5 would be written as 1000, which the next unit writes shorter
    while math.isfinite(count) and abs(count) >= 999.5 and index < len(units) - 1:
        count, index = count / 1000, index + 1
    decimals = 1 if index and abs(count) < 99.95 else 0
    return f"{count:.{decimals}f}{units[index]}"
