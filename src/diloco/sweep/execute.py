"""Execution of the runs of a study: each is a `diloco train` process, and several run at a time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.checkpoint import lock_folder, write_whole
from diloco.config import CONFIG_FILE, Configuration, build, parse_toml, read_toml
from diloco.cores import usable_cores
from diloco.errors import ConfigurationError
from diloco.plugins import names_in, own_code
from diloco.sweep.study import Run
from diloco.train import start_process

__all__ = ["Ended", "places", "run_all"]

_POLL_S = 0.05


@dataclass(frozen=True)
class Ended:
    """The end of a run."""

    identity: str  # what was run, see `Run.identity`
    summary: dict[str, Any] | None  # the run's summary.json; None if the run failed
    error: str = ""  # why the run failed


def places(runs: Iterable[Run], jobs: int | None) -> list[str | None]:
    """Return a place for each run that may run at a time: the ``CUDA_VISIBLE_DEVICES`` of its process, None: unchanged.

    Args:
        jobs: the number of places. None: one if a run uses several processes or names its GPU; otherwise one for each
            visible GPU, or for each core if no run uses a GPU.
    """
    from diloco.devices import choose_device

    settings = [run.plan.configuration for run in runs if run.plan]
    kinds = set()
    for each in settings:
        with suppress(ConfigurationError):  # its runs fail by themselves
            kinds.add(choose_device(each.train.device).type)
    if any(each.train.device.startswith("cuda:") or each.transport.name == "torch" for each in settings):
        return [None] * (jobs or 1)
    if "cuda" not in kinds:
        return [None] * (jobs or (usable_cores() if kinds <= {"cpu"} else 1))
    import torch

    count, visible = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(number) for number in range(count)] if visible is None else visible.split(",")[:count]
    return [gpus[number % len(gpus)].strip() for number in range(jobs or len(gpus))]


def run_all(
    runs: Iterable[Run], folder: Path, where: Sequence[str | None], lock: int | None = None
) -> Iterator[tuple[Run, Ended | None]]:
    """Execute all runs, one at each place. Yield each run with None when it starts, and with its end when it ends.

    An interrupted run resumes from its last checkpoint. If the caller closes the iterator, the processes receive
    SIGINT, save their states and exit.

    Args:
        folder: the folder for a configuration, a log and a run folder of each run.
        where: the result of `places`.
        lock: the lock of the study's folder, which the processes share.
    """
    waiting, free = list(runs), list(where)
    running = dict[subprocess.Popen[bytes], tuple[Run, str, str | None]]()
    try:
        while waiting or running:
            while waiting and free:
                run = waiting.pop(0)
                identity, home = run.identity(), folder / run.folder()
                try:
                    words = _command(run, home)
                except ConfigurationError as error:  # somebody trains there
                    yield run, Ended(identity, None, str(error))
                    continue
                place = free.pop(0)
                variables = {} if place is None else {"CUDA_VISIBLE_DEVICES": place}
                with home.with_name(f"{home.name}.log").open("ab") as log:
                    process = start_process(words, len(where), lock, variables, log)
                running[process] = run, identity, place
                yield run, None
            ended = [process for process in running if process.poll() is not None]
            for process in ended:
                run, identity, place = running.pop(process)
                free.append(place)
                yield run, _ended(run, identity, folder, process.returncode)
            if not ended:
                time.sleep(_POLL_S)
    finally:
        for process in running:
            process.send_signal(signal.SIGINT)
        for process in running:
            process.wait()


def _command(run: Run, home: Path) -> list[str]:
    """Return the arguments with which ``run`` resumes in its folder, or begins if there is no checkpoint of it."""
    if _has_checkpoint(run, home):
        words = ["train", "--resume", str(home)]
        for key, value in own_code(run.settings).items():  # which a folder alone does not choose
            words += [f"--{key}", *names_in(value)]
        return words
    if home.exists():
        with lock_folder(home):
            if (home / "checkpoints" / "latest").exists():  # of somebody who continued it with other settings
                home.rename(home.with_name(f"{home.name}.{time.time_ns()}"))
            else:
                shutil.rmtree(home)
    settings = home.with_name(f"{home.name}.toml")
    write_whole(settings, run.to_toml())
    return ["train", str(settings), "--out", str(home)]


def _has_checkpoint(run: Run, home: Path) -> bool:
    """Return whether a folder has a checkpoint of ``run``; somebody may have continued it with other settings."""
    if run.plan is None or not (home / "checkpoints" / "latest").exists():
        return False
    try:
        saved = build(Configuration, read_toml(home / CONFIG_FILE, Configuration))
    except ConfigurationError:
        return False
    return saved == build(Configuration, parse_toml(run.plan.record, Configuration, where=""))


def _ended(run: Run, identity: str, folder: Path, code: int) -> Ended:
    if run.identity() != identity:
        return Ended(identity, None, "a file that its settings name was changed while it ran")
    home = folder / run.folder()
    summary = home / "summary.json"
    if code == 0 and summary.exists():
        return Ended(identity, json.loads(summary.read_text(encoding="utf-8")))
    lines = home.with_name(f"{home.name}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    reason = lines[-1].removeprefix("diloco: ")[:300] if lines else "no output"
    return Ended(identity, None, f"exit code {code}: {reason}")
