"""One replica of a run, put together as the settings say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diloco.algorithm.codec import make_codec
from diloco.data.batches import Batches, Prefetcher
from diloco.data.corpus import Corpus
from diloco.events import Event
from diloco.model.build import build_language_model
from diloco.model.language_model import LanguageModel
from diloco.model.loss import ENDS
from diloco.outer.diloco import DiLoCo
from diloco.train.components import outer_arguments
from diloco.train.data_parallel import GradientAverager
from diloco.train.fleet.base import Fleet
from diloco.train.inner import InnerLoop, inner_learning_rate
from diloco.train.inner_optimizer import make_inner_optimizer
from diloco.train.parallel import Strategy, parallelise, prepare_model
from diloco.train.random_state import RandomState
from diloco.train.replica_state import ReplicaState
from diloco.train.settings import RunSettings
from diloco.trained.load import load_parameters

__all__ = ["Replica", "give_own_model", "make_diloco", "make_replica"]

AHEAD = 4  # batches made ahead of the training while files are read, unless the settings say a number


@dataclass(eq=False)
class Replica:
    """What belongs to one replica."""

    number: int
    model: LanguageModel
    inner: InnerLoop
    sampler: Batches
    random_state: RandomState
    gradients: GradientAverager
    diloco: DiLoCo | None = None

    @property
    def state(self) -> ReplicaState:
        """What the ranks of the replica save of it."""
        return ReplicaState(self.inner, self.diloco)


def make_replica(
    settings: RunSettings,
    corpus: Corpus,
    fleet: Fleet,
    device: torch.device,
    number: int,
    initial: Mapping[str, Tensor] | None,
    definition: Mapping[str, Any] | None = None,
    like: Replica | None = None,
) -> Replica:
    """Replica ``number`` at step 0, without an outer loop.

    Args:
        initial: parameter name -> value to begin from; None: a fresh initialisation from the seed.
        definition: of the model, as `diloco.model.build.build_language_model` takes it.
        like: a replica that holds the same as long as gradients are averaged, and whose model and inner loop this one
            uses until `give_own_model`; None: it has its own.
    """
    inner = like.inner if like else _make_inner(settings, corpus, fleet, device, initial, definition)
    codec = settings.codec.name if settings.algorithm == "data-parallel" else None
    gradients = GradientAverager(inner.model, fleet.endpoint(number), make_codec(codec or "float32"), fleet.group)
    batches = _make_batches(settings, corpus, number, elastic=fleet.elastic)
    return Replica(number, inner.model, inner, batches, RandomState(settings.seed, number), gradients)


def give_own_model(
    settings: RunSettings,
    corpus: Corpus,
    fleet: Fleet,
    device: torch.device,
    replica: Replica,
    definition: Mapping[str, Any] | None = None,
) -> None:
    """A copy of the model and the inner loop, with all that they hold, for a replica that used another's."""
    shared = replica.inner
    inner = _make_inner(settings, corpus, fleet, device, None, definition)
    inner.model.load_saved_state(shared.model.saved_state())
    inner.load_state_dict(shared.state_dict())
    replica.model, replica.inner = inner.model, inner
    replica.gradients = GradientAverager(inner.model, fleet.endpoint(replica.number), replica.gradients.codec)


def _make_inner(
    settings: RunSettings,
    corpus: Corpus,
    fleet: Fleet,
    device: torch.device,
    initial: Mapping[str, Tensor] | None,
    definition: Mapping[str, Any] | None,
) -> InnerLoop:
    group = fleet.group
    strategy: Strategy = settings.train.parallelism if group.size > 1 else "none"
    model = build_language_model(
        settings.model, seed=settings.seed, device="cpu" if strategy == "fsdp" else device, definition=definition
    )
    if initial is not None:
        load_parameters(model, initial)
    prepare_model(model, settings.train)
    parallel = parallelise(model, strategy, group, device)
    end = corpus.tokenizer.eos_id if settings.train.document_masks else None
    return InnerLoop(
        parallel,
        make_inner_optimizer(settings.inner, model),
        learning_rate=inner_learning_rate(settings.inner, settings.train.steps),
        clip_norm=settings.inner.clip_norm,
        precision=settings.train.precision,
        accumulation=settings.train.gradient_accumulation,
        end_of_document=ENDS if corpus.train.marks_ends else end,
    )


def _make_batches(settings: RunSettings, corpus: Corpus, number: int, *, elastic: bool) -> Batches:
    """What replica ``number`` trains on; made ahead in a thread if the settings say so, or files are read."""
    train, replicas, ahead = settings.train, settings.transport.replicas, settings.data.prefetch_batches
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


def make_diloco(settings: RunSettings, replica: Replica, fleet: Fleet, on_event: Callable[[Event], None]) -> DiLoCo:
    """The outer loop of a replica, whose parameters become the global ones.

    Beside a GPU of Apple's, which lacks some operations of the codecs, global state is on the host.
    """
    on_host = settings.train.global_device == "cpu" or replica.inner.device.type == "mps"
    return DiLoCo(
        replica.model,
        replica.inner.optimizer,
        transport=fleet.endpoint(replica.number),
        **outer_arguments(settings, replica.model),
        global_device="cpu" if on_host else None,
        telemetry=settings.outer.telemetry,
        on_event=on_event,
        compare_arguments=False,  # the settings were, when the replicas met
    )
