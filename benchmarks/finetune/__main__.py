"""Fine-tuning on a machine without a GPU: a base model of our own, then adapters on 1, 2 and 4 replicas.

python -m benchmarks.finetune base WORK          the base model, some minutes
python -m benchmarks.finetune runs WORK          every run that WORK/results.jsonl lacks
python -m benchmarks.finetune table WORK         the table of the README
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.finetune.task import write_conversations, write_table, write_tokenizer

LAYERS, WIDTH = 2, 64
STEPS, WINDOW, SEQUENCES, LENGTH = 160, 10, 8, 72
COMMON = f"""--train.sequence-length {LENGTH} --steps {STEPS} --lora.rank 8 --inner.learning-rate 2e-3
 --evaluation.every-steps 0 --evaluation.sequences 0 --checkpoint.every-steps 0 --train.device cpu
 --monitor.console quiet --inner.warmup-steps 10 --train.threads 1"""
LINKS = "--transport.bandwidth-bits-per-s 100e6 --transport.latency-s 0.1 --transport.step-time-s 0.5"
NESTEROV = "--outer.name nesterov --outer.learning-rate 0.7 --outer.momentum"
METHODS = {
    "synchronous": "--algorithm data-parallel",
    "no momentum, lr 1": f"--inner-steps {WINDOW} {LINKS}",
    "no momentum, lr 1, overwriting": f"--inner-steps {WINDOW} --merge-alpha 0 {LINKS}",
    "Nesterov .7/.6": f"--inner-steps {WINDOW} {NESTEROV} 0.6 {LINKS}",
    "stock Nesterov .7/.9": f"--inner-steps {WINDOW} {NESTEROV} 0.9 {LINKS}",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("base", "runs", "table"))
    parser.add_argument("work", type=Path)
    parser.add_argument("--base-steps", type=int, default=2500)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--questions", type=int, default=150)
    given = parser.parse_args()
    if given.what == "base":
        make_base(given.work, given.base_steps, given.questions)
    elif given.what == "runs":
        for method, replicas, seed in runs(given.seeds):
            run_one(given.work, method, replicas, seed)
    else:
        print("\n".join(table([json.loads(line) for line in (given.work / "results.jsonl").open()])))
    return 0


def make_base(work: Path, steps: int, questions: int) -> None:
    """Train the base model on a table of facts, and write the conversations."""
    from transformers import LlamaConfig

    work.mkdir(parents=True, exist_ok=True)
    write_table(work / "table.jsonl", documents=6_000)
    write_conversations(work / "train.jsonl", work / "test.jsonl", questions=questions)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=256,
        bos_token_id=256,
    )
    shell = work / "config"
    config.save_pretrained(shell)
    write_tokenizer(shell)
    started_s = time.time()
    diloco(
        f"train --model hf:{shell} --data {work / 'table.jsonl'} --algorithm none --replicas 1 --steps {steps} "
        "--inner.schedule wsd "
        f"--train.sequence-length {LENGTH} --train.batch-size 16 --inner.learning-rate 3e-3 --data-parallel-steps 0 "
        f"--evaluation.every-steps 200 --evaluation.sample-tokens 0 --train.device cpu --out {work / 'base-run'}"
    )
    diloco(f"export {work / 'base-run'} {work / 'base'} --overwrite")
    write_tokenizer(work / "base")
    print(f"base model: {time.time() - started_s:.0f} s")


def runs(seeds: int) -> Iterator[tuple[str, int, int]]:
    """Method, replicas and seed of every run."""
    for seed in range(seeds):
        yield "base", 0, seed
        yield "synchronous", 1, seed
        for replicas in (2, 4):
            for method in METHODS:
                if method != "synchronous":
                    yield method, replicas, seed


def run_one(work: Path, method: str, replicas: int, seed: int) -> None:
    """Train and evaluate, unless the result is there."""
    results = work / "results.jsonl"
    done = [json.loads(line) for line in results.open()] if results.exists() else []
    if any((each["method"], each["replicas"], each["seed"]) == (method, replicas, seed) for each in done):
        return
    place, started_s = work / "run", time.time()
    shutil.rmtree(place, ignore_errors=True)
    summary: dict[str, Any] = {}
    if method != "base":
        # the same number of sequences in every step, whatever the number of replicas
        diloco(
            f"finetune {work / 'base'} --data {work / 'train.jsonl'} --out {place} --seed {seed} --replicas {replicas} "
            f"--train.batch-size {SEQUENCES // replicas} {COMMON} {METHODS[method]}"
        )
        summary = json.loads((place / "summary.json").read_text())
    train_s = time.time() - started_s
    told = json.loads(
        diloco(
            f"evaluate {place if summary else work / 'base'} --json --answer-tokens 8 --questions {work / 'test.jsonl'}"
            + ("" if summary else f" --sequence-length {LENGTH}")
        )
    )
    record = {
        "method": method,
        "replicas": replicas,
        "seed": seed,
        "loss": told["heldout_loss"],
        "accuracy": told["accuracy"],
        "questions": told["questions"],
        "sent_bytes": summary.get("sent_bytes_per_replica", 0),
        "rounds": summary.get("rounds_committed", 0),
        "compute_utilization": summary.get("compute_utilization"),
        "train_s": round(train_s, 1),
    }
    with results.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps(record), flush=True)


def diloco(words: str) -> str:
    """What a command prints; it must succeed."""
    import subprocess

    done = subprocess.run([sys.executable, "-m", "diloco", *words.split()], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"diloco {words}\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return done.stdout


def table(records: list[dict[str, Any]]) -> Iterator[str]:
    """Rows of Markdown: means over seeds."""
    keys = list(dict.fromkeys((each["replicas"], each["method"]) for each in records))
    reference = mean(each["loss"] for each in records if each["method"] == "synchronous")
    yield "| replicas | method | seeds | loss on answers | to synchronous | right answers | sent per replica | CU |"
    yield "|---|---|---|---|---|---|---|---|"
    for replicas, method in sorted(keys, key=lambda key: key[0]):
        of = [each for each in records if (each["replicas"], each["method"]) == (replicas, method)]
        loss, right = mean(each["loss"] for each in of), mean(each["accuracy"] for each in of)
        to = "" if method in ("base", "synchronous") else f"{loss / reference - 1:+.2%}"
        busy = of[0]["compute_utilization"]
        cu = f"{busy:.1%}" if busy is not None and method not in ("base", "synchronous") else ""
        sent = (
            f"{mean(each['sent_bytes'] for each in of) / 1e6:.2f} MB" if method not in ("base", "synchronous") else ""
        )
        yield f"| {replicas or ''} | {method} | {len(of)} | {loss:.4f} | {to} | {right:.1%} | {sent} | {cu} |"


if __name__ == "__main__":
    sys.exit(main())
