"""Runs of a study, each a `diloco train` of its own, as many side by side as there are cores for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.checkpoint.disk import write_whole
from diloco.cores import choose_share
from diloco.errors import ConfigurationError
from diloco.sweep.study import Run

if sys.platform != "win32":
    import fcntl

__all__ = ["Ended", "run_all", "sweep_lock"]

_POLL_S = 0.05


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    summary: dict[str, Any] | None  # what `diloco train` wrote of it; None: it failed
    error: str = ""  # why


@contextmanager
def sweep_lock(folder: Path) -> Iterator[Sequence[int]]:
    """Keep other sweeps out of a folder (except on Windows), until this one and all processes of it have ended.

    Returns:
        The open files that its processes are to inherit.

    Raises:
        ConfigurationError: if another one has it, or a run that one has begun.
    """
    if sys.platform == "win32":
        yield ()
        return
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigurationError(
                f"another `diloco sweep`, or a run that one has begun, is at work in {folder}. Nothing was begun. Wait "
                "for it to end, end it, or use another --out."
            ) from error
        yield (lock.fileno(),)


def run_all(
    runs: Iterable[Run], folder: Path, jobs: int, inherited: Sequence[int] = ()
) -> Iterator[tuple[Run, Ended | None]]:
    """Run all, ``jobs`` at a time: each with None as it begins, and with how it ended.

    A run that was interrupted goes on from its last checkpoint. If the caller stops, the processes are ended with
    SIGINT, upon which they save their states.

    Args:
        folder: gets a configuration, a log and a run folder for each.
        inherited: open files of this process that those of the runs keep open.
    """
    waiting, going = list(runs), dict[subprocess.Popen[bytes], Run]()
    try:
        while waiting or going:
            while waiting and len(going) < jobs:
                run = waiting.pop(0)
                going[_begin(run, folder, jobs, inherited)] = run
                yield run, None
            ended = [process for process in going if process.poll() is not None]
            for process in ended:
                run = going.pop(process)
                yield run, _ended(run, folder, process.returncode)
            if not ended:
                time.sleep(_POLL_S)
    finally:
        for process in going:
            process.send_signal(2)
        for process in going:
            process.wait()


def _begin(run: Run, folder: Path, jobs: int, inherited: Sequence[int]) -> subprocess.Popen[bytes]:
    place = folder / run.name
    environment = dict(os.environ)
    choose_share(environment, jobs)
    if (place / "checkpoints" / "latest").exists():
        words = ["--resume", str(place)]
    else:
        if place.exists():
            shutil.rmtree(place)  # it ended before it had saved anything
        settings = folder / f"{run.name}.toml"
        write_whole(settings, run.to_toml())
        words = [str(settings), "--out", str(place)]
    with (folder / f"{run.name}.log").open("ab") as log:
        command = [sys.executable, "-m", "diloco", "train", *words]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, pass_fds=inherited
        )


def _ended(run: Run, folder: Path, code: int) -> Ended:
    summary = folder / run.name / "summary.json"
    if code == 0 and summary.exists():
        return Ended(json.loads(summary.read_text(encoding="utf-8")))
    lines = (folder / f"{run.name}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    said = lines[-1].removeprefix("diloco: ")[:300] if lines else "it said nothing"
    return Ended(None, f"exit code {code}: {said}")
