"""``python -m benchmarks.end_to_end``: gather text, train on it, interrupt, resume, export, and evaluate the export.

All stages but the first and the last are commands of `diloco`. The last one loads the export with transformers alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.gather import gather
from benchmarks.end_to_end.transformers_loss import loss_with_transformers
from diloco.monitor import read_metrics

HERE = Path(__file__).parent

RECIPE = """
--algorithm streaming --codec fp4 --transport torch --replicas 4
--model.arguments.layers 8 --model.arguments.width 256 --model.arguments.ffn-width 704 --model.arguments.heads 8
--train.batch-size 4 --train.sequence-length 256 --train.threads 1
--data.streaming --data.tokenizer bpe --data.bpe-vocab-size 8192 --data.bpe-documents 2000 --data.streaming-block 16
--optimizer.learning-rate 1e-3 --optimizer.warmup-steps 50 --inner-steps 25 --data-parallel-steps 50
--evaluation.sequences 256 --checkpoint.every-steps 0 --monitor.console plain
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.end_to_end", description=__doc__)
    parser.add_argument("--steps", type=int, default=600, help="number of training steps")
    parser.add_argument("--megabytes", type=int, default=32, help="least number of megabytes of text")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/end-to-end"), help="folder for all files; it is deleted first"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    given = parser.parse_args(arguments)
    work: Path = given.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    texts, run, exported = work / "texts", work / "run", work / "exported"
    gathered = timed("gather", lambda: gather(texts, given.megabytes * 1_000_000))
    source = f'{{ text = {{ data = "hf:json", data_files = "{texts}/*.jsonl" }} }}'
    train = ["train", *shlex.split(RECIPE), "--data.sources", source, "--steps", str(given.steps), "--out", str(run)]
    stopped_at = timed("train", lambda: interrupted(train, run, given.steps // 2))
    timed("resume", lambda: called("train", "--resume", str(run)))
    timed("export", lambda: called("export", str(run), "--to", "hf", str(exported)))
    ours = json.loads(timed("evaluate", lambda: called("evaluate", str(run), "--json")))
    theirs = timed("transformers", lambda: loss_with_transformers(run, exported, ours["sequence_length"]))
    summary = json.loads((run / "summary.json").read_text())
    losses = [(event["step"], event["heldout_loss"]) for event in read_metrics(run / "metrics.jsonl", "Evaluated")]
    results = {
        "versions": {name: metadata.version(name) for name in ("diloco", "torch", "transformers", "datasets")}
        | {"python": platform.python_version()},
        "recipe": shlex.split(RECIPE),
        "text": gathered,
        "stopped_at": stopped_at,
        "heldout_losses": losses,
        "summary": {name: value for name, value in summary.items() if name != "out"},
        "evaluate": {name: value for name, value in ours.items() if name != "checkpoint"},
        "transformers": theirs,
        "seconds": SECONDS,
    }
    given.out.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


SECONDS: dict[str, float] = {}


def timed(stage: str, work: Any) -> Any:
    """Return ``work()``, and record its duration for the results."""
    started_s = time.perf_counter()
    result = work()
    SECONDS[stage] = round(time.perf_counter() - started_s, 1)
    print(f"{stage}: {SECONDS[stage]} s", file=sys.stderr, flush=True)
    return result


def called(*arguments: str) -> str:
    """Run a `diloco` command, which must succeed, and return what it prints."""
    done = subprocess.run([sys.executable, "-m", "diloco", *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"diloco {shlex.join(arguments)} ended with exit code {done.returncode}:\n{done.stdout}")
    return done.stdout


def interrupted(arguments: Sequence[str], run: Path, step: int) -> int:
    """Train until ``step`` has finished, interrupt the run as Ctrl-C does, and return the step it stopped after."""
    with (run.parent / "train.txt").open("w") as output:
        process = subprocess.Popen([sys.executable, "-m", "diloco", *arguments], stdout=output, stderr=output)
        while process.poll() is None and last_step(run) < step:
            time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        code = process.wait()
    if code != 130:
        raise SystemExit(
            f"The interrupted run ended with exit code {code}, not 130:\n{(run.parent / 'train.txt').read_text()}"
        )
    return last_step(run)


def last_step(run: Path) -> int:
    """Return the last step that the run has recorded."""
    metrics = run / "metrics.jsonl"
    return max((event["step"] for event in read_metrics(metrics, "StepFinished")), default=0) if metrics.exists() else 0


if __name__ == "__main__":
    main()
