"""Plain-text tables: columns with a header, and named facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from diloco.units import visible

MAX_CELL = 10_000  # characters; a cell is one line, so that no text can pose as another


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with a header. The first column is left-aligned, the others are right-aligned.

    >>> print(columns(["name", "layers"], [["tiny", "4"], ["150m", "12"]]))
    name  layers
    tiny       4
    150m      12
    """
    header, *rows = ([visible(cell, MAX_CELL) for cell in row] for row in (header, *rows))
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
    cells = {visible(name): visible(words, MAX_CELL) for name, words in facts.items()}
    width = max(map(len, cells))
    return "\n".join(f"{indent}{name:{width}}  {words}" for name, words in cells.items())
