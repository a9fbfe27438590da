"""A reference for the integration tests: diloco's own trainer on the model, batches and settings of an example."""

from __future__ import annotations

import argparse
import copy
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from diloco import SyncSchedule
from diloco.algorithm import CodecSettings, FragmentSettings, MergeSettings, OuterSettings, ScheduleSettings
from diloco.data import ByteTokenizer, Corpus, PackedTokens
from diloco.events import Event
from diloco.model import LanguageModel, LossParts, ModelSettings
from diloco.train import OptimizerSettings, InProcessFleet, RunSettings, Session, TrainSettings, make_transport
from diloco.transport import TransportSettings

__all__ = ["STEPS", "assert_equal", "example", "options", "schedule_of", "session_of", "trained_by_us"]

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 50
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


class Wrapped(LanguageModel):
    """A module whose logits a function computes, with the interface that diloco's trainer needs."""

    def __init__(self, module: nn.Module, logits: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.module = module
        self._logits = logits

    def forward(self, tokens: Tensor, cache: Any = None, documents: Any = None) -> Tensor:
        return self._logits(self.module, tokens)

    def loss(self, tokens: Tensor, targets: Tensor, documents: Any = None) -> LossParts:
        loss = nn.functional.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
        return LossParts(loss, loss.detach())

    def new_cache(self) -> Any:
        raise NotImplementedError

    def flops_per_token(self, sequence_length: int | None = None) -> float:
        return 0.0


class Batches:
    """A stand-in for a sampler that yields the batches of an example."""

    def __init__(self, given: argparse.Namespace) -> None:
        size = given.batch_size * given.accumulation
        self._windows = DataLoader(example("plain_pytorch").share(given), batch_size=size, drop_last=True)
        self._left: Iterator[Any] = iter(())

    def next_batch(self) -> tuple[Tensor, Tensor]:
        drawn = next(self._left, None)
        if drawn is None:
            self._left = iter(self._windows)
            drawn = next(self._left)
        return drawn[0][:, :-1], drawn[0][:, 1:]


def session_of(
    given: Sequence[argparse.Namespace],
    module: nn.Module,
    logits: Callable[[nn.Module, Tensor], Tensor],
    on_event: Callable[[Event], None] = lambda event: None,
) -> Session:
    """Return diloco's own trainer, with one replica per options of an example."""
    first = given[0]
    settings = RunSettings(
        train=TrainSettings(
            steps=first.steps,
            batch_size=first.batch_size * first.accumulation,
            gradient_accumulation=first.accumulation,
            sequence_length=first.sequence_length,
            device="cpu",
        ),
        inner=OptimizerSettings(
            learning_rate=first.learning_rate,
            arguments={"betas": (0.9, 0.95), "weight_decay": 0.1},
            schedule="cosine",
            warmup_steps=0,
            final_ratio=0.0,
            clip_norm=1.0,
        ),
        schedule=ScheduleSettings(inner_steps=first.inner_steps, overlap_steps=first.overlap_steps),
        fragments=FragmentSettings(num_fragments=first.fragments),
        merge=MergeSettings(rule="rebase"),
        outer=OuterSettings(learning_rate=0.7 if first.fragments == 1 else 0.4),
        codec=CodecSettings(name=first.codec),
        transport=TransportSettings(replicas=len(given)),
        model=ModelSettings(),
    )
    tokens = np.zeros(10_000, dtype=np.uint16)  # never sampled: the batches come from the example
    corpus = Corpus(PackedTokens([tokens]), PackedTokens([tokens]), ByteTokenizer(), 1, 1, 1, 1, "")
    fleet = InProcessFleet(make_transport(settings))

    def build(*_: Any, **__: Any) -> LanguageModel:
        return Wrapped(copy.deepcopy(module), logits)

    with mock.patch("diloco.train.local_replica.build_language_model", build):
        session = Session(settings, corpus, fleet, torch.device("cpu"), on_event)
    for replica, mine in zip(session.replicas, given, strict=True):
        replica.sampler = Batches(mine)  # type: ignore[assignment]
    return session


def trained_by_us(
    given: Sequence[argparse.Namespace], module: nn.Module, logits: Callable[[nn.Module, Tensor], Tensor]
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Train all steps, and return the local parameters of each replica and the global ones."""
    session = session_of(given, module, logits)
    for _ in range(given[0].steps):
        session.step()
    session.drain()
    assert session.replicas[0].diloco is not None
    assert session.replicas[0].diloco.rounds_committed == 2 * given[0].fragments
    local = [dict(replica.model.get_submodule("module").named_parameters()) for replica in session.replicas]
    shared = {name.removeprefix("module."): values for name, values in session.global_params().items()}
    return local, shared


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare up to float32 rounding: the order of sums may differ, and Adam divides by roots of small sums."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        difference = (found[name].detach() - values.detach()).abs().max()
        assert difference <= 2e-6 + 1e-5 * values.detach().abs().max(), f"{name} differs by {difference:.2e}"
