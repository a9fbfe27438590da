"""``python -m benchmarks.parity.stacked GROUP``: train the four replicas of a run as one model of stacked tensors.

The studies at 0.13M parameters ask for hundreds of runs. Replicas that take turns (``diloco train``) spend half of a
step between small operations. Here each tensor has a leading dimension for the replicas, so that one operation serves
all of them, and a run takes half the time. It has the data, the rates, the fragments, the codec and the outer step of
``diloco train --preset tiny-muon``, and what is tried out is written here before it is built there.

A row of ``stacked.jsonl`` is one run: the settings that differ from `Run`, and its held-out loss. Rows that are there
are not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.parity.stacked_runs import GROUPS, Run
from diloco.algorithm import (
    Nesterov,
    Send,
    SyncSchedule,
    ValueSchedule,
    encode_with_feedback,
    make_codec,
    orthogonalised,
    partition,
)
from diloco.data import Corpus, DataSettings, build_corpus, heldout_batches
from diloco.model import DecoderSettings, Transformer

HERE = Path(__file__).parent
FIRST, LENGTH, REPLICAS, SEQUENCES = 130, 128, 4, 16  # steps of the shared start; L; M; sequences of all replicas


class Stack:
    """M copies of the decoder, and their optimizer: Muon for the layers' matrices, AdamW for the rest, or AdamW."""

    def __init__(self, run: Run, tensors: dict[str, Tensor], state: dict[str, dict[str, Tensor]], step: int) -> None:
        self.run, self.step, self.state = run, step, state
        self.tensors = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
        self.copies = len(next(iter(tensors.values())))
        matrices = [name for name in tensors if tensors[name].dim() == 3 and ".layers." in name]
        self.hidden = matrices if run.optimizer == "Muon" else []
        self.shapes = {name: tensors[name].shape[1:] for name in self.hidden}
        rate = run.learning_rate
        self.rate = ValueSchedule(peak=rate, kind="cosine", total_steps=run.steps, warmup_steps=50, final_ratio=0.05)
        angles = torch.outer(torch.arange(LENGTH).double(), 10_000.0 ** -(torch.arange(0, 32, 2).double() / 32))
        self.cosine, self.sine = (
            torch.cat(pair, 1).float() for pair in ((angles.cos(),) * 2, (-angles.sin(), angles.sin()))
        )

    @classmethod
    def new(cls, run: Run) -> Stack:
        model = decoder(run.seed)
        tensors = {name: each.detach().clone()[None] for name, each in model.named_parameters()}
        keys = ("momentum",), ("first", "second")
        stack = cls(run, tensors, {}, 0)
        for name, tensor in tensors.items():
            stack.state[name] = {key: torch.zeros_like(tensor) for key in keys[name not in stack.hidden]}
        return stack

    def copied(self, copies: int, run: Run) -> Stack:
        """Return ``copies`` of the one model of this stack, for ``run``."""

        def repeat(tensor: Tensor) -> Tensor:
            return tensor.detach().repeat(copies, *[1] * (tensor.dim() - 1))

        tensors = {name: repeat(tensor) for name, tensor in self.tensors.items()}
        state = {name: {key: repeat(value) for key, value in of.items()} for name, of in self.state.items()}
        return Stack(run, tensors, state, self.step)

    def losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of each copy, ``(M,)``, on ``(M, batch, sequence)`` tokens."""
        t, copies, rows = self.tensors, self.copies, tokens[0].numel()
        table = t["model.embed_tokens.weight"]
        offsets = torch.arange(copies)[:, None] * len(table[0])
        hidden = F.embedding(tokens.reshape(copies, -1) + offsets, table.view(-1, table.shape[-1]))
        for layer in ("model.layers.0.", "model.layers.1."):
            normed = norm(hidden, t[f"{layer}input_layernorm.weight"])
            query, key, value = (linear(normed, t[f"{layer}self_attn.{each}_proj.weight"]) for each in "qkv")
            attended = F.scaled_dot_product_attention(
                self.rotated(query), self.rotated(key), heads(value), is_causal=True
            )
            attended = attended.transpose(1, 2).reshape(copies, rows, -1)
            hidden = hidden + linear(attended, t[f"{layer}self_attn.o_proj.weight"])
            normed = norm(hidden, t[f"{layer}post_attention_layernorm.weight"])
            gate, up = (linear(normed, t[f"{layer}mlp.{each}_proj.weight"]) for each in ("gate", "up"))
            hidden = hidden + linear(F.silu(gate) * up, t[f"{layer}mlp.down_proj.weight"])
        logits = linear(norm(hidden, t["model.norm.weight"]), t["lm_head.weight"])
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(copies, -1).mean(1)

    def rotated(self, projected: Tensor) -> Tensor:
        values = heads(projected)
        return torch.addcmul(values * self.cosine, values.roll(16, -1), self.sine)

    def train(self, tokens: Tensor, targets: Tensor) -> float:
        """Take one step of each copy on its ``(batch, sequence)`` of ``(M, batch, sequence)``; return the mean loss."""
        losses = self.losses(tokens, targets)
        names, tensors = list(self.tensors), list(self.tensors.values())
        gradients = torch.autograd.grad(losses.sum(), tensors)
        with torch.no_grad():
            norms = torch.stack([each.flatten(1).square().sum(1) for each in gradients]).sum(0).sqrt()
            scale = (1.0 / (norms + 1e-6)).clamp(max=1.0)
            self.apply({n: g * scale.view(-1, *[1] * (g.dim() - 1)) for n, g in zip(names, gradients, strict=True)})
        return float(losses.detach().mean())

    def apply(self, gradients: dict[str, Tensor]) -> None:
        run, rate = self.run, self.rate(self.step)
        self.step += 1
        alike: dict[Any, list[tuple[str, Tensor]]] = {}
        for name, gradient in gradients.items():
            state, values = self.state[name], self.tensors[name]
            if name in self.hidden:
                momentum = state["momentum"].mul_(run.momentum).add_(gradient)
                update = gradient + run.momentum * momentum
                alike.setdefault(self.shapes[name], []).append((name, update))
                continue
            one, two = run.betas
            first, second = state["first"].lerp_(gradient, 1 - one), state["second"]
            second.mul_(two).addcmul_(gradient, gradient, value=1 - two)
            divisor = (second / (1 - two**self.step)).sqrt_().add_(1e-8)
            values.mul_(1 - rate * (0.1 if values.dim() == 3 else 0.0))
            values.addcdiv_(first, divisor, value=-rate / (1 - one**self.step))
        for shape, pairs in alike.items():
            results = orthogonalised(torch.cat([update for _, update in pairs]), run.newton_schulz_steps)
            step = rate * run.matrix_lr_ratio
            for (name, _), update in zip(pairs, torch.split(results, self.copies), strict=True):
                size = step * math.sqrt(max(1.0, shape[0] / shape[1]))
                self.tensors[name].mul_(1 - step * 0.1).add_(update, alpha=-size)

    def heldout(self, corpus: Corpus) -> float:
        """Return the held-out loss of the first copy on 512 sequences."""
        batches = heldout_batches(corpus.heldout, LENGTH, SEQUENCES, 512)
        with torch.no_grad():
            return sum(float(self.losses(x[None], y[None])) for x, y in batches) / (512 // SEQUENCES)


def decoder(seed: int) -> Transformer:
    settings = DecoderSettings(vocab_size=257, layers=2, width=64, heads=2, ffn_width=176)
    return Transformer(settings, generator=torch.Generator().manual_seed(seed))


def linear(values: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(values, weight.mT)


def norm(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(hidden, hidden.shape[-1:], None, DecoderSettings.norm_epsilon) * weight[:, None]


def heads(projected: Tensor) -> Tensor:
    """Reshape ``(M, batch * sequence, width)`` to ``(M * batch, heads, sequence, head_width)``."""
    return projected.view(-1, LENGTH, 2, projected.shape[-1] // 2).transpose(1, 2)


class Outer:
    """The outer loop of all replicas of a `Stack`, and the averages of their momenta."""

    def __init__(self, stack: Stack) -> None:
        self.stack, self.run = stack, stack.run
        self.layouts = partition(decoder(0), num_fragments=2)
        run = self.run
        self.schedule = SyncSchedule(inner_steps=run.inner_steps, num_fragments=2, overlap_steps=run.overlap_steps)
        self.codec = make_codec(run.codec)
        self.nesterov = Nesterov(learning_rate=run.outer_learning_rate, momentum=run.outer_momentum)
        self.globals = [self.flat(p)[0].clone() for p in range(len(self.layouts))]
        self.states = [self.nesterov.init(values) for values in self.globals]
        self.flights: dict[int, tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = {}
        self.residuals: dict[int, Tensor] = {}
        self.averages: dict[int, Tensor] = {}  # of the momenta
        self.sent_bytes = 0

    def flat(self, p: int) -> Tensor:
        tensors = [self.stack.tensors[name].detach().flatten(1) for name in self.layouts[p].names]
        return torch.cat(tensors, 1)

    def momenta(self, p: int) -> list[Tensor]:
        """Return the momenta of fragment ``p`` that are averaged, each of all replicas."""
        run, state = self.run, self.stack.state
        keys = ["momentum"] + ["first"] * run.average_adamw
        return [state[name][key] for name in self.layouts[p].names for key in keys if key in state[name]]

    def step(self, step: int) -> None:
        """Send and merge what is due after inner step ``step``, counted from the first of the outer loop."""
        for action in self.schedule.actions(step):
            if isinstance(action, Send):
                self.send(action.fragment, action.outer_step)
            elif action.fragment in self.flights:
                self.merge(action.fragment)

    def send(self, p: int, outer_step: int) -> None:
        local = self.flat(p)
        payloads = [self.codec.encode(self.globals[p] - each) for each in local]
        self.sent_bytes += len(payloads[0])
        before = after = None
        tensors, run = self.momenta(p), self.run
        if run.average and tensors and outer_step % run.average_every == 0:
            before = torch.cat([tensor.flatten(1) for tensor in tensors], 1)
            after = self.averaged(p, before)
        self.flights[p] = local, mean(self.codec, payloads, local.shape[1]), before, after

    def averaged(self, p: int, values: Tensor) -> Tensor:
        """Return the mean of ``(M, n)`` values, each encoded by the codec of the momenta."""
        if self.run.average == "reset":
            return torch.zeros_like(values[0])
        codec, payloads = make_codec(self.run.average), []
        residuals = self.residuals.setdefault(p, torch.zeros_like(values))
        last = self.averages.get(p, torch.zeros_like(values[0])) if self.run.average_change else 0.0
        for mine, residual in zip(values, residuals, strict=True):
            payload, error = encode_with_feedback(codec, mine - last, residual, self.run.average_feedback)
            residual.copy_(error)
            payloads.append(payload)
        self.sent_bytes += len(payloads[0])
        self.averages[p] = last + mean(codec, payloads, values.shape[1])
        return self.averages[p]

    def merge(self, p: int) -> None:
        sent, average, before, after = self.flights.pop(p)
        self.nesterov.update(average, self.states[p], self.globals[p])
        change = self.globals[p] - sent
        start = 0
        with torch.no_grad():
            for name in self.layouts[p].names:
                values = self.stack.tensors[name]
                values += change[:, start : start + values[0].numel()].view(values.shape)
                start += values[0].numel()
            if before is None or after is None:
                return
            factor = self.run.momentum**self.run.overlap_steps if self.run.decay else 1.0
            difference, start = (after - before).mul_(factor), 0
            for values in self.momenta(p):
                values += difference[:, start : start + values[0].numel()].view(values.shape)
                start += values[0].numel()

    def end(self) -> None:
        for p in list(self.flights):
            self.merge(p)

    def global_stack(self) -> Stack:
        """Return one model that has the global parameters."""
        tensors: dict[str, Tensor] = {}
        for layout, each in zip(self.layouts, self.globals, strict=True):
            tensors |= {name: part.clone()[None] for name, part in layout.named(each).items()}
        return Stack(self.run, tensors, {}, 0)


def mean(codec: Any, payloads: list[Tensor], numel: int) -> Tensor:
    total = torch.zeros(numel)
    for payload in payloads:
        codec.accumulate(payload, total, 1.0)
    return total / len(payloads)


def batches(corpus: Corpus, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tokens and targets of all replicas, each ``(M, batch, sequence)``."""
    samplers = [
        corpus.batches(
            sequence_length=LENGTH, batch_size=SEQUENCES // REPLICAS, seed=seed, replica=m, num_replicas=REPLICAS
        )
        for m in range(REPLICAS)
    ]
    while True:
        drawn = [sampler.next_batch() for sampler in samplers]
        yield torch.stack([x for x, _ in drawn]), torch.stack([y for _, y in drawn])


def shared_start(run: Run, drawn: Iterator[tuple[Tensor, Tensor]]) -> Stack:
    """Return one model after the data-parallel steps that all algorithms share; the last one is kept in ``runs``."""
    inner = {name: getattr(run, name) for name in INNER}
    file = Path("runs") / "stacked" / f"{hashlib.sha256(repr(inner).encode()).hexdigest()[:16]}.pt"
    if file.exists():
        for _ in range(FIRST):
            next(drawn)
        tensors, state = torch.load(file)
        return Stack(run, tensors, state, FIRST)
    stack = Stack.new(run)
    for _ in range(FIRST):
        tokens, targets = next(drawn)
        stack.train(tokens.reshape(1, -1, LENGTH), targets.reshape(1, -1, LENGTH))
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(({name: each.detach() for name, each in stack.tensors.items()}, stack.state), file)
    return stack


def train(run: Run, corpus: Corpus) -> dict[str, Any]:
    """Train one run and return its row."""
    cpu_s, drawn, outer = time.process_time(), batches(corpus, run.seed), None
    stack = shared_start(run, drawn).copied(REPLICAS if run.algorithm == "streaming" else 1, run)
    losses: list[float] = []
    outer = Outer(stack) if run.algorithm == "streaming" else None
    for step, (tokens, targets) in zip(range(FIRST, run.steps), drawn, strict=False):
        shape = stack.copies, -1, LENGTH
        losses.append(stack.train(tokens.reshape(shape), targets.reshape(shape)))
        if outer is not None:
            outer.step(step + 1 - FIRST)
    if outer is not None:
        outer.end()
        stack = outer.global_stack()
    row = {**run.changes(), "heldout_loss": stack.heldout(corpus), "training_loss": sum(losses[-50:]) / 50}
    if outer is not None:
        row["sent_bytes"] = outer.sent_bytes
    return row | {"cpu_s": round(time.process_time() - cpu_s, 1), "date": time.strftime("%Y-%m-%d")}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity.stacked", description=__doc__)
    parser.add_argument("group", nargs="*", help="names of groups of GROUPS; default: all of them, in order")
    parser.add_argument("--most", type=int, default=10**9, help="number of rows to run at most")
    parser.add_argument("--rows", type=Path, default=HERE / "stacked.jsonl", help="the file of the rows")
    given = parser.parse_args()
    torch.set_num_threads(1)
    corpus = build_corpus(DataSettings())
    left = given.most
    for group in given.group or GROUPS:
        for run in GROUPS[group]:
            if not left:
                return
            lines = given.rows.read_text("utf-8").splitlines() if given.rows.exists() else []
            known = [{name: row[name] for name in row if name in NAMES} for row in map(json.loads, lines)]
            if run.changes() in known:
                continue
            left -= 1
            row = train(run, corpus)
            with given.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


INNER = ("seed", "steps", "optimizer", "learning_rate", "matrix_lr_ratio", "momentum", "betas", "newton_schulz_steps")
NAMES = {field.name for field in fields(Run)}


if __name__ == "__main__":
    main()
