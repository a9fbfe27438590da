"""``python -m benchmarks.parity``: run the missing rows, two at a time, and write the tables into README.md.

Each row is the result of the command that the table gives. The shared start is the same for all algorithms. To save a
third of the time, it runs once per inner optimizer and seed, up to `FORK_STEP`. The runs with four replicas resume from
its checkpoint, which gives the same bits as complete runs. Rows in results.json and runs that have a summary are not
run again.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.parity.plan import ABLATIONS, COMMON, FORK_STEP, MAIN, TUNING, Variant
from benchmarks.parity.report import write_report
from diloco.config import parse_arguments, plan_run

HERE = Path(__file__).parent


def slug(name: str) -> str:
    """Return ``name`` as a folder name."""
    return "".join(letter if letter.isalnum() or letter in ".=" else "-" for letter in name)


def diloco(arguments: Sequence[str], folder: Path) -> None:
    """Run ``diloco train`` in one thread, and exit with its standard error if it fails."""
    command = [sys.executable, "-m", "diloco", "train", *arguments]
    started_s = time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    print(f"{folder.name}: {time.perf_counter() - started_s:.0f} s", flush=True)


def start(runs: Path, inner: str, seed: int) -> Path:
    """Return the folder of the shared start of an inner optimizer and a seed, and run it if it is missing."""
    folder = runs / f"start{slug(inner)}-{seed}"
    if not (folder / "summary.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        stop = ["--seed", str(seed), "--stop-after", str(FORK_STEP), "--out", str(folder)]
        diloco([*COMMON.split(), *inner.split(), *stop], folder)
    return folder


def run(runs: Path, variant: Variant, seed: int) -> dict[str, Any]:
    """Run one row with one seed unless it has a summary, and return its result."""
    folder = runs / f"{slug(variant.name)}-{seed}"
    given = f"{variant.arguments} {variant.inner}".strip()
    arguments = [*COMMON.split(), *given.split(), "--seed", str(seed)]
    if not (folder / "summary.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        if variant.replicas == 4:
            shared = start(runs, variant.inner, seed)
            folder.mkdir(parents=True)
            shutil.copytree(shared / "checkpoints", folder / "checkpoints")
            for tokenizer in shared.glob("tokenizer*.json"):
                shutil.copy(tokenizer, folder)
            (folder / "config.toml").write_text(plan_run(parse_arguments(arguments)).record, encoding="utf-8")
            diloco(["--resume", str(folder)], folder)
        else:
            diloco([*arguments, "--out", str(folder)], folder)
        shutil.rmtree(folder / "checkpoints")
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    del summary["out"]  # a path of this machine
    return {"variant": variant.name, "arguments": given, "seed": seed, **summary}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds in the main table")
    parser.add_argument("--jobs", type=int, default=2, help="number of runs at a time")
    parser.add_argument("--runs", type=Path, default=Path("runs/parity"), help="folder of the runs")
    parser.add_argument("--only", default="*", help="run only rows whose names match this pattern")
    given = parser.parse_args(arguments)
    jobs = [(variant, seed) for seed in range(given.seeds) for variant in MAIN]
    jobs += [(variant, 0) for variant in (*ABLATIONS, *TUNING)]
    file = HERE / "results.json"
    known = {(row["variant"], row["arguments"], row["seed"]): row for row in json.loads(file.read_text("utf-8"))}
    missing = [job for job in jobs if key(*job) not in known and fnmatch.fnmatchcase(job[0].name, given.only)]
    starts = sorted({(variant.inner, seed) for variant, seed in missing if variant.replicas == 4})
    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(lambda shared: start(given.runs, *shared), starts))
        for job, row in zip(missing, pool.map(lambda job: run(given.runs, *job), missing), strict=True):
            known[key(*job)] = row
            results = [known[key(*each)] for each in jobs if key(*each) in known]
            file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    write_report([known[key(*job)] for job in jobs if key(*job) in known], HERE / "README.md", seeds=given.seeds)


def key(variant: Variant, seed: int) -> tuple[str, str, int]:
    """Return what identifies a row of the results."""
    return variant.name, f"{variant.arguments} {variant.inner}".strip(), seed


if __name__ == "__main__":
    main()
