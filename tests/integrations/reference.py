"""A reference for the integration tests: a plain loop with `DiLoCo` on the model and the batches of an example."""

import argparse
import copy
import importlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from diloco import DiLoCo, InProcessTransport, Nesterov, SyncSchedule

EXAMPLES = Path(__file__).parents[2] / "examples"
TWO_ROUNDS = "--steps 50 --inner-steps 20 --overlap-steps 3 --codec float32"
"""Fragments are sent at 20 and 40 and merged at 23 and 43. The last seven steps show that training continues from the
merged weights."""


def example(name: str) -> ModuleType:
    """Return an example as a module."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


def options(
    out: Path, more: str = "", replica: int = 0, replicas: int = 1, of: str = "plain_pytorch"
) -> argparse.Namespace:
    """Return options of an example for a small model, with two rounds in 50 steps."""
    small = "--width 16 --layers 1 --batch-size 2 --sequence-length 16"
    everything = "--lora-rank 0" if of == "hf_trainer" else ""
    given = f"{TWO_ROUNDS} {small} {everything} --text {argparse.__file__} --out {out} {more}"
    parsed: argparse.Namespace = example(of).parse([*given.split(), f"--replica={replica}", f"--replicas={replicas}"])
    return parsed


def schedule_of(given: argparse.Namespace) -> SyncSchedule:
    """Return the schedule given by the options of an example."""
    return SyncSchedule(inner_steps=given.inner_steps, num_fragments=given.fragments, overlap_steps=given.overlap_steps)


def batches_of(given: argparse.Namespace) -> Iterator[Tensor]:
    """Yield the batches of an example, each with all of its micro-batches."""
    loader = DataLoader(
        example("plain_pytorch").share(given), batch_size=given.batch_size * given.accumulation, drop_last=True
    )
    for (windows,) in itertools.chain.from_iterable(itertools.repeat(loader)):
        yield windows


def trained_by_us(
    given: Sequence[argparse.Namespace], module: nn.Module, logits: Callable[[nn.Module, Tensor], Tensor]
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Train all steps, and return the local parameters of each replica and the global ones."""
    hub, first = InProcessTransport(len(given)), given[0]
    models = [copy.deepcopy(module) for _ in given]
    outer = Nesterov(learning_rate=0.7 if first.fragments == 1 else 0.4)
    replicas = []
    for number, (mine, model) in enumerate(zip(given, models, strict=True)):
        groups = example("plain_pytorch").parameter_groups(model)
        optimizer = torch.optim.AdamW(groups, lr=mine.learning_rate, betas=(0.9, 0.95))
        schedule, endpoint = schedule_of(mine), hub.endpoint(number)
        diloco = DiLoCo(
            model, optimizer, transport=endpoint, schedule=schedule, codec=mine.codec, outer_optimizer=outer
        )
        replicas.append((model, optimizer, batches_of(mine), diloco))
    for step in range(first.steps):
        for model, optimizer, batches, diloco in replicas:
            windows = next(batches)
            nn.functional.cross_entropy(
                logits(model, windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()
            ).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = first.learning_rate * (1 + math.cos(math.pi * step / first.steps)) / 2
            optimizer.step()
            optimizer.zero_grad()
            diloco.begin()
        for *_, diloco in replicas:
            diloco.finish()
    for *_, diloco in replicas:
        diloco.drain()
        assert diloco.rounds_committed == 2 * first.fragments
    return [dict(model.named_parameters()) for model in models], diloco.named_global_params()


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare up to float32 rounding: the order of sums may differ, and Adam divides by roots of small sums."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        difference = (found[name].detach() - values.detach()).abs().max()
        assert difference <= 2e-6 + 1e-5 * values.detach().abs().max(), f"{name} differs by {difference:.2e}"
