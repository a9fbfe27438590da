"""``python -m benchmarks.own_data GROUP --wheels FOLDER``: train four replicas, each with its own text.

It trains like `benchmarks.parity.stacked`. A row of ``rows.jsonl`` is one run: the settings that differ from `SiteRun`
and its losses on what is held out of each of the four kinds of text. ``global`` has one list, of the global parameters,
or one for each site if some parameters stay at home. ``local`` has those of each site's own parameters after its last
step.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.markdown import table
from benchmarks.own_data.runs import GROUPS, SiteRun
from benchmarks.own_data.text import SITES, Texts, share, texts
from benchmarks.parity.stacked import LENGTH, Outer, Stack, Tensors, flat, like, losses, parts
from diloco.algorithm import Codec, FragmentLayout
from diloco.data import PackedTokens, Sampler, heldout_batches

HERE = Path(__file__).parent
HELDOUT = 256  # sequences of each kind
RESULTS = ("global", "local", "training_loss", "sent_bytes", "wall_s", "cpu_s", "date")


class Sites(Outer):
    """The outer loop of one run, some of whose parameters may stay with each site."""

    def __init__(self, stack: Stack, run: SiteRun) -> None:
        self.run = run
        super().__init__(stack)
        self.drifts: dict[int, Tensor] = {}  # what the last mean moved more than a replica, for each fragment

    @property
    def at_home(self) -> list[str]:
        synchronised = {name for layout in self.layouts for name in layout.names}
        return [name for name in self.stack.tensors if name not in synchronised]

    def fragments(self, number: int) -> tuple[FragmentLayout, ...]:
        result = []
        for layout in super().fragments(number):
            kept = [
                (name, shape)
                for name, shape in zip(layout.names, layout.shapes, strict=True)
                if not self.run.at_home or self.run.at_home not in name
            ]
            names, shapes = zip(*kept, strict=True)
            result.append(FragmentLayout(layout.index, names, shapes))
        return tuple(result)

    def pull(self) -> None:
        """Move each replica as its proximal term and its correction have it, after an inner step."""
        run, rate = self.run, self.stack.rates[self.stack.step - 1]
        for p, values in enumerate(self.globals):
            if run.proximal:
                for tensor, part in parts(self.tensors(p), self.by_replica(values)):
                    tensor.sub_((tensor - part) * like(rate * run.proximal, tensor))
            if p in self.drifts:
                for tensor, part in parts(self.tensors(p), self.drifts[p]):
                    tensor.sub_(part, alpha=run.correction / run.inner_steps)

    def send(self, p: int, codec: Codec, feedback: float) -> None:
        own = self.by_replica(self.globals[p]) - flat(self.tensors(p))
        super().send(p, codec, feedback)
        if self.run.correction:
            own -= self.run.correction * self.drifts.get(p, torch.zeros_like(own))
            self.drifts[p] = self.by_replica(self.mean(own)) - own

    def join(self, initial: Tensors) -> None:
        """Put a new replica in the place of the last one: it has the global parameters, and no state of its own."""
        self.to_global(self.stack.tensors, slice(-1, None))
        for p, (sent, *_) in self.flights.items():
            sent[-1] = self.globals[p][-1]
        for name in self.at_home:
            tensor = self.stack.tensors[name].detach()
            tensor[-1] = tensor[0] if self.run.joins_with == "donor" else initial[name]
        for state in self.stack.state.values():
            for values in state.values():
                values[-1] = 0.0

    def with_global(self) -> Tensors:
        """Return the parameters of each site with the global ones in place of its own."""
        tensors = local(self.stack)
        self.to_global(tensors)
        return tensors

    def to_global(self, tensors: Tensors, copies: slice = slice(None)) -> None:
        """Set what is synchronised of some copies to the global values."""
        for layout, values in zip(self.layouts, self.globals, strict=True):
            for tensor, part in parts([tensors[name].detach() for name in layout.names], self.by_replica(values)):
                tensor[copies] = part[copies]


def local(stack: Stack) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in stack.tensors.items()}


def batches(text: Texts, run: SiteRun) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tokens and targets of all sites, each ``(C, batch, sequence)``."""
    drawing: dict[str, Any] = {"sequence_length": LENGTH, "batch_size": run.sequences // SITES, "seed": run.seed}
    if run.pooled:
        samplers = [Sampler(text.pooled, replica=m, num_replicas=SITES, **drawing) for m in range(SITES)]
    else:
        samplers = [Sampler(own, replica=0, num_replicas=1, **drawing) for own in text.sites]
    while True:
        drawn = [sampler.next_batch() for sampler in samplers]
        yield torch.stack([tokens for tokens, _ in drawn]), torch.stack([targets for _, targets in drawn])


def heldout(stack: Stack, tensors: Tensors, kinds: Sequence[PackedTokens]) -> list[list[float]]:
    """Return the loss of each copy of the parameters on what is held out of each kind."""
    copies = len(next(iter(tensors.values())))
    result = []
    with torch.no_grad():
        for tokens in kinds:
            total = torch.zeros(copies)
            for inputs, targets in heldout_batches(tokens, LENGTH, 16, HELDOUT):
                tokens_of_all, targets_of_all = (each.expand(copies, -1, -1) for each in (inputs, targets))
                total += losses(stack.model, tensors, tokens_of_all, targets_of_all, stack.cosine, stack.sine)
            result.append(total / (HELDOUT // 16))
    return [[round(loss, 5) for loss in each] for each in torch.stack(result, 1).tolist()]


def train(run: SiteRun, text: Texts, prepare: Callable[[Sites], None] = lambda sites: None) -> dict[str, Any]:
    """Train one run and return its row. ``prepare`` may change the outer loop before it begins."""
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    stack, sites = Stack([run], "cpu"), None
    steps, initial = run.steps - run.start, {name: each[0] for name, each in local(stack).items()}
    recent: list[Tensor] = []
    for step, (tokens, targets) in zip(range(-run.start, steps), batches(text, run), strict=False):
        if step == 0 and run.algorithm == "streaming":
            sites = Sites(stack, run)
            prepare(sites)
        if sites is not None and run.joins_at and step == run.joins_at:
            sites.join(initial)
        recent = [*recent[-49:], stack.train(tokens, targets)]
        if sites is not None and run.joins_at and run.joins_at <= step < run.joins_at + run.warmup_at_home:
            sites.to_global(stack.tensors, slice(-1, None))
        if sites is not None and step < steps - run.steps_at_home:
            sites.pull()
            sites.step(step + 1)
            if step + 1 == steps - run.steps_at_home:
                for p in list(sites.flights):
                    sites.merge(p, 0.0)
    row: dict[str, Any] = run.changes() | {"local": heldout(stack, local(stack), text.heldout)}
    if run.algorithm != "alone":
        merged = sites.with_global() if sites is not None else local(stack)
        copies = SITES if run.at_home else 1
        row["global"] = heldout(stack, {name: tensor[:copies] for name, tensor in merged.items()}, text.heldout)
    if sites is not None:
        row["sent_bytes"] = int(sites.sent_bytes[0])
    row |= {"training_loss": round(torch.stack(recent).mean().item(), 5), "date": time.strftime("%Y-%m-%d")}
    return row | {
        "wall_s": round(time.perf_counter() - wall_s, 1),
        "cpu_s": round(time.process_time() - cpu_s, 1),
    }


def of_sites(row: dict[str, Any], model: str) -> float:
    """Return the mean over sites of the loss on text such as their own, of ``global`` or ``local`` parameters."""
    difference = row.get("difference", 1.0)
    kinds = row[model] if len(row[model]) == SITES else row[model] * SITES
    return fmean(
        sum(share(site, kind, difference) * loss for kind, loss in enumerate(kinds[site])) for site in range(SITES)
    )


def settings(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in RESULTS}


def lines(rows: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield the cells of the table, one line for all seeds of the same settings."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        shown = ", ".join(f"{name} {value}" for name, value in settings(row).items() if name != "seed")
        groups.setdefault(shown or "(the defaults)", []).append(row)
    for shown, some in groups.items():
        cells = [shown, ", ".join(str(row.get("seed", 0)) for row in some)]
        for model in ("global", "local"):
            means = [of_sites(row, model) for row in some if model in row]
            cells += [", ".join(f"{each:.4f}" for each in means), f"{fmean(means):.4f}" if means else ""]
        everywhere = [fmean(map(fmean, row["local"])) for row in some]
        yield [*cells, f"{fmean(everywhere):.4f}"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.own_data", description=__doc__)
    parser.add_argument("group", nargs="*", help="names of groups of GROUPS; default: all of them, in order")
    parser.add_argument("--wheels", type=Path, help="the folder into which the wheels were downloaded")
    parser.add_argument("--rows", type=Path, default=HERE / "rows.jsonl", help="the file of the rows")
    parser.add_argument("--table", action="store_true", help="print a table of the rows, and run nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = list(map(json.loads, given.rows.read_text("utf-8").splitlines())) if given.rows.exists() else []
    if given.table:
        head = [
            "settings",
            "seeds",
            "global: loss of the sites",
            "mean",
            "local: loss of the sites",
            "mean",
            "all kinds",
        ]
        print(table(head, lines(rows)))
        return
    if given.wheels is None:
        parser.error("--wheels FOLDER is needed, with the files of `pip download --no-deps -r .../wheels.txt`")
    known, read = list(map(settings, rows)), cache(texts)
    for run in dict.fromkeys(run for group in given.group or GROUPS for run in GROUPS[group]):
        if run.changes() not in known:
            row = train(run, read(given.wheels, run.texts, run.difference))
            with given.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
