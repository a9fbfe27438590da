"""Markdown tables, and the generated part of a README."""

from collections.abc import Iterable, Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table.

    >>> print(table(["M", "s"], [[2, 0.5]]))
    | M | s |
    |---|---|
    | 2 | 0.5 |
    """
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def write_below(mark: str, text: str, path: Path) -> None:
    """Replace everything below the line ``mark`` in the file; the text above it stays."""
    above = path.read_text(encoding="utf-8").partition(mark)[0]
    path.write_text(f"{above}{mark}\n\n{text}", encoding="utf-8")
