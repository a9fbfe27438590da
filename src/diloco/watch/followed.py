"""Runs that the page follows: in a folder, by reading its files, or in a swarm, by querying its peers.

Peers are not trusted, so their answers are validated first.
"""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.errors import ConfigurationError
from diloco.watch.history import RunHistory
from diloco.watch.members import Seen
from diloco.watch.page_data import Watched
from diloco.watch.records import Tail, as_whole, open_file, text, typed, whole

if TYPE_CHECKING:
    from diloco.transport import PeerReport

__all__ = ["FollowedFolder", "FollowedSwarm", "flat_settings"]

_METRICS = "metrics.jsonl"
_LONGEST_VALUE = 200
_LONGEST_SETTINGS = 1 << 20
_PIECES = 4  # pieces of each file that are read between two updates of the page


class FollowedFolder:
    """The folder of a run, with the subfolders of its other replicas if they are processes (``replica-1``, ...).

    Args:
        folder: the folder of the run, which may be running or finished.

    Raises:
        ConfigurationError: if it is not the folder of a run.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            what = "is not a folder" if folder.exists() else "does not exist"
            raise ConfigurationError(f"{folder} {what}. Give the folder of a run.")
        if not (folder / _METRICS).exists() and not (folder / "config.toml").exists():
            raise ConfigurationError(
                f"{folder} has neither {_METRICS} nor config.toml, so it is not the folder of a run."
            )
        self._folder = folder
        self._tails: dict[str, Tail] = {}
        self.run = Watched(folder.resolve().name, str(folder))

    def read(self) -> bool:
        """Read some of what was written since the last call, and return whether there is more to read."""
        self._find_replicas()
        return all(self._read_piece() for _ in range(_PIECES))

    def _read_piece(self) -> bool:
        more = False
        for name, tail in self._tails.items():
            afresh, records = tail.read()
            if afresh:  # the rounds of all processes share one grid, so it is rebuilt from all files
                self.run.history = RunHistory()
                for other in self._tails.values():
                    if other is not tail:
                        other.rewind()
            more = more or (bool(records) and tail.behind_bytes > 0)  # without records it is an incomplete line
            for record in records:
                self.run.history.take(name, record)
        run = self.run
        run.problems = [_damage(tail) for tail in self._tails.values() if tail.damaged]
        run.problems += [tail.problem for tail in self._tails.values() if tail.problem]
        run.settings = run.settings or flat_settings(self._folder / "config.toml")
        run.behind_bytes = sum(tail.behind_bytes for tail in self._tails.values())
        if not run.history.first.over:
            run.free_bytes = _free_bytes(self._folder)
        return more

    def _find_replicas(self) -> None:
        others = sorted(
            (int(number), path)
            for path in self._folder.glob("replica-*")
            if (number := path.name.removeprefix("replica-")).isdecimal() and (path / _METRICS).exists()
        )
        if others and "" in self._tails:  # until now there was only one process
            self._tails, self.run.history = {}, RunHistory()
        first = "replica 0" if others else ""
        for name, path in ((first, self._folder), *((f"replica {number}", path) for number, path in others)):
            self._tails.setdefault(name, Tail(path / _METRICS))


def flat_settings(path: Path) -> Mapping[str, str]:
    """Return dotted key -> value as text, from a TOML file; empty if the file can't be read."""
    try:
        with open_file(path) as file:
            tables = tomllib.loads(file.read(_LONGEST_SETTINGS).decode())
    except (OSError, ValueError, RecursionError):
        return {}
    flat: dict[str, str] = {}

    def add(table: Mapping[str, Any], prefix: str) -> None:
        for key, value in table.items():
            if isinstance(value, dict):
                add(value, f"{prefix}{key}.")
            else:
                flat[f"{prefix}{key}"] = str(value)[:_LONGEST_VALUE]

    add(tables, "")
    return flat


def _damage(tail: Tail) -> str:
    if tail.damaged == 1:
        return f"Line {tail.first_damaged} of {tail.path} is not a valid event record and was skipped."
    return (
        f"{tail.damaged} lines of {tail.path} are not valid event records and were skipped; the first is line "
        f"{tail.first_damaged}."
    )


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


_OF_ROUNDS = ("RoundSent", "RoundCommitted", "RoundVoid", "ViewChanged")
_MOST_PEERS = 1_024


class FollowedSwarm:
    """A run in a swarm, whose peers are queried regularly.

    A peer chooses its number itself, so its history belongs to its identity: the first identity with a number is called
    by it for good, any other one also by its identity, and that one's reports about rounds do not count.
    """

    def __init__(self, run: str, join: Sequence[str]) -> None:
        self.run = Watched(run, f"swarm, via {', '.join(join)}", RunHistory(trusted=False))  # what the page shows
        self._names: dict[str, str] = {}  # peer -> the name of its process
        self.since: dict[str, int] = {}  # peer -> number of the first event to ask for
        self._heard_s: dict[str, float] = {}  # peer -> time of its last answer

    def take(self, found: Sequence[PeerReport], states: Mapping[str, str], now_s: float) -> None:
        """Process the answers of the peers.

        Args:
            found: a report per peer of the run.
            states: peer -> why it does not answer, for those that don't.
            now_s: the current time in seconds since 1970.
        """
        seen = []
        for report in found[:_MOST_PEERS]:
            number, status = as_whole(report.number), report.status
            if number is None:  # this peer is not a replica
                continue
            if report.peer_id not in self._names and len(self._names) >= _MOST_PEERS:
                continue
            name = self._name(number, report.peer_id)
            if status:
                self._heard_s[report.peer_id] = now_s
                self._take_events(name, number, report.peer_id, status)
            seen.append(
                Seen(
                    process=name,
                    replica=number,
                    peer_id=report.peer_id,
                    state=text(status, "state")[:40] if status else states.get(report.peer_id, "no answer"),
                    heard_s=self._heard_s.get(report.peer_id),
                    route=report.route,
                    round_trip_s=report.round_trip_s,
                    status=status,
                )
            )
        self.run.seen = sorted(seen, key=lambda each: each.replica)
        self.run.problems = [] if seen else ["No peer of this run has been seen within the last half hour."]

    def _name(self, number: int, peer_id: str) -> str:
        name = f"replica {number}"
        return self._names.setdefault(peer_id, f"{name} ({peer_id})" if name in self._names.values() else name)

    def _take_events(self, name: str, number: int, peer_id: str, status: Mapping[str, Any]) -> None:
        records, following = status.get("events"), whole(status, "next_event")
        if not isinstance(records, list) or following is None:
            return
        asked_from = self.since.get(peer_id, 0)
        if following < asked_from:  # the process has been restarted and counts from 0
            self.since[peer_id] = 0
            return
        self.since[peer_id] = following
        history = self.run.history
        for record in records if following > asked_from else ():
            valid = typed(record)
            if valid is None:
                continue
            is_owner = name == f"replica {number}" and whole(valid, "replica") == number
            if valid["event"] in _OF_ROUNDS and not is_owner:
                continue  # a peer may report only about itself
            history.take(name, valid)
