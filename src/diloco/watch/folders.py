"""Runs in folders, followed while they are written."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco.errors import ConfigurationError
from diloco.watch.history import RunHistory
from diloco.watch.page_data import Watched
from diloco.watch.records import Tail

__all__ = ["FollowedFolder", "flat_settings"]

_METRICS = "metrics.jsonl"
_LONGEST_VALUE = 200


class FollowedFolder:
    """The folder of a run, with those of its other replicas where they are processes (``replica-1``, ...).

    Args:
        folder: of the run, which may have begun already, or be over.

    Raises:
        ConfigurationError: if nothing of a run is there.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConfigurationError(f"{folder} is no folder. Give the folder of a run. Nothing was started.")
        if not (folder / _METRICS).exists() and not (folder / "config.toml").exists():
            raise ConfigurationError(
                f"{folder} has neither {_METRICS} nor config.toml, so it is not the folder of a run. Nothing was "
                "started."
            )
        self._folder = folder
        self._tails: dict[str, Tail] = {}
        self.run = Watched(folder.resolve().name, str(folder))

    def read(self) -> bool:
        """Take in what was written since the last time, or some of it; whether more is there already."""
        self._find_replicas()
        more = False
        for name, tail in self._tails.items():
            afresh, records = tail.read()
            if afresh:  # rounds of all processes are in one grid
                self.run.history = RunHistory()
                for other in self._tails.values():
                    if other is not tail:
                        other.rewind()
            more = more or (bool(records) and tail.behind_bytes > 0)  # no records: half a line, which is being written
            for record in records:
                self.run.history.take(name, record)
        run = self.run
        run.problems = [_damage(tail) for tail in self._tails.values() if tail.damaged]
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
        if others and "" in self._tails:  # it was alone until now
            self._tails, self.run.history = {}, RunHistory()
        first = "replica 0" if others else ""
        for name, path in ((first, self._folder), *((f"replica {number}", path) for number, path in others)):
            self._tails.setdefault(name, Tail(path / _METRICS))


def flat_settings(path: Path) -> Mapping[str, str]:
    """Key -> value in words, of a TOML file; empty if it can't be read."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
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
        return f"Line {tail.first_damaged} of {tail.path} is no record of an event and was left out."
    return f"{tail.damaged} lines of {tail.path}, from line {tail.first_damaged} on, are no records and were left out."


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
