"""``python -m benchmarks.lm_eval``: train, export, and evaluate the export with lm-eval and with `diloco evaluate`.

lm-eval runs as a separate program, which may be installed in another environment: see ``--lm-eval PATH``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.lm_eval.texts import write_texts
from diloco.cli import main as diloco
from diloco.config import Configuration, build, read_toml
from diloco.trained import Trained, load_trained

HERE = Path(__file__).parent
RECIPE = "--replicas 2 --data-parallel-steps 0 --data.tokenizer bpe --data.bpe-vocab-size 1024 --monitor.console quiet"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lm_eval", description=__doc__)
    parser.add_argument("--lm-eval", default="lm_eval", help="the lm_eval program, in any environment")
    parser.add_argument("--steps", type=int, default=200, help="number of training steps")
    parser.add_argument("--work", type=Path, default=Path("runs/lm-eval"), help="folder of the run, deleted first")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    given = parser.parse_args(arguments)
    work: Path = given.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    run, exported = work / "run", work / "exported"
    run_diloco("train", *RECIPE.split(), "--steps", str(given.steps), "--out", str(run))
    run_diloco("export", str(run), "--to", "hf", str(exported))
    write_texts(work, build(Configuration, read_toml(run / "config.toml", Configuration)).data)
    for task in HERE.glob("*.yaml"):
        shutil.copy(task, work)
    documents = str(work / "documents.jsonl")
    ours = json.loads(run_diloco("evaluate", str(run), "--data", documents, "--by-document", "--json"))
    theirs, samples = harness(given.lm_eval, work, exported)
    results = {
        "versions": {name: metadata.version(name) for name in ("diloco", "torch", "transformers")} | theirs["versions"],
        "training": {"steps": given.steps, "flags": RECIPE},
        "documents": {
            "count": ours["documents"],
            "bytes": ours["bytes"],
            "tokens": ours["tokens"],
            "diloco": {"bits_per_byte": ours["bits_per_byte"], "byte_perplexity": 2 ** ours["bits_per_byte"]},
            "lm_eval": theirs["documents"],
        },
        "lines": compare_lines(load_trained(run), samples) | {"lm_eval": theirs["lines"]},
    }
    given.out.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


def run_diloco(*arguments: str) -> str:
    """Run ``diloco`` with ``arguments`` and return what it prints; exit if it fails."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        code = diloco(arguments)
    if code:
        raise SystemExit(f"diloco {' '.join(arguments)} ended with {code}")
    return shown.getvalue()


def harness(program: str, work: Path, exported: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the figures by task, and each question of diloco_lines with the log-likelihoods of its choices."""
    command = [
        program, "run", "--model", "hf", "--model_args", f"pretrained={exported}", "--device", "cpu",
        "--batch_size", "8", "--include_path", str(work), "--tasks", "diloco_documents,diloco_lines",
        "--output_path", str(work / "lm_eval"), "--log_samples",
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    subprocess.run(command, cwd=work, env=os.environ | offline, check=True)
    (summary,) = (work / "lm_eval").rglob("results_*.json")
    (answers,) = (work / "lm_eval").rglob("samples_diloco_lines_*.jsonl")
    found = json.loads(summary.read_text())
    figures = {
        task.removeprefix("diloco_"): {
            name.removesuffix(",none"): value for name, value in values.items() if isinstance(value, float)
        }
        for task, values in found["results"].items()
    }
    return figures | {"versions": {"lm_eval": found.get("lm_eval_version", "")}}, [
        json.loads(line) for line in answers.read_text().splitlines()
    ]


def compare_lines(trained: Trained, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the native model's log-likelihoods of all choices with the harness's."""
    largest, right = 0.0, 0
    for sample in samples:
        question = sample["doc"]
        ours = [log_likelihood(trained, question["context"], choice) for choice in question["choices"]]
        theirs = [float(response[0][0]) for response in sample["resps"]]
        largest = max(largest, *(abs(a - b) for a, b in zip(ours, theirs, strict=True)))
        right += ours.index(max(ours)) == question["answer"]
    return {
        "questions": len(samples),
        "diloco": {"acc": right / len(samples)},
        "largest_difference_nats": largest,
    }


def log_likelihood(trained: Trained, context: str, continuation: str) -> float:
    """Return the log-likelihood in nats of ``continuation`` after ``context``, cut to the training sequence length."""
    stripped = context.rstrip()
    context, continuation = stripped, context[len(stripped) :] + continuation
    tokens = trained.tokenizer.encode(context + continuation)
    begin = len(trained.tokenizer.encode(context))
    seen = tokens[-(trained.sequence_length + 1) :]
    counted = min(len(tokens) - begin, len(seen) - 1)
    with torch.no_grad():
        chances = trained.model(torch.tensor([seen[:-1]]))[0].log_softmax(1)
    targets = torch.tensor(seen[1:])
    return float(chances.gather(1, targets[:, None])[-counted:].sum())


if __name__ == "__main__":
    main()
