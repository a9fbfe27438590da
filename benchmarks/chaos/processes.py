"""The processes that are disturbed, and what is remembered of each."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, Signals
from typing import Any

__all__ = ["Life", "Running", "Tail", "descendants", "python"]


@dataclass
class Life:
    """One process of a peer, from its start to its end.

    Attributes:
        peer: its place; `BOOTSTRAP` for the standing peer.
        folder: of its run.
        started_s, ended_s: seconds since 1970; it still ran when all was over where there is no end.
        code: its exit code, negative for a signal.
        ended_by: the kind of the event that made it end, else empty.
        disturbed: when it was frozen, slowed, cut off or could not speak with all: from, until.
        words: what it printed.
    """

    peer: int
    folder: str
    started_s: float
    ended_s: float | None = None
    code: int | None = None
    ended_by: str = ""
    disturbed: list[tuple[float, float]] = field(default_factory=list)
    words: str = ""

    @property
    def name(self) -> str:
        """The last part of its folder."""
        return self.folder.rpartition("/")[2]

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Life:
        """What `asdict` gave, also by way of JSON."""
        return cls(**record | {"disturbed": [(begin, end) for begin, end in record["disturbed"]]})


class Tail:
    """What a metrics.jsonl that grows has said so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.steps_s: float = 0.0
        """When the last step was finished."""
        self.committed_s: float = 0.0
        """When the last round of several replicas was committed."""
        self.step = 0
        self.finished = False
        """Whether it came to its end."""
        self.facts: dict[str, str] = {}
        """What it told at its start."""

    def read(self) -> None:
        """Go on reading."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            lines = file.read().split(b"\n")
        self._offset += sum(len(line) + 1 for line in lines[:-1])
        for line in lines[:-1]:
            with suppress(ValueError):
                record = json.loads(line)
                if record["event"] == "StepFinished":
                    self.steps_s, self.step = record["time_s"], record["step"]
                elif record["event"] == "RunStarted":
                    self.facts = record["facts"]
                elif record["event"] == "RunFinished":
                    self.finished = True
                elif record["event"] == "RoundCommitted" and len(record["contributors"]) > 1:
                    self.committed_s = record["time_s"]


class Running:
    """A ``diloco`` and what it started, such as its network daemon.

    Args:
        command: what to run.
        life: its record, begun here.
        output: file for what it prints.
    """

    def __init__(self, command: Sequence[str], life: Life, output: Path) -> None:
        self.life = life
        self.output = output
        self.tail = Tail(Path(life.folder) / "metrics.jsonl")
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    @property
    def is_alive(self) -> bool:
        """Whether it still runs; notes its end otherwise."""
        code = self.process.poll()
        if code is not None and self.life.ended_s is None:
            self.life.ended_s, self.life.code = time.time(), code
        return code is None

    def signal(self, number: Signals, *, with_daemon: bool = False) -> None:
        """Send a signal, to all that it started as well or not."""
        for process in descendants(self.process.pid) if with_daemon else ():
            _send(process, number)
        _send(self.process.pid, number)

    def signal_group(self, number: Signals) -> None:
        """Send a signal to its process group, as a terminal or a batch system does."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self) -> None:
        """Whatever of it is left."""
        self.signal(SIGKILL, with_daemon=True)
        self.signal_group(SIGKILL)
        self.process.wait()
        _ = self.is_alive
        self.life.words = self.printed()

    def address(self) -> str:
        """What others join a swarm by; empty where it has not said so."""
        found = re.findall(r"--join (/ip4/\S+)", self.printed())
        return str(found[-1]) if found else ""

    def printed(self) -> str:
        """What it printed so far."""
        return self.output.read_text(encoding="utf-8", errors="replace")


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and those that they did; in no order."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            found.extend(int(child) for child in (task / "children").read_text().split())
    return found + [each for child in found for each in descendants(child)]


def _send(pid: int, number: Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def python(*arguments: str) -> list[str]:
    """A command of this interpreter."""
    return [sys.executable, "-m", *arguments]
