"""Reading of event records from a file that is still being written or from an untrusted peer.

A record is a dictionary as returned by `diloco.events.to_record`, and a file is one written by `diloco.monitor.files`.
Records are checked once, by `typed`: a field that is not of the type that its event declares is left out, and so are
unknown fields. Nothing here raises.
"""

from __future__ import annotations

import bisect
import functools
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, get_type_hints

from diloco import events
from diloco.events import SCHEMA_VERSION

__all__ = [
    "Record",
    "Tail",
    "as_number",
    "as_whole",
    "finite",
    "first",
    "number",
    "numbers",
    "open_file",
    "parse",
    "text",
    "typed",
    "whole",
]

Record = Mapping[str, Any]

_LONGEST_TEXT = 4_000
_MOST_NUMBERS = 1_024
_GREATEST = 1e30  # sums and ratios of such numbers are finite
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
        return typed(json.loads(line))
    except (ValueError, RecursionError):
        return None


def typed(record: object) -> Record | None:
    """Return the valid fields of a record; None if it lacks those that every record of this schema has.

    >>> typed({"schema": 1, "event": "Note", "step": 3, "text": 7, "time_s": float("inf"), "more": [[]]})
    {'schema': 1, 'event': 'Note', 'step': 3}
    """
    if not isinstance(record, dict) or record.get("schema") != SCHEMA_VERSION or type(record["schema"]) is not int:
        return None
    event = record.get("event")
    if not isinstance(event, str) or whole(record, "step") is None:
        return None
    checks = _checks().get(event, _COMMON)
    return {name: value for name, value in record.items() if name in checks and checks[name](value)}


def _is_finite(value: object) -> bool:
    place = as_number(value)
    return place is not None and abs(place) < _GREATEST


def _is_list(value: object, of: Callable[[object], bool]) -> bool:
    return isinstance(value, list | tuple) and len(value) <= _MOST_NUMBERS and all(map(of, value))


def _is_flat(value: object) -> bool:
    plain = (str, int, float, bool, type(None), dict)
    return isinstance(value, dict) and len(value) <= _MOST_NUMBERS and all(isinstance(e, plain) for e in value.values())


_IS: dict[Any, Callable[[object], bool]] = {
    int: lambda value: as_whole(value) is not None,
    float: _is_finite,
    bool: lambda value: isinstance(value, bool),
    str: lambda value: isinstance(value, str),
    tuple[int, ...]: lambda value: _is_list(value, lambda item: as_whole(item) is not None),
    tuple[float, ...]: lambda value: _is_list(value, _is_finite),
    Mapping[str, str]: lambda value: _is_flat(value) and all(isinstance(e, str) for e in value.values()),  # type: ignore[attr-defined]  # flat, so a mapping
    Mapping[str, Any]: _is_flat,
}
_COMMON = {"schema": _IS[int], "event": _IS[str], "step": _IS[int], "time_s": _is_finite}
_MEASURED = ("loss", "gradient_norm", "heldout_loss", "perplexity", "bits_per_byte")
"""Fields in which NaN and infinity have a meaning: the training has diverged."""


@functools.cache
def _checks() -> Mapping[str, Mapping[str, Callable[[object], bool]]]:
    """Return event -> field -> whether a value is valid, from the types in `diloco.events`."""
    found: dict[str, dict[str, Callable[[object], bool]]] = {}
    for kind in events.Event.__subclasses__():
        fields = {name: _check(hint) for name, hint in get_type_hints(kind).items()}
        fields |= {name: lambda value: as_number(value) is not None for name in _MEASURED if name in fields}
        found[kind.__name__] = {**fields, **_COMMON}
    return found


def _check(hint: Any) -> Callable[[object], bool]:
    for kind, check in _IS.items():
        if hint == kind:
            return check
        if hint == kind | None:
            return lambda value, check=check: value is None or check(value)  # type: ignore[misc]  # bound now
    raise AssertionError(f"no check for a field of type {hint}")


def open_file(path: Path) -> IO[bytes]:
    """Open a regular file for reading.

    Raises:
        OSError: also for a pipe or a device, from which reading may never end.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


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
        problem: why the file can't be read, or "".
        damaged: the number of invalid lines so far.
        first_damaged: the line number of the first of them, counted from 1; 0 if there are none.
        behind_bytes: the number of bytes in the file after the position that the last `read` reached.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        self._file_id = 0
        self._forget()

    def _forget(self) -> None:
        # the offsets and steps of each ``RunStarted`` that supersedes more than the later ones do; both increase
        self._starts: list[tuple[int, int]] = []
        self._searched = 0  # the offset up to which they are known
        self.rewind()

    def rewind(self) -> None:
        """Make the next `read` start at the beginning of the file."""
        self._offset = self._lines = self._newest = 0
        self.damaged = self.first_damaged = self.behind_bytes = 0

    def read(self, most_bytes: int = _READ_BYTES) -> tuple[bool, list[Record]]:
        """Return the next records, reading at most ``most_bytes``.

        Returns:
            ``(afresh, records)``. ``afresh`` is True if all records returned before are invalid, because the run went
            back to an earlier step or the file was replaced. The records are then the first ones of the file.
        """
        try:
            with open_file(self.path) as file:
                status, afresh = os.fstat(file.fileno()), False
                if status.st_ino != self._file_id or status.st_size < self._offset:
                    afresh, self._file_id = self._offset > 0, status.st_ino
                    self._forget()
                if self._search(file) < self._newest:
                    afresh = True
                    self.rewind()
                records = self._read(file, most_bytes)
                self.behind_bytes = max(0, status.st_size - self._offset)
        except FileNotFoundError:
            return False, []
        except OSError as error:
            self.problem = f"{self.path} cannot be read: {error}."
            return False, []
        self.problem = ""
        return afresh, records

    def _search(self, file: IO[bytes]) -> float:
        """Find the starts in what was written since the last call; return the lowest step of them, or infinity."""
        lowest = math.inf
        for offset, line in _lines(file, self._searched, 1 << 62):
            self._searched = offset + len(line) + 1
            record = parse(line) if b"RunStarted" in line else None
            if record is not None and record["event"] == "RunStarted":
                step = int(record["step"])
                lowest = min(lowest, step)
                while self._starts and self._starts[-1][1] >= step:
                    self._starts.pop()
                self._starts.append((offset, step))
        return lowest

    def _read(self, file: IO[bytes], most_bytes: int) -> list[Record]:
        records: list[Record] = []
        for offset, line in _lines(file, self._offset, most_bytes):
            self._offset = offset + len(line) + 1
            self._lines += 1
            record = parse(line)
            if record is None:
                self.damaged += 1
                self.first_damaged = self.first_damaged or self._lines
                continue
            step, later = int(record["step"]), bisect.bisect_right(self._starts, (offset, _LARGEST))
            if later == len(self._starts) or step <= self._starts[later][1]:
                self._newest = max(self._newest, step)
                records.append(record)
        return records


def _lines(file: IO[bytes], offset: int, most_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the text of each complete line from ``offset`` on; a very long line comes in pieces."""
    left = most_bytes
    while left > 0:
        file.seek(offset)
        asked = min(left, _READ_BYTES)
        piece = file.read(asked)
        end = piece.rfind(b"\n") + 1 or (len(piece) if len(piece) == asked else 0)
        if not end:
            return
        for line in piece[:end].removesuffix(b"\n").split(b"\n"):
            yield offset, line
            offset += len(line) + 1
        offset -= not piece[:end].endswith(b"\n")
        left -= asked


def finite(value: float | None) -> float | None:
    """Round ``value`` to six significant digits, enough for any display; return None if it is None or not finite.

    >>> finite(1 / 3), finite(float("nan")), finite(None)
    (0.333333, None, None)
    """
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
