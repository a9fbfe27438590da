"""Builds one replica of a run from the settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diloco.algorithm import make_codec, persistent_buffers
from diloco.data import Batches, Corpus, Prefetcher
from diloco.events import Event
from diloco.model import ENDS, LanguageModel, build_language_model
from diloco.outer import DiLoCo
from diloco.train.components import outer_arguments
from diloco.train.data_parallel import GradientAverager
from diloco.train.fleet.base import Fleet
from diloco.train.inner import InnerLoop, inner_learning_rate
from diloco.train.inner_optimizer import make_inner_optimizer
from diloco.train.parallel import Strategy, parallelise, prepare_model
from diloco.train.random_state import RandomState
from diloco.train.replica_state import ReplicaState
from diloco.train.settings import RunSettings
from diloco.trained import load_parameters

__all__ = ["Replica", "ReplicaMaker"]

AHEAD = 4  # default number of batches to prefetch if the data is read from files


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
        batches = _make_batches(settings, self.corpus, number, elastic=fleet.elastic)
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
            # a replica that misses a commit by an injected fault must not see it in the state of the others
            global_state_of=None if settings.network.faults else first.diloco,
        )

    def _inner(self, initial: Mapping[str, Tensor] | None) -> InnerLoop:
        settings, train, group = self.settings, self.settings.train, self.fleet.group
        strategy: Strategy = train.parallelism if group.size > 1 else "none"
        place = "cpu" if strategy == "fsdp" else self.device
        model = build_language_model(
            settings.model.settings, seed=settings.seed, device=place, definition=self.definition
        )
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


def _make_batches(settings: RunSettings, corpus: Corpus, number: int, *, elastic: bool) -> Batches:
    """Return the batches of replica ``number``, prefetched in a thread if the settings say so or files are read."""
    train, replicas, ahead = settings.train, settings.network.replicas, settings.data.prefetch_batches
    batches = corpus.batches(
        sequence_length=train.sequence_length,
        batch_size=train.batch_size,
        seed=settings.seed,
        replica=number,
        num_replicas=None if elastic else replicas,
        sharding=settings.data.sharding,
    )
    ahead = (AHEAD if corpus.mapped else 0) if ahead is None else ahead
    return Prefetcher(batches, ahead, f"batches of replica {number}") if ahead else batches
