"""One replica of a run, the random numbers that are its own, and the steps that it trains."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diloco.algorithm import StepRate, steps_to_train, trains_at
from diloco.data import Batches
from diloco.membership import View
from diloco.model import LanguageModel
from diloco.outer import DiLoCo
from diloco.train.data_parallel import GradientAverager
from diloco.train.fleet import PeerFleet
from diloco.train.inner import InnerLoop

__all__ = [
    "DynamicSteps",
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
    """The inner loop, data and outer loop of one replica."""

    number: int
    inner: InnerLoop
    sampler: Batches
    random_state: RandomState
    gradients: GradientAverager
    diloco: DiLoCo | None = None

    @property
    def model(self) -> LanguageModel:
        """The model that it trains."""
        return self.inner.model


class DynamicSteps:
    """The scheduled steps that a replica of a swarm trains, from its own speed and the speeds of the others (DyLU).

    A slow replica trains an evenly spaced share of the steps. A skipped step only advances the schedule: learning rate,
    rounds and data continue as on every other replica, and its sequences are not trained in this epoch.
    """

    def __init__(self, replica: int, inner_steps: int, others: PeerFleet) -> None:
        self._replica = replica
        self._inner_steps = inner_steps
        self._others = others
        self._rate = StepRate()
        self._announced: tuple[int, View] | None = None  # the step and view of the last announcement

    def trains(self, step: int) -> bool:
        """Return whether this replica trains scheduled step ``step`` (counted from 0), the next to begin."""
        return self._trains(self._replica, step)

    def members_training(self, step: int, *, trained: bool) -> int:
        """Return how many members train step ``step``, as far as this replica knows; ``trained``: whether it did."""
        others = (member for member in self._others.view.members if member != self._replica)
        return trained + sum(self._trains(member, step) for member in others)

    @property
    def fraction(self) -> float:
        """The fraction of the scheduled steps that this replica trains now."""
        return self.steps_of(self._replica) / self._inner_steps

    def trained(self, compute_s: float) -> None:
        """Record a trained step that took ``compute_s`` seconds of pure compute."""
        self._rate.add(compute_s)

    def announce(self, step: int) -> None:
        """Announce this replica's speed after scheduled step ``step``: once every H steps and after a view change."""
        speed, view = self._rate.steps_per_s, self._others.view
        if speed is None:
            return
        if self._announced is None or self._announced[1] != view or step - self._announced[0] >= self._inner_steps:
            self._announced = step, view
            self._others.transport.announce_speed(speed)
            self._others.note(pace=self.fraction)

    def _trains(self, replica: int, step: int) -> bool:
        return trains_at(step, self.steps_of(replica), self._inner_steps)

    def steps_of(self, replica: int) -> int:
        """Return how many of H scheduled steps a member trains, as far as this replica knows."""
        known = dict(self._others.transport.speeds())
        if (mine := self._rate.steps_per_s) is not None:
            known[self._replica] = mine
        return steps_to_train(replica, known, self._inner_steps)
