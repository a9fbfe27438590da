"""Fine-tuning on a machine without a GPU: a base model of our own, then adapters on 1, 2 and 4 replicas.

python -m benchmarks.finetune base WORK          the base model, some minutes
python -m benchmarks.finetune runs WORK          every run that WORK/results.jsonl lacks
python -m benchmarks.finetune table WORK         the table of the README
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.finetune.task import KNOWN, WANTED, known_codes, texts, write_conversations, write_tokenizer

LAYERS, WIDTH = 6, 256
STEPS, WINDOW, SEQUENCES, LENGTH = 100, 10, 8, 39
STEP_S = 0.5
BASE_LENGTH = 72
COMMON = f"""--train.sequence-length {LENGTH} --steps {STEPS} --lora.rank 8 --inner.learning-rate 2e-3
 --evaluation.every-steps 0 --evaluation.sequences 0 --checkpoint.every-steps 0 --train.device cpu
 --monitor.console quiet --inner.warmup-steps 10 --train.threads 1"""
LINKS = f"--transport.bandwidth-bits-per-s 100e6 --transport.latency-s 0.1 --transport.step-time-s {STEP_S}"
NESTEROV = "--outer.name nesterov --outer.learning-rate 0.7 --outer.momentum"
METHODS = {
    "synchronous": "--algorithm data-parallel",
    "no momentum, lr 1": f"--inner-steps {WINDOW} {LINKS}",
    "stock Nesterov .7/.9": f"--inner-steps {WINDOW} {NESTEROV} 0.9 {LINKS}",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("base", "runs", "table"))
    parser.add_argument("work", type=Path)
    parser.add_argument("--base-steps", type=int, default=1100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--questions", type=int, default=100)
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
    """Train the base model on sentences with names and codes, and write the conversations."""
    from transformers import LlamaConfig

    work.mkdir(parents=True, exist_ok=True)
    learned = texts(30_000)
    with (work / "text.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in learned)
    asked, trained = known_codes()[:questions], known_codes()[questions:]
    write_conversations(work / "train.jsonl", trained, WANTED)
    write_conversations(work / "test.jsonl", asked, WANTED)
    write_conversations(work / "known.jsonl", asked, KNOWN)
    shell = work / "config"
    config = LlamaConfig(
        vocab_size=write_tokenizer(shell, learned),
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=0,
    )
    config.save_pretrained(shell)
    diloco(
        f"train --model hf:{shell} --data {work / 'text.jsonl'} --algorithm none --replicas 1 --steps {steps} "
        f"--inner.schedule wsd --train.sequence-length {BASE_LENGTH} --train.batch-size 8 --inner.learning-rate 2e-3 "
        "--data-parallel-steps 0 --evaluation.every-steps 200 --evaluation.sequences 32 --checkpoint.every-steps 200 "
        f"--evaluation.sample-tokens 0 --train.device cpu --train.threads 1 --out {work / 'base-run'}"
    )
    diloco(f"export {work / 'base-run'} {work / 'base'} --overwrite")
    write_tokenizer(work / "base", learned)


def runs(seeds: int) -> Iterator[tuple[str, int, int]]:
    """Method, replicas and seed of every run."""
    yield "base, asked as it was taught", 0, 0
    yield "base", 0, 0
    for method in METHODS:
        for replicas in (1,) if method == "synchronous" else (2, 4):
            for seed in range(seeds):
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
    asked, model = f"--questions {work / 'test.jsonl'} --answer-tokens 8", f"{place}"
    if method in METHODS:
        # the same number of sequences in every step, whatever the number of replicas
        diloco(
            f"finetune {work / 'base'} --data {work / 'train.jsonl'} --out {place} --seed {seed} --replicas {replicas} "
            f"--train.batch-size {SEQUENCES // replicas} {COMMON} {METHODS[method]}"
        )
        summary = json.loads((place / "summary.json").read_text())
    else:
        model = f"{work / 'base'} --sequence-length {LENGTH}"
        if method != "base":
            asked = f"--questions {work / 'known.jsonl'} --answer-tokens 1"
    train_s = time.time() - started_s
    told = json.loads(diloco(f"evaluate {model} --json {asked}"))
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
    from diloco.cli import main as command

    with redirect_stdout(io.StringIO()) as printed:
        if code := command(words.split()):
            raise SystemExit(f"diloco {words}\n{printed.getvalue()[-2000:]}\nended with {code}")
    return printed.getvalue()


def table(records: list[dict[str, Any]]) -> Iterator[str]:
    """Rows of Markdown: means over seeds, and how far apart the seeds are."""
    keys = list(dict.fromkeys((each["replicas"], each["method"]) for each in records))
    alone = [each for each in records if each["method"] == "synchronous"]
    columns = "replicas | method | seeds | loss on answers | to synchronous | right | points | sent | CU | minutes"
    yield f"| {columns} |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for replicas, method in sorted(keys, key=lambda key: key[0]):
        of = [each for each in records if (each["replicas"], each["method"]) == (replicas, method)]
        losses, right = [each["loss"] for each in of], mean(each["accuracy"] for each in of)
        loss = f"{mean(losses):.4f}" + (f" ({min(losses):.4f} to {max(losses):.4f})" if len(of) > 1 else "")
        row = [str(replicas or ""), method, str(len(of)), loss]
        if replicas > 1:
            utilization = mean(each["compute_utilization"] for each in of)
            row += [
                f"{mean(losses) / mean(each['loss'] for each in alone) - 1:+.1%}",
                f"{right:.1%}",
                f"{100 * (right - mean(each['accuracy'] for each in alone)):+.1f}",
                f"{mean(each['sent_bytes'] for each in of) / 1e6:.2f} MB",
                f"{utilization:.1%}",
                f"{STEPS * STEP_S / utilization / 60:.2f}",
            ]
        else:
            row += ["", f"{right:.1%}", "", "", "", ""]
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    sys.exit(main())
