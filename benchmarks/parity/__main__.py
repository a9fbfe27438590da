"""``python -m benchmarks.parity``: run what is missing, two at a time, and write the tables into README.md.

Every row is the result of the plain command that the table gives. To save a third of the time the shared start, which
is the same for all algorithms, is run once per seed and stopped at `FORK_STEP`; the others go on from its checkpoint,
which gives the same bits as running them whole. What is in results.json, or has a summary, is not run again.
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
from diloco.config.configuration import parse_arguments
from diloco.config.run_plan import plan_run

HERE = Path(__file__).parent


def slug(name: str) -> str:
    """A name as a folder."""
    return "".join(letter if letter.isalnum() or letter in ".=" else "-" for letter in name)


def diloco(arguments: Sequence[str], folder: Path) -> None:
    """Run ``diloco train`` in one thread; its messages are shown when it fails."""
    command = [sys.executable, "-m", "diloco", "train", *arguments]
    started_s = time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    print(f"{folder.name}: {time.perf_counter() - started_s:.0f} s", flush=True)


def start(runs: Path, inner: str, seed: int) -> Path:
    """The shared start of an inner optimizer and a seed, stopped before the algorithms part."""
    folder = runs / f"start{slug(inner)}-{seed}"
    if not (folder / "summary.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        stop = ["--seed", str(seed), "--stop-after", str(FORK_STEP), "--out", str(folder)]
        diloco([*COMMON.split(), *inner.split(), *stop], folder)
    return folder


def run(runs: Path, variant: Variant, seed: int) -> dict[str, Any]:
    """One row's run for one seed; returns its summary."""
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
    del summary["out"]  # where it ran is nobody's business
    return {"variant": variant.name, "arguments": given, "seed": seed, **summary}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the main table")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--runs", type=Path, default=Path("runs/parity"), help="where the runs go")
    parser.add_argument("--only", default="*", help="run the rows whose names fit this pattern")
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
    """What says which row of the results it is."""
    return variant.name, f"{variant.arguments} {variant.inner}".strip(), seed


if __name__ == "__main__":
    main()
