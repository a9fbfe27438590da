"""Execution of the runs of a study: each is a `diloco train` process, and several run at a time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.checkpoint.disk import write_whole
from diloco.cores import set_thread_share
from diloco.errors import ConfigurationError
from diloco.plugins import names_in, own_code
from diloco.sweep.study import Run

if sys.platform != "win32":
    import fcntl

__all__ = ["Ended", "run_all", "sweep_lock"]

_POLL_S = 0.05


@dataclass(frozen=True)
class Ended:
    """The end of a run."""

    summary: dict[str, Any] | None  # the run's summary.json; None if the run failed
    error: str = ""  # why the run failed


@contextmanager
def sweep_lock(folder: Path) -> Iterator[Sequence[int]]:
    """Lock a folder (except on Windows) until this sweep and all of its processes have ended.

    Yields:
        The open files that the processes of the sweep must inherit.

    Raises:
        ConfigurationError: if another sweep, or a run that it started, holds the lock.
    """
    if sys.platform == "win32":
        yield ()
        return
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigurationError(
                f"another `diloco sweep`, or a run that it started, is still working in {folder}. Wait until it has "
                "ended, stop it, or use another --out."
            ) from error
        yield (lock.fileno(),)


def run_all(
    runs: Iterable[Run], folder: Path, jobs: int, inherited: Sequence[int] = ()
) -> Iterator[tuple[Run, Ended | None]]:
    """Execute all runs, ``jobs`` at a time. Yield each run with None when it starts, and with its end when it ends.

    An interrupted run resumes from its last checkpoint. If the caller closes the iterator, the processes receive
    SIGINT, save their states and exit.

    Args:
        folder: the folder for a configuration, a log and a run folder of each run.
        inherited: open files that the processes of the runs inherit.
    """
    waiting, running = list(runs), dict[subprocess.Popen[bytes], Run]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                running[_start(run, folder, jobs, inherited)] = run
                yield run, None
            ended = [process for process in running if process.poll() is not None]
            for process in ended:
                run = running.pop(process)
                yield run, _ended(run, folder, process.returncode)
            if not ended:
                time.sleep(_POLL_S)
    finally:
        for process in running:
            process.send_signal(signal.SIGINT)
        for process in running:
            process.wait()


def _start(run: Run, folder: Path, jobs: int, inherited: Sequence[int]) -> subprocess.Popen[bytes]:
    place = folder / run.name
    environment = dict(os.environ)
    set_thread_share(environment, jobs)
    if (place / "checkpoints" / "latest").exists():
        words = ["--resume", str(place)]
        for key, value in own_code(run.settings).items():  # which a folder alone does not choose
            words += [f"--{key}", *names_in(value)]
    else:
        if place.exists():
            shutil.rmtree(place)  # an earlier attempt ended before its first checkpoint
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
    reason = lines[-1].removeprefix("diloco: ")[:300] if lines else "no output"
    return Ended(None, f"exit code {code}: {reason}")
