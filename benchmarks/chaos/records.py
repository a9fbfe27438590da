"""Reads the files that a chaos run has written."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.chaos.checks import Log
from benchmarks.chaos.events import BOOTSTRAP
from benchmarks.chaos.processes import Life
from benchmarks.chaos.run import HAPPENED, LIVES
from benchmarks.chaos.settings import Settings

__all__ = ["RunRecords", "read"]


class RunRecords:
    """The records of a run.

    Attributes:
        settings: the settings of the run.
        began_s: when all peers trained, in seconds since 1970.
        happened: the events as they were carried out.
        lives: the records of all processes.
        logs: the logs of the processes that train.
        summaries: name of the folder -> summary.json, for the peers that finished.
    """

    def __init__(self, folder: Path) -> None:
        known = json.loads((folder / LIVES).read_text(encoding="utf-8"))
        self.settings = Settings(**known["settings"])
        self.began_s = float(known["began_s"])
        self.lives = [Life.from_record(record) for record in known["lives"]]
        self.happened = read(folder / HAPPENED) if (folder / HAPPENED).exists() else []
        self.logs = _logs([life for life in self.lives if life.peer != BOOTSTRAP])
        self.summaries = {}
        for log in self.logs:
            path = Path(log.life.folder) / "summary.json"
            if not log.life.ended_by and log.life.code == 0 and path.exists():
                self.summaries[path.parent.name] = json.loads(path.read_text(encoding="utf-8"))


def _logs(lives: list[Life]) -> list[Log]:
    """Return a log for each process. Processes that resumed in the same folder share a file, which is split by time."""
    logs = []
    for life in lives:
        path = Path(life.folder) / "metrics.jsonl"
        later = [other.started_s for other in lives if other.folder == life.folder and other.started_s > life.started_s]
        until_s = min(later, default=float("inf"))
        records = read(path) if path.exists() else []
        logs.append(Log(life, tuple(each for each in records if life.started_s <= each["time_s"] < until_s)))
    return logs


def read(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file of JSON objects."""
    found = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        with suppress(ValueError):
            found.append(json.loads(line))
    return found
