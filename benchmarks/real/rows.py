"""The rows of the benchmark: what was tried, with which version, and how it ended."""

import fcntl
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.markdown import table

ROWS, PAGE = (Path(__file__).with_name(name) for name in ("rows.jsonl", "README.md"))
MARK = "<!-- what follows is written by python -m benchmarks.real -->\n"
OUTCOMES = ("right", "refused", "FAILED")


@dataclass(frozen=True)
class Row:
    """One thing that was tried.

    Attributes:
        group: what is run by ``python -m benchmarks.real GROUP``.
        name: unique within the group.
        thing: the name and version of what was brought.
        command: the command line or the lines of Python, without folders of this machine.
        outcome: one of `OUTCOMES`. A refusal is a sentence before anything is trained.
        says: figures, the sentence of a refusal, or what failed.
        commit: of the package.
    """

    group: str
    name: str
    thing: str
    command: str
    outcome: str
    says: str
    date: str
    commit: str
    took_s: float = 0.0


def read() -> list[Row]:
    """Return the rows of the committed file."""
    lines = ROWS.read_text("utf-8").splitlines() if ROWS.exists() else []
    return [Row(**json.loads(line)) for line in lines]


def write(new: Iterable[Row]) -> None:
    """Replace the rows of the same group and name, keep the others, and write the file and the page's tables.

    Several processes may write at the same time.
    """
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = {(row.group, row.name): row for row in (*read(), *new)}
        ROWS.write_text("".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows.values()), "utf-8")
        text, mark, _ = PAGE.read_text("utf-8").partition(MARK)
        PAGE.write_text(text + mark + tables(sorted(rows.values(), key=lambda row: row.group)), "utf-8")


def tables(rows: list[Row]) -> str:
    """Return a table for each group, and the number of rows of each outcome."""
    counts = [f"{sum(row.outcome == outcome for row in rows)} {outcome}" for outcome in OUTCOMES]
    parts = [f"\n{len(rows)} rows: {', '.join(counts)}.\n"]
    for group in dict.fromkeys(row.group for row in rows):
        lines = [
            [
                row.name,
                prose(row.thing),
                f"`{cell(row.command)}`",
                row.outcome,
                prose(row.says),
                f"{row.date}, {row.commit}",
            ]
            for row in rows
            if row.group == group
        ]
        parts.append(
            f"\n## {group}\n\n{table(['', 'brought', 'command', 'outcome', 'figures or sentence', 'when'], lines)}\n"
        )
    return "".join(parts)


def prose(text: str) -> str:
    """Return text for a cell of a table in which no part is taken for a tag."""
    return cell(text).replace("<", "&lt;")


def cell(text: str) -> str:
    """Return text that fits into a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
