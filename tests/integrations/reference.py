"""A reference for the integration tests: the plain loop of an example with the model of another one."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from diloco import SyncSchedule
from tests.integrations.turns import in_turns

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


class Logits(nn.Module):
    """A model of transformers as one that returns logits."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.wrapped(tokens).logits
        return logits


def trained_by_us(given: Sequence[argparse.Namespace], name: str) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Train the model of an example by the plain loop; return the local and the global parameters of each replica."""
    plain, make = example("plain_pytorch"), example(name).make_model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain, "make_model", (lambda given: Logits(make(given))) if name == "hf_trainer" else make)
        models = in_turns(lambda replica, transport: plain.train(given[replica], transport), len(given))
    trained = []
    for model, mine in zip(models, given, strict=True):
        shared = torch.load(mine.out / "model.pt", weights_only=True)
        local = {name.removeprefix("wrapped."): value for name, value in model.named_parameters()}
        trained.append((local, {name: shared.get(name, shared.get(f"wrapped.{name}")) for name in local}))
    return trained


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare up to float32 rounding: the order of sums may differ, and Adam divides by roots of small sums."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        difference = (found[name].detach() - values.detach()).abs().max()
        assert difference <= 2e-6 + 1e-5 * values.detach().abs().max(), f"{name} differs by {difference:.2e}"
