"""``python -m benchmarks.parity.stacked GROUP``: train the replicas of runs as one model of stacked tensors.

The studies ask for hundreds of runs of a small model. Replicas that take turns (``diloco train``) spend half of a step
between small operations. Here each tensor has a leading dimension for the replicas, and on a GPU for those of many runs
(``--together``), so that one operation serves all of them. A run has the data, the rates, the fragments, the codec and
the outer step of ``diloco train --preset tiny-muon``, and what is tried out is written here before it is built there.

A row of ``stacked.jsonl`` is one run: the settings that differ from `Run`, and its held-out loss, also those of the
means of the last `SHARES` of its (global) parameters. Rows that are there are not run again.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.markdown import table
from benchmarks.parity.losses import gap, heldout_loss, in_words
from benchmarks.parity.stacked_runs import GROUPS, MODELS, Run, stacks
from diloco.algorithm import (
    Codec,
    FragmentLayout,
    Send,
    SyncSchedule,
    ValueSchedule,
    make_codec,
    newton_schulz,
    partition,
)
from diloco.data import Corpus, DataSettings, build_corpus, heldout_batches
from diloco.model import DecoderSettings, Transformer

HERE = Path(__file__).parent
LENGTH, HEAD, BLOCK = 128, 32, 4096  # L; width of a head; values that a codec encodes together
SHARES = (0.05, 0.1, 0.25)  # of the parameters at every tenth step after the shared start
Tensors = dict[str, Tensor]


class Stack:
    """The replicas of runs that differ in numbers only, and their optimizer: Muon for the layers' matrices, or AdamW.

    The first dimension of every tensor is that of the copies: the replicas of the first run, then of the second, ...
    Data-parallel runs come first; their replicas, and those of all runs in the shared start, share their gradients.
    """

    def __init__(self, runs: list[Run], device: str) -> None:
        self.runs, self.device, self.step, first = runs, device, 0, runs[0]
        self.model, self.replicas = MODELS[first.model], first.replicas
        made = [{name: each.detach() for name, each in decoder(run).named_parameters()} for run in runs]
        self.tensors = {name: self.by_copy(torch.stack([each[name] for each in made])) for name in made[0]}
        matrices = [name for name, tensor in self.tensors.items() if tensor.dim() == 3 and ".layers." in name]
        self.hidden = set(matrices if first.optimizer == "Muon" else ())
        self.state: dict[str, Tensors] = {}
        for name, tensor in self.tensors.items():
            muon = ("momentum", *["variance"] * bool(first.noise_gamma))
            keys = muon if name in self.hidden else ("first", "second")
            self.state[name] = {key: torch.zeros_like(tensor) for key in keys}
            tensor.requires_grad_()
        self.data_parallel = sum(run.algorithm == "data-parallel" for run in runs)
        shape: dict[str, Any] = {"kind": "cosine", "total_steps": first.steps, "warmup_steps": 50}
        rates = [ValueSchedule(peak=run.learning_rate, final_ratio=run.final_ratio, **shape) for run in runs]
        self.rates = self.by_copy(torch.tensor([[rate(step) for step in range(first.steps)] for rate in rates])).T
        self.ratio, self.momentum = self.column("matrix_lr_ratio"), self.column("momentum")[:, None, None]
        weights = [run.momentum_weight or run.momentum for run in runs]
        self.weight = self.by_copy(torch.tensor(weights))[:, None, None]
        self.cosine, self.sine = rotations(device)
        self.corrections: Tensors = {}  # of Muon's updates
        self.codec, self.dropped = make_codec(first.codec), torch.zeros((), device=device)
        self.start_codec = make_codec(first.start_codec)

    def by_copy(self, values: Tensor) -> Tensor:
        return values.float().repeat_interleave(self.replicas, 0).to(self.device)

    def column(self, name: str) -> Tensor:
        """Return a number of each run, for each of its copies."""
        return self.by_copy(torch.tensor([getattr(run, name) for run in self.runs]))

    def train(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Take one step of each copy on its ``(batch, sequence)`` of ``(C, batch, sequence)``; return their losses."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.runs[0].bfloat16):
            each = losses(self.model, self.tensors, tokens, targets, self.cosine, self.sine)
        gradients = torch.autograd.grad(each.sum(), list(self.tensors.values()))
        shared = len(self.runs) if self.step < self.runs[0].start else self.data_parallel
        with torch.no_grad():
            starting = self.step < self.runs[0].start
            if self.runs[0].encoded_gradients and not starting:
                self.encode(gradients, self.codec, self.runs[0].error_feedback)
            if self.runs[0].start_codec != "float32" and starting:
                self.encode(gradients, self.start_codec, 1.0)
            voting, averaged = self.runs[0].votes and not starting, list(gradients)
            apart = voting or (self.runs[0].own_factors and not starting)  # hidden matrices
            if apart:
                averaged = [g for name, g in zip(self.tensors, gradients, strict=True) if name not in self.hidden]
            if voting:
                self.encode(averaged, self.codec, self.runs[0].error_feedback)
            senders = self.runs[0].start_replicas if starting else 0
            for gradient in averaged if shared else ():
                mine = gradient[: shared * self.replicas].view(shared, self.replicas, *gradient.shape[1:])
                mine.copy_(mine[:, : senders or None].mean(1, keepdim=True).expand_as(mine))
            norms = torch.stack([each.flatten(1).square().sum(1) for each in gradients]).sum(0).sqrt()
            scale = (1.0 / (norms + 1e-6)).clamp(max=1.0)
            if apart:
                scale = self.mean(scale)
            self.apply(
                {name: g * like(scale, g) for name, g in zip(self.tensors, gradients, strict=True)}, shared, apart
            )
        return each.detach()

    def encode(self, gradients: Sequence[Tensor], codec: Codec, feedback: float) -> None:
        """Replace the gradients of each replica by what the others decode, and send what was dropped with the next."""
        sent = flat(gradients) + self.dropped
        received = decoded(codec, sent)
        self.dropped = feedback * (sent - received)
        for gradient, part in parts(gradients, received):
            gradient.copy_(part)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over the replicas of each run of ``(C, ...)`` values, for each of them."""
        by_run = values.view(-1, self.replicas, *values.shape[1:]).mean(1)
        return by_run.repeat_interleave(self.replicas, 0)

    def apply(self, gradients: Tensors, shared: int, apart: bool) -> None:
        run, rate = self.runs[0], self.rates[self.step]
        self.step += 1
        alike: dict[Any, list[tuple[str, Tensor]]] = {}
        one, two = run.betas
        for name, gradient in gradients.items():
            state, values = self.state[name], self.tensors[name]
            if name in self.hidden:
                if run.noise_gamma:
                    last = state["momentum"] * (1 - self.momentum)
                    state["variance"].lerp_((last - gradient).square_(), 0.05)
                momentum = state["momentum"].mul_(self.momentum).add_(gradient)
                update = gradient.addcmul_(momentum, self.weight)
                if name in self.corrections:
                    update += self.corrections[name]
                if run.noise_gamma:
                    square = (update * (1 - self.momentum)).square_()
                    update.div_(square.add_(state["variance"], alpha=run.noise_gamma).sqrt_().add_(1e-12))
                alike.setdefault(values.shape, []).append((name, update))
                continue
            first, second = state["first"].lerp_(gradient, 1 - one), state["second"]
            second.mul_(two).addcmul_(gradient, gradient, value=1 - two)
            divisor = (second / (1 - two**self.step)).sqrt_().add_(1e-8)
            if values.dim() == 3:
                values.mul_(1 - like(rate * 0.1, values))
            values.sub_((first / divisor).mul_(like(rate / (1 - one**self.step), values)))
        for shape, pairs in alike.items():
            updates = torch.stack([update for _, update in pairs])  # equal for replicas that share their gradients
            if apart and run.votes:
                updates = self.votes(self.orthogonal(updates))
            rest = updates[:, shared * self.replicas :]
            needed = torch.cat([updates[:, : shared * self.replicas : self.replicas], rest], 1)
            results = self.orthogonal(needed)
            both = results[:, :shared].repeat_interleave(self.replicas, 1), results[:, shared:]
            orthogonal = torch.cat(both, 1)
            if apart and run.own_factors:
                orthogonal = torch.stack([self.mean(factors) for factors in self.orthogonal(updates)])
            if run.row_norms:
                orthogonal = self.with_equal_rows([name for name, _ in pairs], orthogonal)
            step = rate * self.ratio
            for (name, _), update in zip(pairs, orthogonal, strict=True):
                size = like(step * math.sqrt(max(1.0, shape[1] / shape[2])), update)
                self.tensors[name].mul_(1 - like(step * 0.1, update)).sub_(update.mul_(size))

    def orthogonal(self, updates: Tensor) -> Tensor:
        """Return the orthogonal factors of ``(..., rows, columns)`` matrices."""
        half = updates.bfloat16() if updates.is_cuda else updates
        result = newton_schulz(half.flatten(0, -3), self.runs[0].newton_schulz_steps)
        return result.to(updates.dtype).view(updates.shape)

    def votes(self, updates: Tensor) -> Tensor:
        """Return the sign that most replicas of each run have for each value; 0 if they are divided."""
        by_run = updates.sign().view(len(updates), -1, self.replicas, *updates.shape[2:]).sum(2).sign()
        return by_run.repeat_interleave(self.replicas, 1)

    def with_equal_rows(self, names: list[str], updates: Tensor) -> Tensor:
        """Divide each row by the root of its remembered mean square, and keep the norm of each matrix."""
        results = []
        for name, update in zip(names, updates, strict=True):
            rows = self.state[name].setdefault("rows", torch.zeros_like(update[..., :1]))
            rows.lerp_(update.square().mean(-1, keepdim=True), 0.05)
            scaled = update / (rows.sqrt() + 1e-8)
            results.append(scaled * (update.norm(dim=(-2, -1)) / scaled.norm(dim=(-2, -1)))[:, None, None])
        return torch.stack(results)

    def parameters(self, replica: int = 0) -> Tensors:
        """Return the parameters of a replica of each run."""
        return {name: tensor.detach()[replica :: self.replicas].clone() for name, tensor in self.tensors.items()}


def decoder(run: Run) -> Transformer:
    return Transformer(MODELS[run.model], seed=run.seed)


def like(values: Tensor, tensor: Tensor) -> Tensor:
    """Return a number for each copy in a shape that is broadcast to that of ``tensor``."""
    return values.view(-1, *[1] * (tensor.dim() - 1))


def rotations(device: str) -> tuple[Tensor, Tensor]:
    frequencies = 10_000.0 ** -(torch.arange(0, HEAD, 2).double() / HEAD)
    angles = torch.outer(torch.arange(LENGTH).double(), frequencies)
    pairs = (angles.cos(), angles.cos()), (-angles.sin(), angles.sin())
    cosine, sine = (torch.cat(pair, 1).float().to(device) for pair in pairs)
    return cosine, sine


def losses(model: DecoderSettings, t: Tensors, tokens: Tensor, targets: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return the mean cross-entropy of each copy, ``(C,)``, on ``(C, batch, sequence)`` tokens."""
    copies, rows = len(tokens), tokens[0].numel()

    def rotated(projected: Tensor) -> Tensor:
        values = heads(projected)
        return torch.addcmul(values * cosine, values.roll(HEAD // 2, -1), sine).to(values.dtype)

    table = t["model.embed_tokens.weight"]
    offsets = torch.arange(copies, device=tokens.device)[:, None] * table.shape[1]
    hidden = F.embedding(tokens.reshape(copies, -1) + offsets, table.view(-1, table.shape[-1]))
    for layer in (f"model.layers.{number}." for number in range(model.layers)):
        normed = norm(hidden, t[f"{layer}input_layernorm.weight"])
        query, key, value = (linear(normed, t[f"{layer}self_attn.{each}_proj.weight"]) for each in "qkv")
        attended = F.scaled_dot_product_attention(rotated(query), rotated(key), heads(value), is_causal=True)
        attended = attended.transpose(1, 2).reshape(copies, rows, -1)
        hidden = hidden + linear(attended, t[f"{layer}self_attn.o_proj.weight"])
        normed = norm(hidden, t[f"{layer}post_attention_layernorm.weight"])
        gate, up = (linear(normed, t[f"{layer}mlp.{each}_proj.weight"]) for each in ("gate", "up"))
        hidden = hidden + linear(F.silu(gate) * up, t[f"{layer}mlp.down_proj.weight"])
    logits = linear(norm(hidden, t["model.norm.weight"]), t["lm_head.weight"])
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").view(copies, -1).mean(1)


def linear(values: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(values, weight.mT)


def norm(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(hidden, hidden.shape[-1:], None, DecoderSettings.norm_epsilon) * weight[:, None]


def heads(projected: Tensor) -> Tensor:
    """Reshape ``(C, batch * sequence, width)`` to ``(C * batch, heads, sequence, head_width)``."""
    return projected.view(-1, LENGTH, projected.shape[-1] // HEAD, HEAD).transpose(1, 2)


class Outer:
    """The outer loop of the runs of a `Stack` that are not data-parallel, and the averages of Muon's momenta."""

    def __init__(self, stack: Stack) -> None:
        self.stack, self.runs = stack, stack.runs[stack.data_parallel :]
        run = self.runs[0]
        number = 2 if run.row_halves else run.fragments or min(run.inner_steps, stack.model.layers // 2 + 1)
        self.layouts = self.fragments(1) * 2 if run.row_halves else self.fragments(number)
        often = run.inner_steps // 2 if run.uneven_windows else run.inner_steps
        self.schedule = SyncSchedule(inner_steps=often, num_fragments=number, overlap_steps=run.overlap_steps)
        self.now, self.last_sent = 0, [0] * number
        self.due = [0] * number  # rounds that the schedule had
        self.powers = [1.0] * number
        self.late: list[tuple[int, int, Tensor]] = []  # step, fragment, change of all replicas
        self.codec = make_codec(run.codec)
        self.rate, self.mu = self.column("outer_learning_rate"), self.column("outer_momentum")
        self.opening = SyncSchedule(
            inner_steps=run.opening_inner_steps, num_fragments=min(number, run.opening_inner_steps), overlap_steps=0
        )
        self.opening_codec = make_codec(run.opening_codec)
        self.finish_from = run.steps - run.start - run.finish  # counted from the first step of the outer loop
        self.finish_codec = make_codec(run.finish_codec or run.codec)
        self.average = make_codec(max(each.average for each in self.runs) or "fp4")
        self.averages = torch.tensor([[float(each.average != "")] for each in self.runs], device=stack.device)
        self.globals = [flat(self.tensors(p))[:: stack.replicas].clone() for p in range(number)]
        self.fast = [values.clone() for values in self.globals]
        self.averaged = [values.clone() for values in self.globals]
        self.residuals: dict[int, Tensor] = {}
        self.velocities = [torch.zeros_like(values) for values in self.globals]
        self.flights: dict[int, tuple[Tensor, ...]] = {}
        self.means: dict[int, Tensor] = {}  # of the momenta
        self.merged: dict[int, int] = {}  # rounds of each fragment
        self.lengths: list[Tensor] = []  # of each mean, relative to what was averaged
        self.sent_bytes = torch.zeros(len(self.runs), dtype=torch.double, device=stack.device)

    def fragments(self, number: int) -> tuple[FragmentLayout, ...]:
        return partition(decoder(self.runs[0]), num_fragments=number, strategy=self.runs[0].strategy)

    def column(self, name: str) -> Tensor:
        return torch.tensor([getattr(run, name) for run in self.runs], device=self.stack.device)[:, None]

    def mine(self, tensor: Tensor) -> Tensor:
        return tensor.detach()[self.stack.data_parallel * self.stack.replicas :]

    def tensors(self, p: int) -> list[Tensor]:
        return [self.rows(p, self.mine(self.stack.tensors[name])) for name in self.layouts[p].names]

    def rows(self, p: int, tensor: Tensor) -> Tensor:
        return tensor[:, p::2] if self.runs[0].row_halves else tensor

    def momenta(self, p: int) -> list[Tensor]:
        states = [self.stack.state[name] for name in self.layouts[p].names]
        return [self.rows(p, self.mine(state["momentum"])) for state in states if "momentum" in state]

    def step(self, step: int) -> None:
        """Send and merge what is due after inner step ``step``, counted from the first of the outer loop."""
        run, self.now = self.runs[0], step
        if step <= run.opening:
            for action in self.opening.actions(step):
                # with fewer steps than fragments, all travel together
                for p in range(action.fragment, len(self.layouts), self.opening.num_fragments):
                    if isinstance(action, Send):
                        self.send(p, self.opening_codec, run.opening_feedback)
                        self.merge(p, 0.0, opening=True)
            return
        finished = self.finished(step)
        at_once = finished > 0 and not run.finish_overlap
        for action in self.schedule.actions(step - run.opening):
            if isinstance(action, Send):
                self.due[action.fragment] += 1
                if run.uneven_windows and self.due[action.fragment] % 4 > 1:
                    continue
                self.send(action.fragment, self.finish_codec if finished > 0 else self.codec, run.error_feedback)
                if run.overlaps:
                    self.merge(action.fragment, finished)
            if action.fragment in self.flights and (at_once or not isinstance(action, Send)):
                self.merge(action.fragment, finished)

        for due, p, change in [each for each in self.late if each[0] == step]:
            self.late.remove((due, p, change))
            self.add(p, change)

    def power(self, p: int) -> float:
        """Return the length of the window of fragment ``p`` that ends now: 1 for H steps (at the highest rate)."""
        run, first = self.runs[0], self.last_sent[p]
        if run.window_power == "steps":
            return (self.now - first) / run.inner_steps
        rates = self.stack.rates[run.start + first : run.start + self.now, -1]
        return float(rates.sum()) / (run.inner_steps * run.learning_rate)

    def finished(self, step: int) -> float:
        """Return how far the outer step after inner step ``step`` is a plain average: 0 not at all, 1 wholly."""
        passed = step - self.finish_from
        if passed <= 0:
            return 0.0
        return min(1.0, passed / self.runs[0].finish) if self.runs[0].finish_decay else 1.0

    def send(self, p: int, codec: Codec, feedback: float) -> None:
        local = flat(self.tensors(p))
        if self.runs[0].window_power:
            self.powers[p], self.last_sent[p] = self.power(p), self.now
        sent = self.by_replica(self.globals[p]) - local
        if feedback:
            sent += feedback * self.residuals.get(p, torch.zeros_like(sent))
        received = decoded(codec, sent)
        self.residuals[p] = sent - received
        mean = self.mean(received)
        if self.runs[0].senders:
            senders = self.mean((received != 0).float())
            mean /= senders.masked_fill_(senders == 0, 1.0)
        if self.runs[0].isotropic or self.runs[0].singular_power != 1:
            self.change_singular_values(p, mean)
        self.flights[p] = local, mean
        lengths = received.norm(dim=1, keepdim=True).square()
        self.lengths.append(mean.norm(dim=1) / self.mean(lengths)[:, 0].sqrt())
        self.sent_bytes += codec.payload_bytes(local.shape[1])
        if tensors := self.momenta(p):  # changes of the last mean travel
            momenta = flat(tensors)
            last = self.means.get(p, self.mean(torch.zeros_like(momenta)))
            self.means[p] = last + self.mean(decoded(self.average, momenta - self.by_replica(last)))
            change = (self.by_replica(self.means[p]) - momenta) * self.by_replica(self.averages)
            if self.runs[0].control:
                names = [name for name in self.layouts[p].names if name in self.stack.hidden]
                for name, (_, values) in zip(names, parts(tensors, change), strict=True):
                    self.stack.corrections[name] = values
            else:
                self.flights[p] += (change,)
            self.sent_bytes += self.averages[:, 0] * self.average.payload_bytes(momenta.shape[1])
            if self.runs[0].orthogonal_mean:
                self.correct(p, mean)

    def correct(self, p: int, mean: Tensor) -> None:
        """Add to ``mean`` what steps along the orthogonal factor of the mean momenta would have moved beyond it."""
        run, means = self.runs[0], iter(parts(self.momenta(p), self.means[p].repeat_interleave(self.stack.replicas, 0)))
        size = self.stack.rates[run.start + self.now - 1, -1] * run.matrix_lr_ratio * run.orthogonal_mean
        for name, (tensor, values) in zip(
            self.layouts[p].names, parts([each[:: self.stack.replicas] for each in self.tensors(p)], mean), strict=True
        ):
            if name in self.stack.hidden:
                own, shared = next(means)
                change = self.stack.orthogonal(shared) - self.stack.orthogonal(own)
                by_run = self.mean(change.flatten(1)).view(values.shape)
                values += by_run * size * math.sqrt(max(1.0, tensor.shape[1] / tensor.shape[2]))

    def merge(self, p: int, finished: float, *, opening: bool = False) -> None:
        """Take the outer step of fragment ``p``; see `finished`."""
        run = self.runs[0]
        sent, average, *changes = self.flights.pop(p)
        rate, mu = torch.lerp(self.rate, torch.ones_like(self.rate), finished), self.mu * (1 - finished)
        self.merged[p] = self.merged.get(p, 0) + 1
        if self.runs[0].momentum_warmup:
            mu = mu * min(1.0, self.merged[p] / self.runs[0].momentum_warmup)
        if run.outer_schedule:
            rounds = (run.steps - run.start) // run.inner_steps
            shape: dict[str, Any] = {"kind": run.outer_schedule, "total_steps": rounds}
            rate = rate * ValueSchedule(peak=1.0, final_ratio=run.outer_final_ratio, **shape)(self.merged[p] - 1)
        if run.window_power:
            scaled = mu ** self.powers[p]
            rate, mu = rate * (1 - scaled) / (1 - mu), scaled
        if run.others_outer_rate != 1:
            hidden = [name in self.stack.hidden for name in self.layouts[p].names]
            pairs = zip(hidden, self.tensors(p), strict=True)
            each = [torch.full((tensor[0].numel(),), 1.0 if own else run.others_outer_rate) for own, tensor in pairs]
            rate = rate * torch.cat(each).to(rate.device)
        if opening:
            rate, mu = torch.full_like(rate, self.runs[0].opening_rate), torch.zeros_like(mu)
        if self.runs[0].evaluated_momentum >= 0:
            fast = self.fast[p].sub_(average * rate / (1 - mu))
            self.averaged[p].lerp_(fast, 1 - self.runs[0].evaluated_momentum)
            self.globals[p].copy_(torch.lerp(fast, self.averaged[p], mu))
        else:
            velocity = self.velocities[p].mul_(mu).add_(average)
            self.globals[p].sub_((velocity * mu).add_(average).mul_(rate))
        change = self.by_replica(self.globals[p]) - sent
        if run.overlaps:
            taus = torch.tensor(run.overlaps * len(self.runs), device=change.device)[:, None]
            self.late += [(self.now + tau, p, change * (taus == tau)) for tau in sorted(set(run.overlaps)) if tau]
            change *= taus == 0
        self.add(p, change)
        for change in changes:
            for values, part in parts(self.momenta(p), change):
                values += part

    def add(self, p: int, change: Tensor) -> None:
        for values, part in parts(self.tensors(p), change):
            values += part

    def means_of_replicas(self) -> Tensors:
        """Return the mean of what the replicas of each run hold."""
        tensors = {name: tensor.detach() for name, tensor in self.stack.tensors.items()}
        return {name: each.view(-1, self.stack.replicas, *each.shape[1:]).mean(1) for name, each in tensors.items()}

    def parameters(self) -> Tensors:
        """Return the parameters of each run: the global ones, or those of data-parallel training."""
        tensors = self.stack.parameters()
        evaluated = self.averaged if self.runs[0].evaluated_momentum >= 0 else self.globals
        for p, (layout, global_values) in enumerate(zip(self.layouts, evaluated, strict=True)):
            mine = [self.rows(p, tensors[name][self.stack.data_parallel :]) for name in layout.names]
            for values, part in parts(mine, global_values):
                values.copy_(part)
        return tensors

    def by_replica(self, values: Tensor) -> Tensor:
        return values.repeat_interleave(self.stack.replicas, 0)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over the replicas of each run of ``(C, n)`` values."""
        return values.view(-1, self.stack.replicas, values.shape[1]).mean(1)

    def change_singular_values(self, p: int, mean: Tensor) -> None:
        tensors = [tensor[:: self.stack.replicas] for tensor in self.tensors(p)]
        for name, (_, values) in zip(self.layouts[p].names, parts(tensors, mean), strict=True):
            if ".layers." in name and values.dim() == 3:
                if self.runs[0].isotropic:
                    changed = newton_schulz(values)
                else:
                    left, singular, right = torch.linalg.svd(values, full_matrices=False)
                    changed = left * singular.pow(self.runs[0].singular_power)[:, None] @ right
                norms, others = (each.norm(dim=(1, 2), keepdim=True) for each in (values, changed))
                values.copy_(changed * (norms / others))


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten(1) for tensor in tensors], 1)


def parts(tensors: Sequence[Tensor], values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each tensor with its part of ``(C, n)`` values, in its shape."""
    pieces = torch.split(values, [tensor[0].numel() for tensor in tensors], 1)
    return ((tensor, piece.view(tensor.shape)) for tensor, piece in zip(tensors, pieces, strict=True))


def decoded(codec: Codec, values: Tensor) -> Tensor:
    """Return what the receivers of each row of ``(C, n)`` values decode."""
    rows = F.pad(values, (0, -values.shape[1] % BLOCK))
    return codec.decode(codec.encode(rows.flatten()), rows.numel()).view(rows.shape)[:, : values.shape[1]]


def batches(corpus: Corpus, runs: list[Run], device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tokens and targets of all replicas of all runs, each ``(C, batch, sequence)``."""
    replicas = runs[0].replicas
    size = runs[0].sequences // replicas
    seeds = sorted({run.seed for run in runs})
    order = [seeds.index(run.seed) * replicas + m for run in runs for m in range(replicas)]
    samplers = [
        corpus.batches(sequence_length=LENGTH, batch_size=size, seed=seed, replica=m, num_replicas=replicas)
        for seed in seeds
        for m in range(replicas)
    ]
    while True:
        drawn = [sampler.next_batch() for sampler in samplers]
        tokens, targets = (torch.stack([each[i] for each in drawn]).to(device)[order] for i in range(2))
        yield tokens, targets


def heldout(stack: Stack, history: list[Tensors], corpus: Corpus) -> list[float]:
    """Return the loss of each run on 512 held-out sequences, with the mean of ``history`` as parameters."""
    tensors = {name: torch.stack([each[name] for each in history]).mean(0) for name in history[0]}
    total, number = torch.zeros(len(stack.runs), device=stack.device), 512 // 16
    with torch.no_grad():
        for pair in heldout_batches(corpus.heldout, LENGTH, 16, 512):
            tokens, targets = (each.to(stack.device).expand(len(stack.runs), -1, -1) for each in pair)
            total += losses(stack.model, tensors, tokens, targets, stack.cosine, stack.sine)
    return (total / number).tolist()


def train(runs: list[Run], corpus: Corpus, device: str) -> Iterator[tuple[dict[str, Any], Tensors]]:
    """Train runs together and yield their rows and their (global) parameters."""
    cpu_s, wall_s, run = time.process_time(), time.perf_counter(), runs[0]
    stack, outer = Stack(runs, device), None
    steps = run.steps - run.start
    recent: list[Tensor] = []
    history: list[Tensors] = []
    for step, (tokens, targets) in zip(range(-run.start, steps), batches(corpus, runs, device), strict=False):
        if step == 0 and stack.data_parallel < len(runs):
            outer = Outer(stack)
        recent = [*recent[-49:], stack.train(tokens, targets)]
        if outer is not None:
            outer.step(step + 1)
        if step + 1 == steps and outer is not None:
            for p in list(outer.flights):
                outer.merge(p, outer.finished(steps))
        if step + 1 >= (1 - max(SHARES)) * steps and (step + 1) % 10 == 0:
            history.append(outer.parameters() if outer is not None else stack.parameters())
    held = heldout(stack, [outer.means_of_replicas()], corpus) if outer is not None else []
    alone = outer is not None and not outer.sent_bytes.any()
    own = [heldout(stack, [stack.parameters(m)], corpus) for m in range(run.replicas if alone else 0)]
    counts = [1, *(max(1, round(share * steps / 10)) for share in SHARES)]
    results = [heldout(stack, history[-count:], corpus) for count in counts]
    training = torch.stack(recent).mean(0).view(-1, run.replicas).mean(1).tolist()
    for number, each in enumerate(runs):
        row = {**each.changes(), "heldout_loss": results[0][number], "means": [loss[number] for loss in results[1:]]}
        row["training_loss"] = training[number]
        if outer is not None and number >= stack.data_parallel:
            row["replicas_mean"] = held[number]
            row["sent_bytes"] = int(outer.sent_bytes[number - stack.data_parallel])
            if outer.lengths:
                row["mean_length"] = round(float(torch.stack(outer.lengths)[:, number - stack.data_parallel].mean()), 3)
            if row["sent_bytes"] == 0:
                row["replicas_loss"] = fmean(each[number] for each in own)
        row |= {"device": device, "together": len(runs), "wall_s": round(time.perf_counter() - wall_s, 1)}
        row |= {"cpu_s": round((time.process_time() - cpu_s) / len(runs), 1), "date": time.strftime("%Y-%m-%d")}
        yield row, {name: tensor[number] for name, tensor in history[-1].items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity.stacked", description=__doc__)
    parser.add_argument("group", nargs="*", help="names of groups of GROUPS; default: all of them, in order")
    parser.add_argument("--most", type=int, default=10**9, help="number of rows to run at most")
    parser.add_argument("--rows", type=Path, default=HERE / "stacked.jsonl", help="the file of the rows")
    parser.add_argument("--table", action="store_true", help="print a table of the rows, and run nothing")
    parser.add_argument("--device", default="cpu", help="such as cuda, which needs other rows than a CPU")
    parser.add_argument("--together", type=int, default=1, help="number of runs in one stack, at most")
    parser.add_argument("--data", nargs="*", default=(), help="as data.paths; default: Python's standard library")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = list(map(json.loads, given.rows.read_text("utf-8").splitlines())) if given.rows.exists() else []
    if given.table:
        head = ["settings", "held-out loss of each seed", "mean", "relative to data-parallel", "mean of the last 10 %"]
        print(table(head, lines(rows)))
        return
    known = list(map(settings, rows))
    runs = [run for group in given.group or GROUPS for run in GROUPS[group]]
    missing = [run for run in dict.fromkeys(runs) if run.changes() not in known][: given.most]
    corpus = build_corpus(DataSettings(paths=tuple(given.data)))
    for some in stacks(missing, given.together):
        with given.rows.open("a", encoding="utf-8") as file:
            for row, _ in train(some, corpus, given.device):
                file.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)


def settings(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in RESULTS}


def lines(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield the cells of `table`, one line for all seeds of the same settings."""
    groups: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        key = json.dumps({**settings(row), "seed": ""}, sort_keys=True)
        groups.setdefault(key, {})[row.get("seed", 0)] = row
    for key, runs in sorted(groups.items()):
        shown = {name: value for name, value in json.loads(key).items() if value != ""}
        inner = {name: value for name, value in shown.items() if name not in OUTER}
        rivals = groups.get(json.dumps({**inner, "algorithm": "data-parallel", "seed": ""}, sort_keys=True), {})
        losses = {seed: heldout_loss(row) for seed, row in sorted(runs.items())}
        gaps = [gap(losses[seed] / heldout_loss(rivals[seed])) for seed in losses if seed in rivals]
        means = [row["means"][1] / row["heldout_loss"] for row in runs.values() if "means" in row]
        cells = [", ".join(map(in_words, losses.values())), in_words(fmean(losses.values()))]
        cells += [", ".join(gaps), gap(fmean(means)) if means else ""]
        yield [", ".join(f"{name} {value}" for name, value in shown.items()), *cells]


RESULTS = {
    "heldout_loss",
    "means",
    "replicas_mean",
    "replicas_loss",
    "mean_length",
    "training_loss",
    "sent_bytes",
    "device",
    "together",
    "wall_s",
    "cpu_s",
    "date",
}
# of no use to data-parallel runs
OUTER = {"outer_learning_rate", "outer_momentum", "average", "overlap_steps", "inner_steps", "replicas", "codec"}
OUTER |= {"opening", "opening_inner_steps", "opening_codec", "opening_feedback", "opening_rate", "momentum_warmup"}
OUTER |= {"error_feedback", "senders", "singular_power", "isotropic", "evaluated_momentum", "encoded_gradients"}
OUTER |= {"overlaps", "fragments", "strategy", "row_halves", "uneven_windows", "window_power", "orthogonal_mean"}
OUTER |= {"control", "others_outer_rate"}
OUTER |= {"outer_schedule", "outer_final_ratio", "finish", "finish_decay", "finish_overlap", "finish_codec"}


if __name__ == "__main__":
    main()
