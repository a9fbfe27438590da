"""Reading of event records from a file that is still being written or from an untrusted peer.

A record is a dictionary as returned by `diloco.events.to_record`, and a file is one written by `diloco.monitor.files`.
Invalid records are counted; they never raise.
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
_LARGEST = 2**53  # JavaScript represents integers exactly up to here
_READ_BYTES = 1 << 17  # how much `Tail.read` reads at once, and the longest line that it can parse


def parse(line: bytes) -> Record | None:
    """Parse one line of ``metrics.jsonl``; return None if it is not a record of this schema.

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
    """Return whether ``record`` has the fields that every record of this schema has."""
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
    """Return the first value that is not None, or None."""
    return next((value for value in values if value is not None), None)


def text(record: Record, name: str) -> str:
    """Return a text of a record, cut to 4,000 characters; "" if the field is missing or not a text."""
    value = record.get(name)
    return value[:_LONGEST_TEXT] if isinstance(value, str) else ""


class Tail:
    """Reads a ``metrics.jsonl`` from its start to its current end while it may still be written.

    Invalid lines are counted in `damaged`. An incomplete line at the end is left for the next `read`. Records that a
    resumed run superseded are skipped, as in `diloco.monitor.files.read_metrics`.

    Attributes:
        damaged: the number of invalid lines so far.
        first_damaged: the line number of the first of them, counted from 1; 0 if there are none.
        behind_bytes: the number of bytes in the file after the position that the last `read` reached.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._restarts: dict[int, int] = {}  # offset of a ``RunStarted`` that supersedes others -> its step
        self._file_id = 0
        self._begin()

    def _begin(self) -> None:
        self._offset = self._lines = self._newest = 0
        self.damaged = self.first_damaged = self.behind_bytes = 0

    def rewind(self) -> None:
        """Make the next `read` start at the beginning of the file."""
        self._begin()

    def read(self, most_bytes: int = _READ_BYTES) -> tuple[bool, list[Record]]:
        """Return the next records, reading at most ``most_bytes``.

        Returns:
            ``(afresh, records)``. ``afresh`` is True if all records returned before are invalid, because the run went
            back to an earlier step or the file was replaced. The records are then the first ones of the file.
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
        """Return the next records, or None if one of them supersedes records returned before."""
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
    """Round ``value`` to six significant digits, enough for any display; return None if it is None or not finite.

    >>> finite(1 / 3), finite(float("nan")), finite(None)
    (0.333333, None, None)
    """
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
