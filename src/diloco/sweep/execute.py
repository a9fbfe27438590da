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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.checkpoint.disk import write_whole
from diloco.checkpoint.lock import lock_folder
from diloco.config.configuration import Configuration
from diloco.config.keys import build, flatten
from diloco.config.run_plan import CONFIG_FILE
from diloco.config.toml import parse_toml, read_toml
from diloco.cores import set_thread_share, usable_cores
from diloco.errors import ConfigurationError
from diloco.plugins import names_in, own_code
from diloco.sweep.study import Run

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
        jobs: the number of places. None: one for each visible GPU; one if a run chooses its GPUs by itself, in
            ``train.device`` or as several processes; one for each core if no run uses a GPU.
    """
    from diloco.devices import choose_device

    settings = [run.plan.configuration for run in runs if run.plan]
    kinds = set()
    for name in {each.train.device for each in settings}:
        try:
            kinds.add(choose_device(name).type)
        except ConfigurationError:  # its runs fail by themselves
            continue
    if "cuda" not in kinds:
        return [None] * (jobs or (usable_cores() if kinds <= {"cpu"} else 1))
    if any(each.train.device.startswith("cuda:") or each.transport.name == "torch" for each in settings):
        return [None] * (jobs or 1)
    import torch

    count, visible = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(number) for number in range(count)] if visible is None else visible.split(",")[:count]
    return [gpus[number % len(gpus)].strip() for number in range(jobs or len(gpus))]


def run_all(
    runs: Iterable[Run], folder: Path, where: Sequence[str | None], inherited: Sequence[int] = ()
) -> Iterator[tuple[Run, Ended | None]]:
    """Execute all runs, one at each place. Yield each run with None when it starts, and with its end when it ends.

    An interrupted run resumes from its last checkpoint. If the caller closes the iterator, the processes receive
    SIGINT, save their states and exit.

    Args:
        folder: the folder for a configuration, a log and a run folder of each run.
        where: the result of `places`.
        inherited: open files that the processes of the runs inherit.
    """
    waiting, free = list(runs), list(where)
    running = dict[subprocess.Popen[bytes], tuple[Run, str, str | None]]()
    try:
        while waiting or running:
            while waiting and free:
                run, place = waiting.pop(0), free.pop(0)
                identity = run.identity()
                running[_start(run, folder, place, len(where), inherited)] = run, identity, place
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


def _start(run: Run, folder: Path, place: str | None, jobs: int, inherited: Sequence[int]) -> subprocess.Popen[bytes]:
    home = folder / run.folder()
    environment = dict(os.environ) | ({} if place is None else {"CUDA_VISIBLE_DEVICES": place})
    set_thread_share(environment, jobs)
    if (home / "checkpoints" / "latest").exists() and _has_settings(home, run):
        words = ["--resume", str(home)]
        for key, value in own_code(run.settings).items():  # which a folder alone does not choose
            words += [f"--{key}", *names_in(value)]
    else:
        if home.exists():
            with lock_folder(home):  # fails if somebody trains there
                shutil.rmtree(home)
        settings = home.with_name(f"{home.name}.toml")
        write_whole(settings, run.to_toml())
        words = [str(settings), "--out", str(home)]
    with home.with_name(f"{home.name}.log").open("ab") as log:
        command = [sys.executable, "-m", "diloco", "train", *words]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, pass_fds=inherited
        )


def _has_settings(home: Path, run: Run) -> bool:
    """Return whether the run in a folder has the settings of ``run``; it may have been continued with others."""
    if run.plan is None:
        return False
    try:
        held = read_toml(home / CONFIG_FILE, Configuration)
    except ConfigurationError:
        return False
    wanted = parse_toml(run.plan.record, Configuration, where="")
    return flatten(build(Configuration, held)) == flatten(build(Configuration, wanted))


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
