"""``python -m benchmarks.parity``: run the missing rows, two at a time, and write the tables into README.md.

Each row is the result of the command that the table gives. The shared start is the same for all algorithms. To save a
third of the time, it runs once per inner optimizer and seed, up to `FORK_STEP`. The runs with four replicas resume from
its checkpoint, which gives the same bits as complete runs. Rows in results.json and runs that have a summary are not
run again.
"""

import argparse
import fnmatch
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.markdown import table, write_below
from benchmarks.parity.losses import gap, heldout_loss, in_words
from diloco.config import parse_arguments, plan_run

HERE = Path(__file__).parent
MARK = "<!-- what follows is written by python -m benchmarks.parity -->"
COMMON = (
    "--preset tiny --evaluation.sequences 512 --evaluation.every-steps 0 "
    "--evaluation.sample-prompts --checkpoint.every-steps 0 --checkpoint.keep 1 "
    "--monitor.console quiet"
)
"""The flags of all runs: the quick start (600 steps, 200 of which are a shared data-parallel start), without output."""
FORK_STEP = 199
"""The last step that is the same for all algorithms. One run up to here serves all variants with four replicas."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """One row of a table."""

    name: str
    arguments: str
    inner: str = ""
    """Flags of the inner optimizer if it differs from the quick start's; they also apply to the shared start."""
    replicas: int = 4

    @property
    def flags(self) -> str:
        return f"{self.arguments} {self.inner}".strip()


def data_parallel(name: str = "", inner: str = "") -> Variant:
    return Variant(f"data-parallel{name}", "--algorithm data-parallel", inner)


def streaming(name: str, more: str = "", inner: str = "", *, codec: str = "fp4") -> Variant:
    """Return Streaming DiLoCo as in the quick start, with the further flags ``more``."""
    return Variant(f"Streaming {codec}{name}", f"--algorithm streaming --codec {codec} {more}".strip(), inner)


def muon(learning_rate: str) -> str:
    """Return the flags for AdamW at ``learning_rate`` and Muon on hidden matrices at ten times that."""
    return f"--optimizer.name Muon --learning-rate {learning_rate}"


def outer(learning_rate: str, momentum: str) -> str:
    """Return the flags of an outer Nesterov step."""
    return f"--outer-learning-rate {learning_rate} --outer-momentum {momentum}"


MUON = muon("2e-3")
FASTER = muon("8e-3") + " --optimizer.arguments {matrix_lr_ratio=2.5,momentum=0.9}"
"""`MUON` with four times the rate for AdamW, the same rate for hidden matrices, and a momentum of 0.9."""
LONGER = muon("8e-3") + " --optimizer.arguments {matrix_lr_ratio=2.5,momentum=0.85,betas=[0.97,0.99]}"
"""`FASTER` with a longer memory for AdamW and a shorter one for Muon."""
LONGER_NAME = ", Muon, AdamW betas .97/.99"

MAIN = (
    data_parallel(),
    Variant("one replica, a quarter of the tokens", "--algorithm data-parallel --replicas 1", replicas=1),
    Variant("DiLoCo", "--algorithm diloco"),
    *(streaming("", codec=codec) for codec in ("float32", "float16", "int8", "fp4")),
    streaming(", isotropic means", outer("1.2", "0.8") + " --sync.arguments.outer.isotropic true"),
    data_parallel(", Muon", MUON),
    streaming(", Muon", outer("0.8", "0.5"), MUON),
    data_parallel(", Muon, AdamW lr 8e-3, momentum .9", FASTER),
    streaming(", Muon, AdamW lr 8e-3, momentum .9", outer("0.8", "0.5"), FASTER),
    data_parallel(f"{LONGER_NAME}, momentum .85", LONGER),
    streaming(f"{LONGER_NAME}, momentum .85", outer("0.8", "0.6"), LONGER),
)
"""The rows with three seeds."""

ABLATIONS = (
    streaming(", outer Nesterov lr 0.7", "--outer-momentum 0.9 --outer-learning-rate 0.7"),
    streaming(", outer Nesterov mu 0.5 lr 0.7", "--outer-momentum 0.5 --outer-learning-rate 0.7"),
    streaming(", outer SGD lr 1", "--outer-momentum 0 --outer-learning-rate 1.0"),
    streaming(", H=30", "--inner-steps 30"),
    *(streaming(f", tau {steps}", f"--overlap-steps {steps}") for steps in (0, 5)),
    *(streaming(f", alpha {alpha}", f"--merge-alpha {alpha}") for alpha in ("0", "0.5")),
    streaming(", error feedback", "--error-feedback 1"),
)
"""Rows with one seed, to be compared with the same seed in the main table."""

TUNING = (
    streaming(", Muon, outer .7/.6", outer("0.7", "0.6"), MUON),
    streaming(", Muon, outer .9/.4", outer("0.9", "0.4"), MUON),
    data_parallel(", Muon, inner lr 4e-3", muon("4e-3")),
    streaming(", Muon, inner lr 4e-3", outer("0.7", "0.6"), muon("4e-3")),
    data_parallel(", inner lr 4e-3", "--learning-rate 4e-3"),
    streaming(", inner lr 4e-3", inner="--learning-rate 4e-3"),
    streaming(f"{LONGER_NAME}, outer .8/.5", outer("0.8", "0.5"), LONGER),
    streaming(f"{LONGER_NAME}, outer .9/.6", outer("0.9", "0.6"), LONGER),
    streaming(f"{LONGER_NAME}, outer .8/.7", outer("0.8", "0.7"), LONGER),
    streaming(f"{LONGER_NAME}, outer .6/.7", outer("0.6", "0.7"), LONGER),
    streaming(f"{LONGER_NAME}, tau 0", outer("0.8", "0.6") + " --overlap-steps 0", LONGER),
    streaming(", Muon, H=30", outer("0.8", "0.5") + " --inner-steps 30", MUON),
    streaming(", Muon, H=30", outer("0.8", "0.5") + " --error-feedback 0.95 --inner-steps 30", MUON, codec="topk2"),
)
"""Rows with one seed: trials for the rows with Muon, inner learning rates, and topk2."""


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


def run(runs: Path, variant: Variant, seed: int) -> Row:
    """Run one row with one seed unless it has a summary, and return its result."""
    folder = runs / f"{slug(variant.name)}-{seed}"
    arguments = [*COMMON.split(), *variant.flags.split(), "--seed", str(seed)]
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
    summary: Row = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    del summary["out"]  # a path of this machine
    return {"variant": variant.name, "arguments": variant.flags, "seed": seed, **summary}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds in the main table")
    parser.add_argument("--jobs", type=int, default=2, help="number of runs at a time")
    parser.add_argument("--runs", type=Path, default=Path("runs/parity"), help="folder of the runs")
    parser.add_argument("--only", default="*", help="run only rows whose names match this pattern")
    given = parser.parse_args(arguments)
    variants = {variant.name: variant for variant in (*MAIN, *ABLATIONS, *TUNING)}
    jobs = [(variant.name, seed) for seed in range(given.seeds) for variant in MAIN]
    jobs += [(variant.name, 0) for variant in (*ABLATIONS, *TUNING)]
    file = HERE / "results.json"
    known = {(row["variant"], row["seed"]): row for row in json.loads(file.read_text("utf-8"))}
    missing = [job for job in jobs if job not in known and fnmatch.fnmatchcase(job[0], given.only)]
    inner = [(variants[name], seed) for name, seed in missing]
    starts = sorted({(variant.inner, seed) for variant, seed in inner if variant.replicas == 4})
    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(lambda shared: start(given.runs, *shared), starts))
        for job, row in zip(missing, pool.map(lambda job: run(given.runs, *job), inner), strict=True):
            known[job] = row
            results = [known[each] for each in jobs if each in known]
            file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    rows = [known[job] for job in jobs if job in known]
    write_below(MARK, tables(rows, given.seeds), HERE / "README.md")


def tables(results: Sequence[Row], seeds: int) -> str:
    """Return the main table with the spread over seeds, the tables with one seed, and the commands, in Markdown."""
    by_name: dict[str, dict[int, Row]] = {}
    for row in results:
        by_name.setdefault(row["variant"], {})[row["seed"]] = row
    base = {seed: heldout_loss(row) for seed, row in by_name["data-parallel"].items()}
    head = ["run", "held-out loss, mean", "largest - smallest", "relative to data-parallel, per seed"]
    head += ["sent after the start", "minutes"]
    lines = [f"## {seeds} seeds", "", table(head, (main_row(variant, by_name[variant.name], base) for variant in MAIN))]
    for settings in (v.name.removeprefix("data-parallel, ") for v in MAIN if v.name.startswith("data-parallel, ")):
        rival = {seed: heldout_loss(row) for seed, row in by_name[f"data-parallel, {settings}"].items()}
        own = by_name[f"Streaming fp4, {settings}"]
        gaps = [f"{gap(heldout_loss(own[seed]) / rival[seed])} (seed {seed})" for seed in sorted(own) if seed in rival]
        lines += ["", f"Streaming fp4 relative to data-parallel, both with {settings}: {', '.join(gaps)}."]
    for heading, variants in (("Ablations", ABLATIONS), ("Learning rates, Muon and topk2", TUNING)):
        rows = [by_name[variant.name][0] for variant in variants if variant.name in by_name]
        pairs = zip(rows, map(heldout_loss, rows), strict=True)
        cells = [[row["variant"], in_words(loss), gap(loss / base[0]), sent(row)] for row, loss in pairs]
        head = ["run", "held-out loss", "relative to data-parallel", "sent after the start"]
        lines += ["", f"## {heading}, seed 0", "", table(head, cells)]
    lines += ["", "## Commands", "", f"`diloco train {COMMON} --seed SEED`, followed by:", ""]
    shown = [[v.name, f"`{v.flags}`"] for v in (*MAIN, *ABLATIONS, *TUNING) if v.name in by_name]
    return "\n".join([*lines, table(["run", "arguments"], shown)]) + "\n"


def sent(row: Row) -> str:
    first = row["shared_start_sent_bytes_per_replica"] if row["shared_start_steps"] else 0
    return f"{(row['sent_bytes_per_replica'] - first) / 1e6:,.1f} MB"


def main_row(variant: Variant, rows: dict[int, Row], base: dict[int, float]) -> list[str]:
    losses = [heldout_loss(rows[seed]) for seed in sorted(rows)]
    gaps = " / ".join(gap(loss / base[seed]) for seed, loss in zip(sorted(rows), losses, strict=True))
    minutes = statistics.mean(row["wall_s"] for row in rows.values()) / 60
    middle, spread = statistics.mean(losses), max(losses) - min(losses)
    return [variant.name, in_words(middle), in_words(spread), gaps, sent(rows[min(rows)]), f"{minutes:.1f}"]


if __name__ == "__main__":
    main()
