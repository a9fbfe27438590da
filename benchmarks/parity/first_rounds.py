"""``python -m benchmarks.parity.first_rounds``: does an earlier first round of each fragment learn better?

The package first sends fragment p after step ``H + t_p``, as the paper's example does. torchft first sends it after
step ``(p + 1) H / P``, so that the first windows are shorter than H. Both are trained here by
`benchmarks.parity.stacked`, and the global parameters are evaluated as they go. A row of ``first_rounds.jsonl`` is one
run. ``--table`` prints the table of the page.
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.markdown import table
from benchmarks.parity.losses import gap
from benchmarks.parity.stacked import Outer, Stack, batches, heldout
from benchmarks.parity.stacked_runs import ADAMW, SEEDS, Run
from diloco.data import Corpus, DataSettings, build_corpus

ROWS = Path(__file__).with_name("first_rounds.jsonl")
TRAINED = 300  # steps after the shared start
EVALUATED = (45, 60, 90, 120, 180, 300)  # after these steps
VARIANTS: tuple[dict[str, Any], ...] = ({"start": 0}, {"start": 130}, {"start": 0, **ADAMW}, {"start": 130, **ADAMW})


def train(run: Run, corpus: Corpus, early: bool) -> dict[str, float]:
    """Train one run, and return the held-out loss of its global parameters after each of the steps `EVALUATED`."""
    stack = Stack([run], "cpu")
    drawn = batches(corpus, [run], "cpu")
    for _ in range(run.start):
        stack.train(*next(drawn))
    outer = Outer(stack)
    fragments = len(outer.globals)
    skipped = run.inner_steps - run.inner_steps // fragments if early else 0
    losses: dict[str, float] = {}
    for step in range(1, TRAINED + 1):
        stack.train(*next(drawn))
        outer.step(step + skipped)
        if step in EVALUATED:
            losses[str(step)] = round(heldout(stack, [outer.parameters()], corpus)[0], 5)
    return losses


def lines(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the cells of the table: for each variant, the change of the loss by an earlier start, for each seed."""
    pairs: dict[tuple[str, int, int], dict[tuple[int, bool], dict[str, float]]] = defaultdict(dict)
    for row in rows:
        key = row["optimizer"], row["inner_steps"], row["start"]
        pairs[key][row["seed"], row["early"]] = row["heldout_loss"]
    result = []
    for (optimizer, inner_steps, start), losses in pairs.items():
        seeds = sorted({seed for seed, _ in losses})
        cells = [f"{optimizer}, H {inner_steps}, shared start of {start} steps"]
        for step in map(str, EVALUATED):
            cells.append(", ".join(gap(losses[seed, True][step] / losses[seed, False][step]) for seed in seeds))
        result.append(cells)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity.first_rounds", description=__doc__)
    parser.add_argument("--table", action="store_true", help="print a table of the rows, and run nothing")
    given = parser.parse_args()
    rows = list(map(json.loads, ROWS.read_text("utf-8").splitlines())) if ROWS.exists() else []
    if given.table:
        print(table(["", *(f"step {step}" for step in EVALUATED)], lines(rows)))
        return
    torch.set_num_threads(1)
    corpus = build_corpus(DataSettings())
    known = [(row["optimizer"], row["inner_steps"], row["start"], row["seed"], row["early"]) for row in rows]
    for variant in VARIANTS:
        for seed, early in ((seed, early) for seed in SEEDS for early in (False, True)):
            run = Run(**{"seed": seed, "inner_steps": 30, "steps": TRAINED + variant["start"], **variant})
            facts = {"optimizer": run.optimizer, "inner_steps": run.inner_steps, "start": run.start}
            facts |= {"seed": seed, "early": early}
            if tuple(facts.values()) in known:
                continue
            row = {**facts, "heldout_loss": train(run, corpus, early), "date": time.strftime("%Y-%m-%d")}
            with ROWS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
