"""One replica of a run: its model, inner loop, data, random numbers and outer loop, built from the settings."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diloco.algorithm import make_codec, persistent_buffers
from diloco.data import Batches, Corpus
from diloco.events import Event
from diloco.model import ENDS, LanguageModel, build_language_model
from diloco.outer import DiLoCo
from diloco.train.components import outer_arguments
from diloco.train.data_parallel import GradientAverager
from diloco.train.fleet import Fleet
from diloco.train.inner import InnerLoop, inner_learning_rate, make_inner_optimizer
from diloco.train.parallel import Strategy, parallelise, prepare_model
from diloco.train.replica_state import ReplicaState
from diloco.train.settings import RunSettings
from diloco.trained import load_parameters

__all__ = [
    "RandomState",
    "Replica",
    "ReplicaMaker",
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

    @property
    def state(self) -> ReplicaState:
        """The state that the ranks of the replica save."""
        return ReplicaState(self.inner, self.diloco)


@dataclass(frozen=True)
class ReplicaMaker:
    """A factory for the replicas of a process."""

    settings: RunSettings  # resolved
    corpus: Corpus
    fleet: Fleet
    device: torch.device  # the device to train on
    initial: Mapping[str, Tensor] | None  # parameter name -> initial value; None: new values, or those of the source
    definition: Mapping[str, Any] | None  # the model's definition for `diloco.model.build.build_language_model`

    def replica(self, number: int, first: Replica | None) -> Replica:
        """Return replica ``number`` at step 0, without an outer loop.

        It shares the model and inner loop of ``first`` if possible: while gradients are averaged, both replicas hold
        the same values after every step. `part` separates them later.
        """
        settings, fleet = self.settings, self.fleet
        shared = first is not None and _may_share(first.model, settings)
        inner = first.inner if first and shared else self._inner(self.initial)
        codec = settings.sync.codec if settings.algorithm == "data-parallel" else None
        gradients = GradientAverager(inner.model, fleet.endpoint(number), make_codec(codec or "float32"), fleet.group)
        batches = self.corpus.batches(
            sequence_length=settings.train.sequence_length,
            batch_size=settings.train.batch_size,
            seed=settings.seed,
            replica=number,
            num_replicas=None if fleet.elastic else settings.network.replicas,
        )
        return Replica(number, inner.model, inner, batches, RandomState(settings.seed, number), gradients)

    def part(self, first: Replica, others: Sequence[Replica]) -> None:
        """Give each replica that shares the model and inner loop of ``first`` a copy of both, with their state."""
        for replica in others:
            if replica.model is first.model:
                inner = self._inner(None)
                inner.model.load_saved_state(first.model.saved_state())
                inner.load_state_dict(first.inner.state_dict())
                replica.model, replica.inner = inner.model, inner
                endpoint = self.fleet.endpoint(replica.number)
                replica.gradients = GradientAverager(inner.model, endpoint, replica.gradients.codec)

    def diloco(self, replica: Replica, first: Replica, on_event: Callable[[Event], None]) -> DiLoCo:
        """Return the outer loop of a replica. The parameters of the first replica become the global parameters.

        With an Apple GPU, which lacks some operations of the codecs, the global state is kept on the host.
        """
        settings = self.settings
        on_host = settings.train.global_device == "cpu" or replica.inner.device.type == "mps"
        return DiLoCo(
            replica.model,
            replica.inner.optimizer,
            transport=self.fleet.endpoint(replica.number),
            **outer_arguments(settings, replica.model),
            global_device="cpu" if on_host else None,
            on_event=on_event,
            compare_arguments=False,  # the replicas compared their settings when they met
            global_state_of=first.diloco,
        )

    def _inner(self, initial: Mapping[str, Tensor] | None) -> InnerLoop:
        settings, train, group = self.settings, self.settings.train, self.fleet.group
        strategy: Strategy = train.parallelism if group.size > 1 else "none"
        place = "cpu" if strategy == "fsdp" else self.device
        model = build_language_model(settings.model, seed=settings.seed, device=place, definition=self.definition)
        if initial is not None:
            load_parameters(model, initial)
        prepare_model(model, train)
        end = self.corpus.tokenizer.eos_id if settings.data.document_masks else None
        return InnerLoop(
            parallelise(model, strategy, group, self.device),
            make_inner_optimizer(settings.optimizer, model),
            learning_rate=inner_learning_rate(settings.optimizer, train.steps),
            clip_norm=settings.optimizer.clip_norm,
            precision=train.precision,
            accumulation=train.gradient_accumulation,
            end_of_document=ENDS if self.corpus.train.marks_ends else end,
        )


def _may_share(model: LanguageModel, settings: RunSettings) -> bool:
    """Return whether one model can serve all replicas that average gradients.

    It can't with buffers, which each replica's batches change, or with the gradient scaler of float16, which checks the
    gradients of each replica.
    """
    plain = not model.source_has and not persistent_buffers(model)
    return plain and settings.train.precision != "float16"
