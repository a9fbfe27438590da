"""Studies: the same run with settings varied along axes, how its runs are executed, and the table of their results."""

import glob
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import xxhash

import diloco
from diloco.checkpoint import lock_folder, write_whole
from diloco.config import (
    CONFIG_FILE,
    CommandLine,
    Configuration,
    RunPlan,
    flatten,
    in_toml,
    parse_tables,
    plan_run,
    read_tables,
    read_toml,
    typed_values,
)
from diloco.devices import usable_cores
from diloco.errors import ConfigurationError
from diloco.events import json_ready
from diloco.plugins import code_digest, confirm_file, find, is_own, own_code
from diloco.train import start_process


@dataclass(frozen=True)
class Run:
    """One run of a study."""

    name: str  # the values in which it differs from the other runs
    varied: Mapping[str, Any]  # key -> value of the axes alone
    plan: RunPlan

    def folder(self) -> str:
        """Return the name of its folder, with a digest of every setting, the files that they name, and this version."""
        settings = flatten(self.plan.configuration)
        code = []
        for key, names in own_code(settings).items():
            code += [code_digest(find(key, name, object)) for name in names if is_own(name)]
        settings = json_ready(settings)
        about = json.dumps([diloco.__version__, settings, [*_files(settings)], code], sort_keys=True)
        return f"{self.name[:100]}-{xxhash.xxh3_64_hexdigest(about.encode())}"

    def summary(self, folder: Path) -> dict[str, Any] | None:
        """Return its summary in its folder among the folders of runs, or None if it has not finished there."""
        home = folder / self.folder()
        if not (home / "summary.json").exists() or not self._is_in(home):
            return None
        summary: dict[str, Any] = json.loads((home / "summary.json").read_text(encoding="utf-8"))
        return summary if summary["steps"] == self.plan.configuration.train.steps else None

    def command(self, home: Path) -> list[str]:
        """Return the arguments with which the run resumes in ``home``, or begins if there is no checkpoint of it."""
        saved = any((home / "checkpoints").glob("step-*"))
        own = own_code(
            flatten(self.plan.configuration)
        ).items()  # a folder or file alone does not choose whose code runs
        code = [word for key, names in own for word in (f"--{key}", *names)]
        if saved and self._is_in(home):
            return ["train", "--resume", str(home), *code]
        if home.exists():
            with lock_folder(home):  # keep it if somebody continued it with other settings
                home.rename(f"{home}.{time.time_ns()}") if saved else shutil.rmtree(home)
        write_whole(Path(f"{home}.toml"), self.plan.record)
        return ["train", f"{home}.toml", "--out", str(home), *code]

    def _is_in(self, home: Path) -> bool:
        """Return whether a folder was made with these settings; somebody may have continued it with others."""
        mine = typed_values(parse_tables(self.plan.record, self.name), Configuration, self.name)
        return read_toml(home / CONFIG_FILE, Configuration) == mine


def read_study(path: Path) -> list[Run]:
    """Return the runs of the study in a TOML file: every combination of the axes' points, the last axis fastest.

    Raises:
        ConfigurationError: if the file can't be read, or a key or value is not valid for a run.
    """
    tables = read_tables(path)
    given = [f"[{name}]" if isinstance(table, dict) else name for name, table in tables.items()]
    if {*given} - {"[base]", "[axes]"} or not tables.get("axes"):
        raise ConfigurationError(
            f"{path} must have a table [axes], with a list of values for each key that is varied, and may have [base], "
            f"with keys of a run, got {', '.join(given) or 'nothing'}."
        )
    base, axes = dict(_leaves(tables.get("base", {}))), dict(_leaves(tables["axes"]))
    for names, points in axes.items():
        if not isinstance(points, list) or not points:
            raise ConfigurationError(f"{path}, [axes]: {names} must be a list of different values, got {points!r}.")
    runs = [_run(path, base, dict(zip(axes, point, strict=True))) for point in itertools.product(*axes.values())]
    first = dict[str, Run]()
    for run in runs:  # also of points that are written differently, such as 60s and 1min
        if (same := first.setdefault(run.plan.record, run)) is not run:
            raise ConfigurationError(f"{path}, [axes]: {same.name} and {run.name} are the same run. Leave one out.")
    return runs


def _run(path: Path, base: Mapping[str, Any], point: Mapping[str, Any]) -> Run:
    varied: dict[str, Any] = {}
    for names, value in point.items():
        keys = [name.strip() for name in names.split(",")]
        values = [value] if len(keys) == 1 else value
        if not isinstance(values, list) or len(values) != len(keys):
            raise ConfigurationError(f"{path}, [axes]: a point of {names} must have {len(keys)} values, got {value!r}.")
        if both := varied.keys() & keys:
            raise ConfigurationError(f"{path}: {min(both)} is on two axes. Keep it on one of them.")
        varied |= zip(keys, values, strict=True)
    shared = dict(base)
    for axis in varied:  # which replaces what the base has at its key, and below it
        shared = {key: value for key, value in shared.items() if not f"{key}.".startswith(f"{axis}.")}
    if taken := {"out", "checkpoint.resume", "checkpoint.mirror"} & {*shared, *varied}:
        raise ConfigurationError(f"{path}: {min(taken)} can't be given: each run needs its own.")
    words = "_".join(f"{key.rpartition('.')[2]}={value}" for key, value in varied.items())
    text = "".join(f"{key} = {in_toml(value)}\n" for key, value in (shared | varied).items())
    settings = typed_values(parse_tables(text, str(path)), Configuration, str(path))
    confirm_file(path, settings, {})
    try:
        plan = plan_run(CommandLine(defaults=settings))
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}, {words}: {error}") from error
    return Run(re.sub(r"[^A-Za-z0-9._=+-]+", "-", words), varied, plan)


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables with dotted keys."""
    for word, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{word}.")
        else:
            yield f"{prefix}{word}", value


def _files(value: Any) -> Iterator[str]:
    """Yield digests of the files that settings name, without hidden ones."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _files(item)
    elif isinstance(value, str):
        place = value.removeprefix("hf:")
        for name in (place, place.rpartition(":")[0]):  # without the split of a data set or the name in a file
            pattern = glob.escape(name) if os.path.exists(name) else name
            if os.path.isabs(name) and (paths := {*glob.glob(pattern), *glob.glob(f"{pattern}/**", recursive=True)}):
                for path in filter(os.path.isfile, sorted(paths)):
                    at = os.stat(path)
                    yield _digest(path, at.st_size, at.st_mtime_ns, at.st_ino)


@cache  # by what changes with the content, since the runs of a study share their data
def _digest(path: str, *_: int) -> str:
    with open(path, "rb") as file:
        return f"{path} {hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()}"


def places(jobs: int | None) -> list[dict[str, str]]:
    """Return the variables that choose a GPU for each of ``jobs`` runs that may run at a time.

    None: one run for each visible GPU, or for each core if there is no GPU.
    """
    every = ",".join(map(str, range(torch.cuda.device_count() if torch.cuda.is_available() else 0)))
    gpus = [name.strip() for name in (every and os.environ.get("CUDA_VISIBLE_DEVICES", every)).split(",") if name]
    count = jobs or len(gpus) or usable_cores()
    return [{"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if gpus else {} for number in range(count)]


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
                    command = run.command(home)
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
                problem = ""
                if home.name != run.folder():
                    home.rename(f"{home}.{time.time_ns()}")
                    problem = "a file that its settings name was changed while it ran"
                elif process.returncode:
                    *_, last = ["no output", *Path(f"{home}.log").read_text("utf-8", "replace").strip().splitlines()]
                    problem = f"exit code {process.returncode}: {last.removeprefix('diloco: ')[:300]}"
                yield run, problem
            time.sleep(0.05)
    finally:
        for process in running:
            process.send_signal(signal.SIGINT)
        for process in running:
            process.wait()


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table with a row for each point of the axes. Runs that differ only in their seed share a row.

    >>> one = {"varied": {"codec": "fp4", "seed": 0}, "error": "", "heldout_loss": 1.5}
    >>> print(table([one, one | {"varied": {"codec": "fp4", "seed": 1}, "heldout_loss": 1.7}]))
    | codec | held-out loss | lowest, highest | runs | failed |
    | --- | --- | --- | --- | --- |
    | fp4 | 1.6000 | 1.5000, 1.7000 | 2 |  |
    """
    keys: list[str] = []
    for row in rows:
        keys += [key for key in row["varied"] if key != "seed" and key not in keys]
    points: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        points.setdefault(tuple(str(row["varied"].get(key, "")) for key in keys), []).append(row)
    header = [*keys, "held-out loss", "lowest, highest", "runs", "failed"]
    lines = [header, ["---"] * len(header)]
    for point, alike in points.items():
        known = [float(row["heldout_loss"]) for row in alike if not row["error"] and row["heldout_loss"] is not None]
        losses = sorted(known, key=lambda loss: (math.isnan(loss), loss))  # a run that has diverged has the highest
        shown = [f"{statistics.fmean(losses):.4f}", f"{losses[0]:.4f}, {losses[-1]:.4f}"] if losses else ["", ""]
        lines.append([*point, *shown, str(len(alike)), next((row["error"] for row in alike if row["error"]), "")])
    cells = ([cell.replace("|", "/").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
