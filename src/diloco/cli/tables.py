"""Tables of text: columns with a header, and facts with their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["columns", "facts_table"]


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


def facts_table(facts: Mapping[str, str], *, indent: str = "  ") -> str:
    """A line for each fact, behind its name.

    >>> print(facts_table({"model": "150m", "replicas": "4"}))
      model     150m
      replicas  4
    """
    width = max(map(len, facts))
    return "\n".join(f"{indent}{name:{width}}  {words}" for name, words in facts.items())
