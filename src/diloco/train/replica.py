"""One replica of a run, and the random numbers that are its own."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diloco.data import Batches
from diloco.model import LanguageModel
from diloco.outer import DiLoCo
from diloco.train.data_parallel import GradientAverager
from diloco.train.inner import InnerLoop

__all__ = [
    "RandomState",
    "Replica",
    "load_process_random",
    "process_random",
    "seed_process",
]


class RandomState:
    """The random numbers of one replica: torch's generators of the CPU and, once CUDA is initialised, of its GPU.

    A model draws (dropout, for example) from generators that belong to the process. A replica installs its own while it
    works, so a run gives the same bits whether or not its replicas share a process.
    """

    def __init__(self, seed: int, replica: int) -> None:
        sequence = np.random.SeedSequence(seed, spawn_key=(replica,))
        self._seeds = [int(each.generate_state(1, np.uint64)[0]) for each in sequence.spawn(4)[2:]]
        self._states = [torch.Generator("cpu").manual_seed(self._seeds[0]).get_state()]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw from these generators inside the block; afterwards the process has its own again."""
        before = [generator.get_state() for generator in _generators()]
        self._install(self._states)
        try:
            yield
        finally:
            self._states = [generator.get_state() for generator in _generators()]
            self._install(before)

    def _install(self, states: Sequence[Tensor]) -> None:
        for number, generator in enumerate(_generators()):  # a state of a GPU has none on a machine without one
            if number < len(states):
                generator.set_state(states[number])
            else:  # CUDA has been initialised since
                generator.manual_seed(self._seeds[1])

    def state_dict(self) -> dict[str, Any]:
        return {"torch": [state.clone() for state in self._states]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._states = [each.cpu().clone() for each in state["torch"]]


def _generators() -> Sequence[torch.Generator]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        return (torch.default_generator,)
    return torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]


def seed_process(seed: int, replica: int) -> None:
    """Seed the generators of Python and NumPy, which all replicas of this process share, by the first of them."""
    python, numpy_ = np.random.SeedSequence(seed, spawn_key=(replica,)).spawn(2)
    random.seed(int(python.generate_state(1, np.uint64)[0]))
    np.random.seed(numpy_.generate_state(4))


def process_random() -> dict[str, Any]:
    """Return the state of the generators of Python and NumPy, as JSON."""
    name, words, *rest = np.random.get_state()
    return {"python": random.getstate(), "numpy": [name, [int(word) for word in words], *rest]}


def load_process_random(state: Mapping[str, Any]) -> None:
    """Restore what `process_random` returned."""
    version, words, normal = state["python"]
    random.setstate((version, tuple(words), normal))
    name, numpy_words, *rest = state["numpy"]
    np.random.set_state((name, np.array(numpy_words, dtype=np.uint32), *rest))


@dataclass(eq=False)
class Replica:
    """The model, inner loop, data and outer loop of one replica."""

    number: int
    model: LanguageModel
    inner: InnerLoop
    sampler: Batches
    random_state: RandomState
    gradients: GradientAverager
    diloco: DiLoCo | None = None
