"""Fine-tuning without a GPU: train a small base model, then adapters on 1, 2 and 4 replicas.

python -m benchmarks.finetune base WORK          train the base model (some minutes)
python -m benchmarks.finetune runs WORK          do the runs that are missing in WORK/results.jsonl
python -m benchmarks.finetune table WORK         print the table of the README
"""

import argparse
import io
import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.finetune.task import KNOWN, WANTED, known_codes, texts, write_conversations, write_tokenizer
from diloco.data import DataSettings, heldout_data
from diloco.trained import Sampling, evaluate, generate, load_trained

LAYERS, WIDTH = 6, 256
SEQUENCES, LENGTH = 8, 39
STEP_S = 0.5
QUESTIONS = 100  # names that are held out for them
BASE_LENGTH = 72
COMMON = f"""--sequence-length {LENGTH} --lora-rank 8 --evaluation.every-steps 0 --evaluation.sequences 0
 --checkpoint.every-steps 0 --device cpu --monitor.console quiet --optimizer.warmup-steps 10"""
LINKS = "--emulate.bandwidth 100Mbit --emulate.latency 100ms --emulate.step-time 500ms"
SGD = "--sync.outer sgd --outer-learning-rate"
NESTEROV = "--sync.outer nesterov --outer-learning-rate 0.7 --outer-momentum"


@dataclass(frozen=True)
class Method:
    """How a run is trained."""

    name: str
    flags: str  # of `diloco finetune`
    steps: int = 200
    rate: float = 4e-3  # inner learning rate
    replicas: tuple[int, ...] = (2, 4)
    seeds: int = 3


SYNCHRONOUS = Method("synchronous", "--algorithm data-parallel", replicas=(1,))
PLAIN = Method("no momentum, lr 1", f"--inner-steps 10 {LINKS}")
STOCK = Method("stock Nesterov .7/.9", f"--inner-steps 10 {NESTEROV} 0.9 {LINKS}")
FOUR, GAINS = replace(PLAIN, replicas=(4,)), (0.28, 0.7, 1.4)
METHODS = (
    SYNCHRONOUS,
    PLAIN,
    STOCK,
    # half the steps at half the rate
    *(replace(each, steps=100, rate=2e-3) for each in (SYNCHRONOUS, PLAIN, STOCK)),
    *(replace(SYNCHRONOUS, rate=rate, seeds=1) for rate in (2e-3, 8e-3)),
    replace(PLAIN, rate=2e-3, replicas=(4,), seeds=1),
    *(replace(FOUR, name=f"no momentum, lr {lr}", flags=f"{SGD} {lr} {FOUR.flags}") for lr in GAINS),
    replace(SYNCHRONOUS, steps=100, seeds=1),
    replace(PLAIN, steps=100, replicas=(4,), seeds=1),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("base", "runs", "table"))
    parser.add_argument("work", type=Path)
    given = parser.parse_args()
    if given.what == "base":
        make_base(given.work)
    elif given.what == "runs":
        for name in ("base, asked as it was taught", "base"):
            run_one(given.work, Method(name, "", steps=0), 0, 0)
        for method in METHODS:
            for replicas in method.replicas:
                for seed in range(method.seeds):
                    run_one(given.work, method, replicas, seed)
    else:
        print("\n".join(table([json.loads(line) for line in (given.work / "results.jsonl").open()])))
    return 0


def make_base(work: Path) -> None:
    """Train the base model on sentences with names and codes, and write the conversations."""
    from transformers import LlamaConfig

    work.mkdir(parents=True, exist_ok=True)
    learned = texts(30_000)
    with (work / "text.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in learned)
    asked, trained = known_codes()[:QUESTIONS], known_codes()[QUESTIONS:]
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
        f"train --model hf:{shell} --data {work / 'text.jsonl'} --algorithm data-parallel --replicas 1 --steps 1100 "
        f"--stop-after 802 --optimizer.schedule wsd --sequence-length {BASE_LENGTH} --batch-size 8 "
        "--learning-rate 2e-3 "
        "--data-parallel-steps 0 --evaluation.every-steps 200 --evaluation.sequences 32 --checkpoint.every-steps 200 "
        f"--evaluation.sample-prompts --device cpu --out {work / 'base-run'}"
    )
    diloco(f"export {work / 'base-run'} --out {work / 'base'} --overwrite")
    write_tokenizer(work / "base", learned)


def run_one(work: Path, method: Method, replicas: int, seed: int) -> None:
    """Train and evaluate one run, unless its result exists."""
    results = work / "results.jsonl"
    done = [json.loads(line) for line in results.open()] if results.exists() else []
    name = {
        "method": method.name,
        "steps": method.steps,
        "rate": method.rate if method.steps else None,
        "replicas": replicas,
        "seed": seed,
    }
    if any(name.items() <= each.items() for each in done):
        return
    place, started_s = work / "run", time.time()
    shutil.rmtree(place, ignore_errors=True)
    summary: dict[str, Any] = {}
    asked, model, tokens = work / "test.jsonl", place, 8
    if method.steps:
        # SEQUENCES per step in total, for any number of replicas
        diloco(
            f"finetune {work / 'base'} --data {work / 'train.jsonl'} --out {place} --seed {seed} --replicas {replicas} "
            f"--batch-size {SEQUENCES // replicas} --steps {method.steps} --learning-rate {method.rate} "
            f"{COMMON} {method.flags}"
        )
        summary = json.loads((place / "summary.json").read_text())
    else:
        model = work / "base"
        if method.name != "base":
            asked, tokens = work / "known.jsonl", 1
    train_s = time.time() - started_s
    loss, accuracy, questions = examined(model, asked, tokens)
    record = name | {
        "loss": loss,
        "accuracy": accuracy,
        "questions": questions,
        "sent_bytes": summary.get("sent_bytes_per_replica", 0),
        "rounds": summary.get("rounds_committed", 0),
        "compute_utilization": summary.get("compute_utilization"),
        "train_s": round(train_s, 1),
    }
    with results.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps(record), flush=True)


def examined(model: Path, file: Path, most_tokens: int) -> tuple[float, float, int]:
    """Return the loss on the answers of conversations, the share that the model gives exactly, and their number."""
    trained = load_trained(model)
    tokenizer = trained.chat_tokenizer()
    settings = DataSettings(format="chat", paths=(str(file),))
    rows = heldout_data(settings, tokenizer, LENGTH, [str(file)])
    loss = evaluate(trained.model, tokenizer, rows, sequence_length=LENGTH, batch_size=32).loss
    right = []
    for line in file.read_text(encoding="utf-8").splitlines():
        *messages, answer = json.loads(line)["messages"]
        tokens = generate(
            trained.model,
            tokenizer.prompt(messages),
            torch.Generator(),
            max_new_tokens=most_tokens,
            sampling=Sampling(temperature=0),
            stop_tokens=[*tokenizer.answer_ends, tokenizer.eos_id],
            window=LENGTH,
        )
        right.append(tokenizer.decode(list(tokens)).strip() == answer["content"].strip())
    return loss, mean(right), len(right)


def diloco(arguments: str) -> str:
    """Run ``diloco`` with ``arguments`` and return what it prints; exit if it fails."""
    from diloco.cli import main as command

    with redirect_stdout(io.StringIO()) as printed:
        if code := command(arguments.split()):
            raise SystemExit(f"diloco {arguments}\n{printed.getvalue()[-2000:]}\nended with {code}")
    return printed.getvalue()


def table(records: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the rows of a Markdown table: means over seeds, with the lowest and the highest loss."""
    columns = ["steps", "replicas", "method", "rate", "seeds", "loss on answers", "vs same rate", "vs best rate"]
    columns += ["correct", "points", "sent", "utilisation", "minutes"]
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    keys = ("steps", "replicas", "method", "rate")
    groups: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for each in records:
        groups.setdefault(tuple(each[key] for key in keys), {})[each["seed"]] = each
    for (steps, replicas, method, rate), runs in sorted(groups.items(), key=lambda group: group[0][:2]):
        losses, correct = [each["loss"] for each in runs.values()], mean(each["accuracy"] for each in runs.values())
        loss = f"{mean(losses):.4f}" + (f" ({min(losses):.4f} to {max(losses):.4f})" if len(runs) > 1 else "")
        row = [str(steps or ""), str(replicas or ""), method, f"{rate:g}" if steps else "", str(len(runs)), loss]
        if replicas > 1:
            # synchronous runs with the same number of steps and these seeds, by learning rate
            alone = {
                key[3]: [one[seed] for seed in runs]
                for key, one in groups.items()
                if key[::2] == (steps, "synchronous") and runs.keys() <= one.keys()
            }
            means = {key: mean(each["loss"] for each in one) for key, one in alone.items()}
            best = min(means, key=lambda key: means[key])
            utilization = mean(each["compute_utilization"] for each in runs.values())
            row += [
                f"{mean(losses) / means[rate] - 1:+.1%}",
                f"{mean(losses) / means[best] - 1:+.1%}",
                f"{correct:.1%}",
                f"{100 * (correct - mean(each['accuracy'] for each in alone[best])):+.1f}",
                f"{mean(each['sent_bytes'] for each in runs.values()) / 1e6:.2f} MB",
                f"{utilization:.1%}",
                f"{steps * STEP_S / utilization / 60:.2f}",
            ]
        else:
            row += ["", "", f"{correct:.1%}", "", "", "", ""]
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    sys.exit(main())
