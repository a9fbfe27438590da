"""The processes that are disturbed, and the record that is kept of each."""

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
from typing import Any, Self


@dataclass
class Life:
    """One process of a peer, from its start to its end.

    Attributes:
        peer: the number of its place, or `BOOTSTRAP`.
        folder: the folder of its run.
        started_s, ended_s: seconds since 1970. ``ended_s`` is None if it was still running at the end of the run.
        code: its exit code, negative for a signal.
        ended_by: the kind of the event that ended it, or empty.
        disturbed: the spans (from, until) in which it was frozen or slowed, or in which its links were disturbed.
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
        """The last part of its folder's path."""
        return self.folder.rpartition("/")[2]

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Return the life from the JSON of its `asdict`."""
        return cls(**record | {"disturbed": [(begin, end) for begin, end in record["disturbed"]]})


class Tail:
    """Follows a growing metrics.jsonl and keeps its latest facts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.steps_s = self.committed_s = 0.0  # time of the last finished step, and of the last round with others
        self.step = 0
        self.finished = False  # whether the run has finished
        self.facts: dict[str, str] = {}  # what the process recorded at its start

    def read(self) -> None:
        """Process the complete lines added since the last call."""
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
                    self.facts = record["details"]
                elif record["event"] == "RunFinished":
                    self.finished = True
                elif record["event"] == "RoundCommitted" and len(record["contributors"]) > 1:
                    self.committed_s = record["time_s"]


class Running:
    """A running ``diloco`` process and its children, such as its network daemon; ``life`` is kept up to date."""

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
        """Whether it is still running. Its end is recorded when this is read."""
        code = self.process.poll()
        if code is not None and self.life.ended_s is None:
            self.life.ended_s, self.life.code = time.time(), code
        return code is None

    def signal(self, number: Signals, *, with_daemon: bool = False) -> None:
        """Send it a signal, with ``with_daemon`` also to all of its descendants."""
        for process in descendants(self.process.pid) if with_daemon else ():
            _send(process, number)
        _send(self.process.pid, number)

    def signal_group(self, number: Signals) -> None:
        """Send a signal to its process group, as a terminal or a batch system does."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self) -> None:
        """Kill it and its descendants, and record what it printed."""
        self.signal(SIGKILL, with_daemon=True)
        self.signal_group(SIGKILL)
        self.process.wait()
        _ = self.is_alive
        self.life.words = self.printed()

    def address(self) -> str:
        """Return the address at which others join a swarm, or an empty string if it has not printed one yet."""
        found = re.findall(r"--join (/ip4/\S+)", self.printed())
        return str(found[-1]) if found else ""

    def printed(self) -> str:
        """Return what it has printed so far."""
        return self.output.read_text(encoding="utf-8", errors="replace")


def descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of a process, in no particular order."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            found.extend(int(child) for child in (task / "children").read_text().split())
    return found + [each for child in found for each in descendants(child)]


def _send(pid: int, number: Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def python(*arguments: str) -> list[str]:
    """Return a command that runs a module with this interpreter."""
    return [sys.executable, "-m", *arguments]
