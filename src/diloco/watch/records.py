"""Records of a run, from a file that is being written or from a stranger: whatever is no record is counted, not raised.

A record is a dictionary as `diloco.events.to_record` makes it. Files are those of `diloco.monitor.files`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco.events import SCHEMA_VERSION

__all__ = [
    "Record",
    "Tail",
    "as_number",
    "as_whole",
    "finite",
    "first",
    "is_record",
    "number",
    "numbers",
    "parse",
    "text",
    "whole",
]

Record = Mapping[str, Any]

_LONGEST_TEXT = 4_000
_MOST_NUMBERS = 1_024
_LARGEST = 2**53  # whole numbers up to here are the same in a browser
_READ_BYTES = 1 << 17  # what `Tail.read` takes in at once, and the longest line that it understands


def parse(line: bytes) -> Record | None:
    """One line of ``metrics.jsonl``; None if it is no record of this schema.

    >>> parse(b'{"schema": 1, "event": "Note", "step": 3, "text": "hello"}')["text"]
    'hello'
    >>> parse(b'{"schema": 1, "event": "No') is None, parse(b"[]") is None
    (True, True)
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if is_record(record) else None


def is_record(record: object) -> bool:
    """Whether it has what every record has, of this schema."""
    if not isinstance(record, dict) or record.get("schema") != SCHEMA_VERSION:
        return False
    return isinstance(record.get("event"), str) and whole(record, "step") is not None


def as_number(value: object) -> float | None:
    """Return ``value`` as a float, which may be NaN or infinite, or None if it is not a number.

    >>> as_number("NaN"), as_number(3), as_number(None), as_number("<b>")
    (nan, 3.0, None, None)
    """
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    if isinstance(value, float):
        return value
    return float(value) if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST else None


def as_whole(value: object) -> int | None:
    """Return ``value`` if it is an integer from 0 to 2^53, else None.

    >>> as_whole(3), as_whole(-1), as_whole(1e9)
    (3, None, None)
    """
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST else None


def number(record: Record, name: str) -> float | None:
    """Return a number of a record; see `as_number`."""
    return as_number(record.get(name))


def whole(record: Record, name: str) -> int | None:
    """Return a non-negative integer of a record; see `as_whole`."""
    return as_whole(record.get(name))


def numbers(record: Record, name: str) -> tuple[int, ...]:
    """Return a list of non-negative integers of a record, such as replicas; at most 1,024 of them."""
    values = record.get(name)
    given = values[:_MOST_NUMBERS] if isinstance(values, list | tuple) else ()
    return tuple(each for each in given if as_whole(each) is not None)


def first(*values: int | None) -> int | None:
    """The first that is known."""
    return next((value for value in values if value is not None), None)


def text(record: Record, name: str) -> str:
    """Words of a record, at most 4,000 characters; "" if there are none."""
    value = record.get(name)
    return value[:_LONGEST_TEXT] if isinstance(value, str) else ""


class Tail:
    """Reads a ``metrics.jsonl`` that may still be written, from its beginning to wherever it ends now.

    A line that is no record is counted in `damaged`. Half a line at the end is left for later. Records that a resumed
    run superseded are left out, as `diloco.monitor.files.read_metrics` does.

    Attributes:
        damaged: lines so far that were no records.
        first_damaged: the number of the first of them, from 1; 0 for none.
        behind_bytes: what the file held beyond the place reached by the last `read`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._restarts: dict[int, int] = {}  # where a record begins that supersedes others -> the step it goes on from
        self._file_id = 0
        self._begin()

    def _begin(self) -> None:
        self._offset = self._lines = self._newest = 0
        self.damaged = self.first_damaged = self.behind_bytes = 0

    def rewind(self) -> None:
        """Read everything again with the next `read`."""
        self._begin()

    def read(self, most_bytes: int = _READ_BYTES) -> tuple[bool, list[Record]]:
        """The next records, of about ``most_bytes``.

        Returns:
            Whether all that was read before is void, because the run went back or the file is another one; then these
            are the first records of the file. And the records.
        """
        afresh = False
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._file_id or status.st_size < self._offset:
                    afresh = self._offset > 0
                    self._file_id, self._restarts = status.st_ino, {}
                    self._begin()
                records = self._read(file, most_bytes)
                if records is None:
                    self._begin()
                    afresh, records = True, self._read(file, most_bytes) or []
                self.behind_bytes = max(0, status.st_size - self._offset)
        except OSError:
            return False, []
        return afresh, records

    def _read(self, file: Any, most_bytes: int) -> list[Record] | None:
        """As `read`; None if a record was met that supersedes some of those read before."""
        file.seek(self._offset)
        piece: bytes = file.read(most_bytes)
        end = piece.rfind(b"\n") + 1 or (len(piece) if len(piece) == most_bytes else 0)
        records: list[Record] = []
        offset, went_back = self._offset, False
        for line in piece[:end].removesuffix(b"\n").split(b"\n") if end else ():
            self._lines += 1
            record = parse(line)
            if record is None:
                self.damaged += 1
                self.first_damaged = self.first_damaged or self._lines
            else:
                step = int(record["step"])
                if record["event"] == "RunStarted" and step < self._newest and offset not in self._restarts:
                    self._restarts[offset] = step
                    went_back = True
                if not any(place > offset and step > went_to for place, went_to in self._restarts.items()):
                    self._newest = max(self._newest, step)
                    records.append(record)
            offset += len(line) + 1
        self._offset += end
        return None if went_back else records


def finite(value: float | None) -> float | None:
    """``value`` with six digits, which is more than anybody can see; None for what no curve can show.

    >>> finite(1 / 3), finite(float("nan")), finite(None)
    (0.333333, None, None)
    """
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
