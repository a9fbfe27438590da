"""How the runs of a study are executed, and the table of their results."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco.checkpoint import lock_folder, write_whole
from diloco.config import CONFIG_FILE, Configuration, build, parse_toml, read_toml
from diloco.cores import usable_cores
from diloco.errors import ConfigurationError
from diloco.events import json_ready
from diloco.plugins import names_in, own_code
from diloco.sweep.study import Run
from diloco.train import start_process

__all__ = ["places", "results", "run_all", "summary_of", "table"]


def places(jobs: int | None) -> list[dict[str, str]]:
    """Return the variables that choose a GPU for each of ``jobs`` runs that may run at a time.

    None: one run for each visible GPU, or for each core if there is no GPU.
    """
    import torch

    every = ",".join(map(str, range(torch.cuda.device_count() if torch.cuda.is_available() else 0)))
    gpus = [name.strip() for name in (every and os.environ.get("CUDA_VISIBLE_DEVICES", every)).split(",") if name]
    count = jobs or len(gpus) or usable_cores()
    return [{"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if gpus else {} for number in range(count)]


def summary_of(run: Run, folder: Path) -> dict[str, Any] | None:
    """Return the summary of ``run`` in its folder among the folders of runs, or None if it has not finished there."""
    home = folder / run.folder()
    if run.plan is None or not (home / "summary.json").exists() or not _is_of(run, home):
        return None
    summary: dict[str, Any] = json.loads((home / "summary.json").read_text(encoding="utf-8"))
    return summary if summary["steps"] == run.plan.configuration.train.steps else None


def results(runs: Sequence[Run], folder: Path, errors: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the rows of the runs that have ended: name, settings, error ("" if done) and what its summary holds."""
    rows = []
    for run in runs:
        summary = summary_of(run, folder)
        if summary or run.name in errors:
            about = {"run": run.name, "varied": json_ready(run.varied), "settings": json_ready(run.settings)}
            rows.append(about | {"error": errors.get(run.name, "")} | (summary or {}))
    return rows


def run_all(
    runs: Sequence[Run], folder: Path, where: Sequence[Mapping[str, str]], lock: int | None = None
) -> Iterator[tuple[Run, str | None]]:
    """Execute runs, one at each of the `places`. Yield each run with None at its start, and with its error at its end.

    If the caller closes the iterator, the processes receive SIGINT and save. They share the ``lock`` of the study.
    """
    waiting, free = list(runs), list(where)
    running = dict[subprocess.Popen[bytes], tuple[Run, Path, Mapping[str, str]]]()
    try:
        while waiting or running:
            while waiting and free:
                run = waiting.pop(0)
                home = folder / run.folder()
                try:
                    command = _command(run, home)
                except ConfigurationError as error:  # somebody trains there
                    yield run, str(error)
                    continue
                with open(f"{home}.log", "ab") as log:
                    process = start_process(command, len(where), lock, free[0], log)
                running[process] = run, home, free.pop(0)
                yield run, None
            for process in [process for process in running if process.poll() is not None]:
                run, home, place = running.pop(process)
                free.append(place)
                yield run, _error(run, home, process.returncode)
            time.sleep(0.05)
    finally:
        for process in running:
            process.send_signal(signal.SIGINT)
        for process in running:
            process.wait()


def _command(run: Run, home: Path) -> list[str]:
    """Return the arguments with which ``run`` resumes in its folder, or begins if there is no checkpoint of it."""
    saved = (home / "checkpoints" / "latest").exists()
    if saved and _is_of(run, home):
        own = own_code(run.settings).items()  # which a folder alone does not choose
        return ["train", "--resume", str(home), *(word for key, v in own for word in (f"--{key}", *names_in(v)))]
    if home.exists():
        with lock_folder(home):
            if saved:  # of somebody who continued it with other settings
                home.rename(f"{home}.{time.time_ns()}")
            else:
                shutil.rmtree(home)
    write_whole(Path(f"{home}.toml"), run.text)
    return ["train", f"{home}.toml", "--out", str(home)]


def _is_of(run: Run, home: Path) -> bool:
    """Return whether a folder was made with the settings of ``run``; somebody may have continued it with others."""
    if run.plan is None:
        return False
    saved, own = read_toml(home / CONFIG_FILE, Configuration), parse_toml(run.plan.record, Configuration, where="")
    return build(Configuration, saved) == build(Configuration, own)


def _error(run: Run, home: Path, code: int) -> str:
    if home.name != run.folder():
        home.rename(f"{home}.{time.time_ns()}")
        return "a file that its settings name was changed while it ran"
    if code == 0:
        return ""
    lines = Path(f"{home}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"exit code {code}: {lines[-1].removeprefix('diloco: ')[:300] if lines else 'no output'}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table with a row for each point of the axes. Runs that differ only in their seed share a row.

    >>> one = {"varied": {"codec": "fp4", "seed": 0}, "error": "", "heldout_loss": 1.5}
    >>> print(table([one, one | {"varied": {"codec": "fp4", "seed": 1}, "heldout_loss": 1.7}]))
    | codec | held-out loss | lowest, highest | runs | failed |
    | --- | --- | --- | --- | --- |
    | fp4 | 1.6000 | 1.5000, 1.7000 | 2 |  |
    """
    keys = [key for key in dict.fromkeys(key for row in rows for key in row["varied"]) if key != "seed"]
    points: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        points.setdefault(tuple(str(row["varied"].get(key, "")) for key in keys), []).append(row)
    header = [*keys, "held-out loss", "lowest, highest", "runs", "failed"]
    lines: list[Sequence[str]] = [header, ["---"] * len(header)]
    for point, alike in points.items():
        losses = [row["heldout_loss"] for row in alike if not row["error"] and row["heldout_loss"] is not None]
        found = [f"{statistics.fmean(losses):.4f}", f"{min(losses):.4f}, {max(losses):.4f}"] if losses else ["", ""]
        lines.append([*point, *found, str(len(alike)), next((row["error"] for row in alike if row["error"]), "")])
    return "\n".join(
        f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in line)} |" for line in lines
    )
