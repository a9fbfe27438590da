"""Builds what settings name: the arguments of `DiLoCo`, transports, and the outline of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco.algorithm import (
    AVERAGES,
    CODECS,
    MERGE_RULES,
    OUTER_OPTIMIZERS,
    FragmentLayout,
    ScalarSchedule,
    SyncSettings,
    ValueSchedule,
    partition,
)
from diloco.checkpoint import open_checkpoint
from diloco.errors import CheckpointError, FragmentError
from diloco.model import LanguageModel, build_language_model, with_vocabulary
from diloco.outer import check_own_code
from diloco.plugins import is_own
from diloco.train.inner import check_inner_arguments
from diloco.train.resolve import make_schedule
from diloco.train.settings import RunSettings
from diloco.transport import InProcessTransport, Link, VirtualNetwork

__all__ = [
    "check_components",
    "make_fragments",
    "make_links",
    "make_transport",
    "outer_arguments",
    "outer_components",
    "outline",
    "stored_definition",
]


def outer_components(sync: SyncSettings, outer_steps: int = 1) -> dict[str, Any]:
    """Return those arguments of `DiLoCo` that follow from resolved settings alone, by name.

    The schedules of the outer optimizer span ``outer_steps``, the rounds of one fragment in the whole run.
    """
    codec, mean_codec = sync.arguments_of("codec"), sync.mean_codec
    average = {name: v for name, v in sync.arguments_of("average").items() if name not in ("max_norm", "codec")}
    outer = dict(sync.arguments_of("outer"))
    rate = 0.7 if sync.outer_learning_rate is None else sync.outer_learning_rate
    learning_rate: ScalarSchedule = rate
    momentum: ScalarSchedule = sync.outer_momentum
    if not is_own(sync.outer):
        kind, final_ratio = outer.pop("schedule", "constant"), outer.pop("final_ratio", 0.0)
        if kind != "constant":
            steps = max(1, outer_steps)
            learning_rate = ValueSchedule(peak=rate, kind=kind, total_steps=steps, final_ratio=final_ratio)
        if warmup := outer.pop("momentum_warmup", 0):
            momentum = ValueSchedule(peak=sync.outer_momentum, warmup_steps=warmup)
    if mean_codec != "auto":
        mean_codec = CODECS.make(mean_codec, block_size=codec.get("block_size", 256))
    return {
        "codec": CODECS.make(sync.codec or "float32", codec),
        "mean_codec": mean_codec,
        "error_feedback": sync.error_feedback,
        "outer_optimizer": OUTER_OPTIMIZERS.make(sync.outer, outer, learning_rate=learning_rate, momentum=momentum),
        "merge": MERGE_RULES.make(sync.merge or "alpha", sync.arguments_of("merge"), alpha=sync.merge_alpha or 0.0),
        "average": AVERAGES.make(sync.average, average),
        "max_norm": sync.max_norm,
    }


def outer_arguments(settings: RunSettings, model: LanguageModel) -> dict[str, Any]:
    """Return the arguments of `DiLoCo` that are the same on all replicas, by name."""
    steps = settings.train.steps - settings.train.data_parallel_steps
    return {
        "schedule": make_schedule(settings),
        "fragments": make_fragments(settings.sync, model),
        **outer_components(settings.sync, steps // settings.sync.inner_steps),
    }


def check_components(settings: RunSettings) -> None:
    """Construct the components that the settings name, and check the user's own against their contracts."""
    check_own_code(outer_components(settings.sync))
    check_inner_arguments(settings.optimizer)


def make_fragments(settings: SyncSettings, model: LanguageModel) -> tuple[FragmentLayout, ...]:
    """Partition ``model`` into fragments as resolved ``settings`` say."""
    number = settings.num_fragments or 1
    try:
        return partition(model, num_fragments=number, strategy=settings.fragment_strategy)
    except FragmentError as error:
        if settings.fragment_strategy == "balanced":
            raise
        raise FragmentError(
            f"This model has too few layers for sync.num_fragments={number}. Use fewer fragments, or "
            'sync.fragment_strategy = "balanced", which may split layers.'
        ) from error


def make_links(settings: RunSettings) -> list[Link]:
    """Return the emulated link of each replica. Without settings, bandwidth is infinite and latency is 0."""
    emulate, replicas = settings.emulate, settings.network.replicas
    bandwidths = _each(emulate.bandwidth or (math.inf,), replicas)
    latencies = _each(emulate.latency or (0.0,), replicas)
    return [Link(bandwidth, latency) for bandwidth, latency in zip(bandwidths, latencies, strict=True)]


def make_transport(settings: RunSettings) -> InProcessTransport:
    """Return the in-process transport with its emulated links."""
    network, replicas = None, settings.network.replicas
    if settings.emulate.step_time:
        network = VirtualNetwork(make_links(settings), _each(settings.emulate.step_time, replicas))
    return InProcessTransport(replicas, round_timeout_s=settings.network.round_timeout, network=network)


def _each(values: tuple[float, ...], count: int) -> tuple[float, ...]:
    return values * count if len(values) == 1 else values


def outline(settings: RunSettings, vocab_size: int) -> LanguageModel:
    """Build the model on the meta device; ``vocab_size`` counts if neither settings nor the model's source give one."""
    model = with_vocabulary(settings.model, vocab_size)
    return build_language_model(model, seed=0, device="meta", definition=stored_definition(settings))


def stored_definition(settings: RunSettings) -> Mapping[str, Any] | None:
    """Return the model's definition from the checkpoint that the run starts from, as the model's source may be gone.

    Return None if there is no such checkpoint or its model has another source.
    """
    source, resume, init_from = settings.model.source, settings.checkpoint.resume, settings.train.init_from
    places = []
    if resume is not None:
        places = [Path(resume), *sorted(Path(resume).glob("replica-*"))]  # a machine may have only the latter
    if init_from is not None and init_from.suffix != ".safetensors":
        places.append(init_from)
    for place in places if source is not None else ():
        try:
            checkpoint = open_checkpoint(place)
            definition = checkpoint.fact("definition", dict, {})
            stored = checkpoint.fact("model", dict).get("source")
        except CheckpointError:
            continue  # the code that loads this checkpoint reports the error
        if definition and stored == source:
            return definition
    return None
