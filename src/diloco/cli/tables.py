"""Plain-text tables: columns with a header, and named facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["columns", "facts_table"]


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with a header. The first column is left-aligned, the others are right-aligned.

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


def facts_table(facts: Mapping[str, str], *, indent: str = "  ") -> str:
    """Return a line for each fact: its name, then the fact.

    >>> print(facts_table({"model": "150m", "replicas": "4"}))
      model     150m
      replicas  4
    """
    width = max(map(len, facts))
    return "\n".join(f"{indent}{name:{width}}  {words}" for name, words in facts.items())
