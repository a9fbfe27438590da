"""``python -m benchmarks.outer``: small runs from scratch that differ only in the outer step. Finished runs are kept.

Four replicas of a small decoder learn the bytes of Python's standard library: H = 12, 240 steps, AdamW with a cosine.
`Rival` implements two alternatives that `DiLoCo` does not offer, because their global parameters differ between
replicas or are out of date: eager updates (2502.12996) and delayed outer steps.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco import DiLoCo, InProcessTransport, Nesterov, OuterState, RebaseMerge, SendersMean, SyncSchedule
from diloco.model import ModelSettings, Transformer, build_model

HERE = Path(__file__).parent
REPLICAS, INNER_STEPS, STEPS, BATCH, LENGTH = 4, 12, 240, 8, 32
PEAK, WARMUP = 3e-3, 20
MODEL = ModelSettings(layers=2, width=64, ffn_width=192, heads=4, vocab_size=256, max_sequence_length=LENGTH)
OUTERS = {".4/.9": (0.4, 0.9), ".7/.6": (0.7, 0.6), "1/0": (1.0, 0.0), ".5/0": (0.5, 0.0)}
MAIN = (".4/.9", ".7/.6", "1/0")


@dataclass(frozen=True, kw_only=True)
class Restarting(Nesterov):
    """Nesterov that resets its momentum to zero: when it points away from the mean, or every ``every`` outer steps."""

    every: int | None = None

    def update(self, mean: Tensor, state: OuterState, values: Tensor) -> None:
        momentum = state.slots["momentum"]
        due = float(momentum.dot(mean)) < 0 if self.every is None else state.step % self.every == 0
        if due:
            momentum.zero_()
        super().update(mean, state, values)


@dataclass(frozen=True)
class Variant:
    """One cell of the table: the name of its row, its outer settings, and what differs."""

    name: str
    outer: str
    arguments: dict[str, Any] = field(default_factory=dict)
    rival: str = ""
    restart: dict[str, Any] | None = None

    @property
    def key(self) -> str:
        return f"{self.name}, {self.outer}"


SPARSE = {"codec": "topk2", "error_feedback": 0.95}
LATE = {"schedule": SyncSchedule(inner_steps=INNER_STEPS, overlap_steps=INNER_STEPS), "merge": RebaseMerge()}
VARIANTS = [
    *(Variant("not late", outer) for outer in MAIN),
    *(Variant("a round late, rebase", outer, LATE) for outer in MAIN),
    *(Variant("a round late, eager", outer, rival="eager") for outer in MAIN),
    *(Variant("a round late, delayed", outer, rival="delayed") for outer in (".7/.6", "1/0")),
    Variant("fp4", "1/0", {"codec": "fp4"}),
    *(Variant("topk2, mean over all", outer, SPARSE) for outer in (".7/.6", "1/0")),
    *(Variant("topk2, mean over senders", outer, SPARSE | {"average": SendersMean()}) for outer in ("1/0", ".5/0")),
    Variant("momentum restarts against the mean", ".4/.9", restart={}),
    Variant("momentum restarts every 5 rounds", ".4/.9", restart={"every": 5}),
]


def text() -> Tensor:
    """Return the bytes of the modules of the standard library, in the order of their names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def batch(data: Tensor, seed: int, replica: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1_000_003 * seed + 1009 * step + replica)
    starts = torch.randint(0, len(data) - LENGTH - 1, (BATCH,), generator=generator)
    return torch.stack([data[start : start + LENGTH + 1] for start in starts.tolist()])


def rate(step: int) -> float:
    """Return the inner learning rate: linear warm-up, then a cosine to a tenth."""
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    return PEAK * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))))


def flat(model: Transformer) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


class Rival:
    """Eager or delayed outer steps, a whole round late, for all replicas at once; payloads are exact float32."""

    def __init__(self, models: Sequence[Transformer], outer: Nesterov, kind: str) -> None:
        self.models, self.outer, self.kind, self.steps = models, outer, kind, 0
        self.thetas = [flat(model) for model in models]
        self.states = [outer.init(theta) for theta in self.thetas]
        self.last: list[Tensor] = []

    def step(self) -> None:
        self.steps += 1
        if self.steps % INNER_STEPS:
            return
        deltas = [theta - flat(model) for theta, model in zip(self.thetas, self.models, strict=True)]
        known = torch.stack(self.last).mean(0) if self.last else None
        for m, (model, theta) in enumerate(zip(self.models, self.thetas, strict=True)):
            if self.kind == "eager":  # the last mean, with this replica's own part taken from the current round
                given = deltas[m] if known is None else known + (deltas[m] - self.last[m]) / len(deltas)
            else:
                given = torch.zeros_like(theta) if known is None else known
            self.outer.update(given, self.states[m], theta)
            torch.nn.utils.vector_to_parameters(theta.clone(), model.parameters())
        self.last = deltas

    def parameters(self) -> Tensor:
        return torch.stack(self.thetas).mean(0)


def train(variant: Variant, seed: int, data: Tensor) -> float:
    """Train one variant and return the held-out loss of its global parameters, in nats per byte."""
    heldout, data = data[:65536], data[65536:]
    models = [build_model(MODEL, seed=seed, device="cpu") for _ in range(REPLICAS)]
    inner = [torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1) for model in models]
    learning_rate, momentum = OUTERS[variant.outer]
    outer = Nesterov(learning_rate=learning_rate, momentum=momentum)
    if variant.restart is not None:
        outer = Restarting(learning_rate=learning_rate, momentum=momentum, **variant.restart)
    step_all, take_global = _synchronised(variant, models, inner, outer)
    for step in range(STEPS):
        for replica, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            tokens = batch(data, seed, replica, step)
            loss, _ = model.loss(tokens[:, :-1], tokens[:, 1:])
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        step_all()
    take_global()
    rows = heldout[: len(heldout) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    with torch.no_grad():
        return float(models[0].loss(rows[:, :-1], rows[:, 1:])[0])


def _synchronised(
    variant: Variant, models: list[Transformer], inner: list[torch.optim.AdamW], outer: Nesterov
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a function to call after each step, and one that copies the global parameters to the first model."""
    if variant.rival:
        rival = Rival(models, outer, variant.rival)
        return rival.step, lambda: torch.nn.utils.vector_to_parameters(rival.parameters(), models[0].parameters())
    transport = InProcessTransport(REPLICAS)
    arguments = {"schedule": SyncSchedule(inner_steps=INNER_STEPS), **variant.arguments}
    replicas = [
        DiLoCo(model, optimizer, transport=transport.endpoint(m), outer_optimizer=outer, **arguments)
        for m, (model, optimizer) in enumerate(zip(models, inner, strict=True))
    ]

    def step_all() -> None:
        for diloco in replicas:
            diloco.begin()
        for diloco in replicas:
            diloco.finish()

    def take_global() -> None:
        for diloco in replicas:
            diloco.drain()
        with torch.no_grad():
            for name, values in replicas[0].outer_loop.named_global_params().items():
                models[0].get_parameter(name).copy_(values)

    return step_all, take_global


def table(results: dict[str, list[float]]) -> str:
    """Return a Markdown table: a row per name, a column per outer setting, the mean and half range over seeds."""
    names = list(dict.fromkeys(variant.name for variant in VARIANTS))
    lines = [f"| held-out loss | {' | '.join(OUTERS)} |", "|---|" + "---|" * len(OUTERS)]
    for name in names:
        cells = []
        for outer in OUTERS:
            losses = results.get(f"{name}, {outer}", [])
            spread = f" ± {(max(losses) - min(losses)) / 2:.3f}" if len(losses) > 1 else ""
            cells.append(f"{statistics.mean(losses):.4f}{spread}" if losses else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outer", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="run only variants whose name contains this")
    parser.add_argument("--results", type=Path, default=HERE / "results.json")
    given = parser.parse_args(arguments)
    results: dict[str, list[float]] = json.loads(given.results.read_text()) if given.results.exists() else {}
    data = text()
    for seed in range(given.seeds):
        for variant in VARIANTS:
            losses = results.setdefault(variant.key, [])
            if given.only in variant.key and len(losses) == seed:
                began_s = time.perf_counter()
                losses.append(round(train(variant, seed, data), 5))
                print(
                    f"{variant.key}, seed {seed}: {losses[-1]:.4f} ({time.perf_counter() - began_s:.0f} s)", flush=True
                )
                given.results.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
