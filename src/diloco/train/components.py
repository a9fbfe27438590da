"""Builds fragments, codecs, optimizers, rules and transports from settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from diloco.algorithm import (
    AVERAGES,
    CODECS,
    MERGE_RULES,
    OUTER_OPTIMIZERS,
    AverageRule,
    Codec,
    FragmentLayout,
    MeanEncoding,
    MergeRule,
    OuterOptimizer,
    ScalarSchedule,
    SyncSettings,
    ValueSchedule,
    partition,
)
from diloco.checkpoint import open_checkpoint
from diloco.errors import CheckpointError, ConfigurationError, ContractError, FragmentError
from diloco.model import LanguageModel, build_language_model, with_vocabulary
from diloco.plugins import is_own
from diloco.testing import check_average_rule, check_codec, check_merge_rule, check_outer_optimizer
from diloco.train.inner import check_inner_arguments
from diloco.train.resolve import make_schedule
from diloco.train.settings import RunSettings
from diloco.transport import InProcessTransport, Link, VirtualNetwork

__all__ = [
    "check_own_code",
    "make_average_rule",
    "make_configured_codec",
    "make_fragments",
    "make_links",
    "make_mean_encoding",
    "make_merge_rule",
    "make_outer_optimizer",
    "make_transport",
    "outer_arguments",
    "outline",
    "stored_definition",
]


def make_fragments(settings: SyncSettings, model: LanguageModel) -> tuple[FragmentLayout, ...]:
    """Partition ``model`` into fragments as resolved ``settings`` say.

    Raises:
        FragmentError: if the model can't be partitioned like that. `resolve` can't detect this for a model of unknown
            depth.
    """
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


def make_merge_rule(settings: SyncSettings) -> MergeRule:
    """Return the merge rule of resolved settings."""
    arguments = settings.arguments_of("merge")
    rule: MergeRule = MERGE_RULES.make(settings.merge or "alpha", arguments, alpha=settings.merge_alpha or 0.0)
    return rule


def make_configured_codec(settings: SyncSettings) -> Codec:
    """Return the codec of resolved settings."""
    codec: Codec = CODECS.make(settings.codec or "float32", settings.arguments_of("codec"))
    return codec


def make_mean_encoding(settings: SyncSettings) -> MeanEncoding:
    """Return the encoding in which resolved settings send means."""
    return MeanEncoding.of(_mean_codec(settings))


def _mean_codec(settings: SyncSettings) -> Codec | str:
    name, block_size = settings.mean_codec, settings.arguments_of("codec").get("block_size", 256)
    return name if name == "auto" else CODECS.make(name, block_size=block_size)


def make_outer_optimizer(settings: SyncSettings, outer_steps: int) -> OuterOptimizer:
    """Return the outer optimizer of resolved settings.

    Args:
        outer_steps: rounds of one fragment in the whole run, which the schedules span.
    """
    arguments = dict(settings.arguments_of("outer"))
    rate = 0.7 if settings.outer_learning_rate is None else settings.outer_learning_rate
    learning_rate: ScalarSchedule = rate
    momentum: ScalarSchedule = settings.outer_momentum
    if not is_own(settings.outer):
        kind, final_ratio = arguments.pop("schedule", "constant"), arguments.pop("final_ratio", 0.0)
        if kind != "constant":
            steps = max(1, outer_steps)
            learning_rate = ValueSchedule(peak=rate, kind=kind, total_steps=steps, final_ratio=final_ratio)
        if warmup := arguments.pop("momentum_warmup", 0):
            momentum = ValueSchedule(peak=settings.outer_momentum, warmup_steps=warmup)
    outer: OuterOptimizer = OUTER_OPTIMIZERS.make(
        settings.outer, arguments, learning_rate=learning_rate, momentum=momentum
    )
    return outer


def check_own_code(settings: RunSettings) -> None:
    """Construct the components that the settings name, and check the user's own with `diloco.testing`.

    Raises:
        ConfigurationError: if a component can't be constructed or violates its contract.
    """
    sync, optimizer = settings.sync, settings.optimizer
    checks: tuple[tuple[str, str | None, Callable[[], Any], Callable[[Any], object]], ...] = (
        (
            "sync.codec",
            sync.codec,
            lambda: make_configured_codec(sync),
            lambda _: check_codec(lambda: make_configured_codec(sync)),
        ),
        ("sync.outer", sync.outer, lambda: make_outer_optimizer(sync, 100), check_outer_optimizer),
        ("sync.average", sync.average, lambda: make_average_rule(sync), check_average_rule),
        ("sync.merge", sync.merge, lambda: make_merge_rule(sync), check_merge_rule),
        ("optimizer.name", optimizer.name, lambda: check_inner_arguments(optimizer), bool),
    )
    for key, name, make, check in checks:
        made = make()
        try:
            if is_own(name):
                check(made)
        except ContractError as error:
            raise ConfigurationError(f"{key}={name} can't be used: {error}") from error


def make_average_rule(settings: SyncSettings) -> AverageRule | None:
    """Return the rule that averages contributions, or None for the weighted mean."""
    given = settings.arguments_of("average")
    arguments = {name: value for name, value in given.items() if name not in ("max_norm", "codec")}
    rule: AverageRule | None = AVERAGES.make(settings.average, arguments)
    return rule


def outer_arguments(settings: RunSettings, model: LanguageModel) -> dict[str, Any]:
    """Return the arguments of `DiLoCo` that are the same on all replicas, by name."""
    sync, steps = settings.sync, settings.train.steps - settings.train.data_parallel_steps
    return {
        "schedule": make_schedule(settings),
        "fragments": make_fragments(sync, model),
        "outer_optimizer": make_outer_optimizer(sync, steps // sync.inner_steps),
        "merge": make_merge_rule(sync),
        "codec": make_configured_codec(sync),
        "error_feedback": sync.error_feedback,
        "max_norm": sync.max_norm,
        "mean_codec": _mean_codec(sync),
        "average": make_average_rule(sync),
    }


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
    """Repeat a single value ``count`` times; leave several values as they are."""
    return values * count if len(values) == 1 else values


def outline(settings: RunSettings, vocab_size: int) -> LanguageModel:
    """Build the model of ``settings`` on the meta device, where it takes no memory.

    Args:
        vocab_size: the vocabulary size if neither the settings nor the model's source give one.
    """
    model = with_vocabulary(settings.model, vocab_size)
    return build_language_model(model, seed=0, device="meta", definition=stored_definition(settings))


def stored_definition(settings: RunSettings) -> Mapping[str, Any] | None:
    """Return the model's definition from the checkpoint that the run starts from, as the model's source may be gone.

    Return None if there is no such checkpoint or its model has another source.
    """
    source, resume, init_from = settings.model.source, settings.checkpoint.resume, settings.train.init_from
    places = [] if resume is None else [resume, *sorted(resume.glob("replica-*"))]  # a machine may have only these
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
