"""Writes the table of README.md, between its two marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["write_report"]

BEGIN, END = "<!-- table -->", "<!-- end of the table -->"

_HEAD = (
    "| # | attack | by | on | 0.5.0 | ended | stall | memory | void | digests | escapes "
    "| attacker out after | verdict |\n" + "|---" * 13 + "|"
)


def write_report(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace the table between the marks of the page by these rows."""
    text = path.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    lines = "\n".join(_line(number, row) for number, row in enumerate(rows, 1))
    harmed = [row["name"] for row in rows if row["harm"]]
    count = f"{len(rows)} attacks, {len(rows) - len(harmed)} of which did no harm."
    path.write_text(f"{head}{BEGIN}\n{count}\n\n{_HEAD}\n{lines}\n{END}{tail}", encoding="utf-8")


def _line(number: int, row: Mapping[str, Any]) -> str:
    cells = [
        str(number),
        row["name"],
        row["who"],
        row["where"],
        row["before"] or "not tried",
        str(row["ended"]),
        f"{row['stall_s']:.1f} s",
        f"{row['memory_bytes'] / 1e6:.1f} MB",
        f"{row['void']} of {row['rounds']}" if row["rounds"] else "-",
        "equal" if row["digests_equal"] else "DIFFER",
        str(row["escapes"]),
        "-" if row["out_after"] is None else f"{row['out_after']} rounds",
        "; ".join(row["harm"]) or "no harm",
    ]
    return f"| {' | '.join(each.replace('|', chr(92) + '|') for each in cells)} |"
