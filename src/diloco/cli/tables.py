"""Columns of text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["columns"]


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with a header: the first column to the left, the others to the right.

    >>> print(columns(["name", "layers"], [["tiny", "4"], ["150m", "12"]]))
    name  layers
    tiny       4
    150m      12
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for first, *rest in (header, *rows):
        cells = (f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True))
        lines.append("  ".join([f"{first:<{widths[0]}}", *cells]))
    return "\n".join(lines)
