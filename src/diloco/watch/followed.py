"""Runs that the page follows: in a folder, by reading its files, or in a swarm, by querying its peers.

Neither is trusted: a record that does not fit the declaration of its event in `diloco.events` is skipped.
"""

import contextlib
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from diloco.errors import ConfigurationError
from diloco.events import METRICS, SCHEMA_VERSION, Event
from diloco.transport import PeerReport, Status, absences
from diloco.waiting import described
from diloco.watch.history import Record, RunHistory, Seen

_METRICS, _CONFIG = "metrics.jsonl", "config.toml"
_MAX_VALUE = 200  # characters of a setting
_MAX_SETTINGS = 1 << 20  # bytes of config.toml
_MAX_PEERS = 1_024
_MAX_TEXT, _MAX_ITEMS = 4_000, 1_024
_MAX_FLOAT = 1e30  # sums and ratios of such numbers are finite
_MAX_INT = 2**53  # JavaScript represents integers exactly up to here
_MAX_PIECE = 1 << 19  # bytes that are read of a file between two updates of the page
_MAX_RECORD = 1 << 17  # bytes of JSON
_MARK = 256  # bytes before the position in a file, by which it is known again
_MAY_DIVERGE = {metric.name for metric in METRICS.values() if metric.of_model}
_KINDS = {kind.__name__: kind for kind in Event.__subclasses__()}


class _Head(msgspec.Struct):
    schema: int
    event: str
    time_s: float | None = None


def parse(line: bytes) -> Record | None:
    """Return the record of a line of ``metrics.jsonl``, or of a peer; None if it is not a valid one.

    >>> parse(b'{"schema": 1, "event": "RoundVoid", "step": 3}'), parse(b'{"schema": 1, "event": "New", "step": 3}')
    (None, (Event(step=3), None))
    >>> parse(b'{"schema": 1, "event": "No') is None, parse(b'{"schema": 1, "event": "Note", "step": -1}') is None
    (True, True)
    """
    try:
        head = msgspec.json.decode(line, type=described(_Head))
        kind = _KINDS.get(head.event, Event)  # an unknown event has only its step
        event = msgspec.json.decode(line, type=described(kind), strict=False)  # not strict, since a number may be "NaN"
    except (ValueError, RecursionError):
        return None
    values: dict[str, Any] = vars(event)
    bounded = all(_is_bounded(*field) for field in [*values.items(), ("", head.time_s)])
    if head.schema != SCHEMA_VERSION or not bounded or len(line) > _MAX_RECORD:
        return None
    cut: dict[str, Any] = {name: text[:_MAX_TEXT] for name, text in values.items() if isinstance(text, str)}
    return replace(event, **cut) if cut else event, head.time_s


def _is_bounded(name: str, value: Any) -> bool:
    match value:
        case int():
            return 0 <= value <= _MAX_INT
        case float():
            return name in _MAY_DIVERGE or abs(value) < _MAX_FLOAT
        case tuple() | dict():
            return len(value) <= _MAX_ITEMS and all(_is_bounded("", item) for item in value)
    return True


class Tail:
    """Reads a ``metrics.jsonl`` from its start to its current end while it may still be written.

    Attributes:
        problems: messages about invalid lines, or why the file can't be read.
        behind_bytes: the number of bytes in the file that the next `read` can go on with.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []
        self.behind_bytes = self._offset = self._num_invalid = 0
        self._mark = b""  # what the file had before the offset

    def read(self) -> list[Record] | None:
        """Return the next records; None if the file is another one than before, or was written anew.

        An incomplete line at the end is left for the next `read`, unless it is too long.
        """
        try:
            if self.path.exists() and not self.path.is_file():  # such as a pipe, from which reading may never end
                raise OSError("it is not a regular file")
            with self.path.open("rb") as file:
                file.seek(self._offset - len(self._mark))
                if file.read(len(self._mark)) != self._mark:
                    return None
                piece = file.read(_MAX_PIECE)
                left = file.seek(0, 2) - self._offset
        except FileNotFoundError:
            return []
        except OSError as error:
            self.problems = [f"{self.path} cannot be read: {error}."]
            return []
        end = piece.rfind(b"\n") + 1 or (len(piece) if len(piece) == _MAX_PIECE else 0)
        lines = piece[:end].removesuffix(b"\n").split(b"\n") if end else []
        records = [parse(line) for line in lines]
        self._offset, self._mark = self._offset + end, (self._mark + piece[:end])[-_MARK:]
        self.behind_bytes = max(0, left - end) if end else 0
        self._num_invalid += records.count(None)
        problem = f"{self.path}: skipped {self._num_invalid} line(s) that aren't valid event records."
        self.problems = [problem] if self._num_invalid else []
        return [record for record in records if record]


class FollowedFolder:
    """The folder of a run, with the subfolders of its other replicas if they are processes (``replica-1``, ...).

    Raises:
        ConfigurationError: if it is not the folder of a run.
    """

    def __init__(self, folder: Path) -> None:
        if not os.path.exists(folder):
            raise ConfigurationError(f"{folder} does not exist. Give the folder of a run.")
        places = (folder, *folder.glob("replica-*"))  # a machine may have only some of the replicas
        if not any(os.path.exists(place / name) for place in places for name in (_METRICS, _CONFIG)):
            raise ConfigurationError(f"{folder} has neither {_METRICS} nor config.toml: it is not the folder of a run.")
        self._folder = folder
        self._forget()

    def _forget(self) -> None:
        self._tails: dict[str, Tail] = {}
        self.run = RunHistory(self._folder.resolve().name, str(self._folder))

    def read(self) -> bool:
        """Read some of what was written since the last call, and return whether there is more to read.

        A fault that the records reveal in this program is a problem of this run alone.
        """
        try:
            self._find_replicas()
            for name, tail in self._tails.items():
                records = tail.read()
                if records is None:  # all processes share one grid of rounds, so all are read anew
                    self._forget()
                    return True
                for record in records:
                    self.run.take(name, record)
            self.run.grid.prune()
        except Exception as error:
            self.run.problems = [f"{self.run.where} can't be read: {type(error).__name__}: {error}"]
            return False
        self.run.problems = [problem for tail in self._tails.values() for problem in tail.problems]
        settings = (dict(_settings(tail.path.with_name(_CONFIG))) for tail in self._tails.values())
        self.run.settings = self.run.settings or next(filter(None, settings), {})
        self.run.behind_bytes = sum(tail.behind_bytes for tail in self._tails.values())
        return self.run.behind_bytes > 0

    def _find_replicas(self) -> None:
        others = {path.name.removeprefix("replica-"): path for path in self._folder.glob("replica-*")}
        others = {number: path for number, path in others.items() if os.path.exists(path / _METRICS)}
        first = "replica 0" if any(map(str.isdecimal, others)) else ""
        if self._tails and first not in self._tails:  # there was only one process until now, or there is only one now
            self._forget()
        self._tails.setdefault(first, Tail(self._folder / _METRICS))
        for number in sorted(filter(str.isdecimal, others), key=int):
            self._tails.setdefault(f"replica {int(number)}", Tail(others[number] / _METRICS))


def _settings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, value as text) of a TOML file; nothing if it can't be read."""
    tables: list[tuple[str, Mapping[str, Any]]] = []
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if path.is_file() and path.stat().st_size < _MAX_SETTINGS:
            tables.append(("", tomllib.loads(path.read_text("utf-8"))))
    for prefix, table in tables:  # which grows
        for key, value in table.items():
            if isinstance(value, dict):
                tables.append((f"{prefix}{key}.", value))
            else:
                yield f"{prefix}{key}", str(value)[:_MAX_VALUE]


class FollowedSwarm:
    """A run in a swarm, whose peers are queried regularly.

    A peer chooses its number itself, so its history belongs to its identity: the first identity with a number is called
    by it for good, any other one also by its identity, and that one's reports about rounds do not count.
    """

    def __init__(self, run: str, join: Sequence[str]) -> None:
        self.run = RunHistory(run, f"swarm, via {', '.join(join)}", trusted=False)  # what the page shows
        self._names: dict[str, str] = {}  # peer -> the name of its process
        self.since: dict[str, int] = {}  # peer -> number of the first event to ask for
        self._heard_s: dict[str, float] = {}  # peer -> time of its last answer

    def take(self, reports: Sequence[PeerReport], now_s: float) -> None:
        """Process the reports of the peers, received at ``now_s`` in seconds since 1970."""
        seen = []
        for report, absent in zip(reports[:_MAX_PEERS], absences(reports), strict=False):
            is_new = report.peer_id not in self._names
            if report.number < 0 or (is_new and len(self._names) >= _MAX_PEERS):  # not a replica, or one too many
                continue
            name = f"replica {report.number}"
            if is_new and name in self._names.values():
                name = f"{name} ({report.peer_id})"
            name = self._names.setdefault(report.peer_id, name)
            if report.status:
                self._heard_s[report.peer_id] = now_s
                self._take_events(name, report, report.status)
            state = absent or (report.status.state if report.status else "")
            seen.append(Seen(name, state, report, self._heard_s.get(report.peer_id)))
        self.run.grid.prune(self.run.expected)
        self.run.seen = seen
        self.run.problems = [] if seen else ["No peer of this run has been seen within the last half hour."]

    def _take_events(self, name: str, report: PeerReport, status: Status) -> None:
        following, asked_from = status.next_event, self.since.get(report.peer_id, 0)
        # a process that has been restarted counts from 0
        self.since[report.peer_id] = following if following >= asked_from else 0
        for record in filter(None, map(parse, status.events if following > asked_from else ())):
            subject = getattr(record[0], "replica", None)  # a peer may report only about itself
            if subject is None or (subject == report.number and name == f"replica {subject}"):
                self.run.take(name, record)
