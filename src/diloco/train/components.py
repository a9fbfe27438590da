"""Builds fragments, codecs, optimizers, rules and transports from settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from diloco.algorithm import (
    Adam,
    AlphaMerge,
    AverageRule,
    Codec,
    CodecSettings,
    Fragment,
    FragmentSettings,
    MeanEncoding,
    MergeRule,
    MergeSettings,
    Nesterov,
    OuterOptimizer,
    OuterSettings,
    RebaseMerge,
    ScalarSchedule,
    SendersMean,
    Sgd,
    ValueSchedule,
    make_codec,
    partition,
)
from diloco.checkpoint import open_checkpoint
from diloco.errors import CheckpointError, ConfigurationError, ContractError, FragmentError
from diloco.model import LanguageModel, build_language_model, with_vocabulary
from diloco.plugins import call, is_own
from diloco.testing import check_average_rule, check_codec, check_merge_rule, check_outer_optimizer
from diloco.train.inner_optimizer import check_inner_arguments
from diloco.train.resolve import make_schedule
from diloco.train.settings import RunSettings
from diloco.transport import InProcessTransport, Link, TransportSettings, VirtualNetwork, parse_fault

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


def make_fragments(settings: FragmentSettings, model: LanguageModel) -> tuple[Fragment, ...]:
    """Partition ``model`` into fragments as resolved ``settings`` say.

    Raises:
        FragmentError: if the model can't be partitioned like that. `resolve` can't detect this for a model of unknown
            depth.
    """
    number = settings.num_fragments or 1
    try:
        return partition(model, num_fragments=number, strategy=settings.strategy, patterns=settings.patterns)
    except FragmentError as error:
        if settings.strategy in ("balanced", "patterns"):
            raise
        raise FragmentError(
            f"This model has too few layers for sync.num_fragments={number}. Use fewer fragments, or "
            'sync.fragment_strategy = "balanced", which may split layers.'
        ) from error


def make_merge_rule(settings: MergeSettings) -> MergeRule:
    """Return the merge rule of resolved settings."""
    if is_own(settings.rule):
        rule: MergeRule = call("sync.merge", settings.rule, kind=MergeRule, arguments=settings.arguments)
        return rule
    return RebaseMerge() if settings.rule == "rebase" else AlphaMerge(settings.alpha or 0.0)


def make_configured_codec(settings: CodecSettings) -> Codec:
    """Return the codec of resolved settings."""
    return make_codec(settings.name or "float32", **settings.parameters())


def make_mean_encoding(settings: RunSettings) -> MeanEncoding:
    """Return the encoding in which resolved settings send means."""
    return MeanEncoding.of(_mean_codec(settings))


def _mean_codec(settings: RunSettings) -> Codec | str:
    name = settings.transport.mean_codec
    return make_codec(name, block_size=settings.codec.block_size) if name in ("int8", "fp4") else name


def make_outer_optimizer(settings: OuterSettings, outer_steps: int) -> OuterOptimizer:
    """Return the outer optimizer of resolved settings.

    Args:
        outer_steps: rounds of one fragment in the whole run, which the schedules span.
    """
    learning_rate: ScalarSchedule = settings.learning_rate if settings.learning_rate is not None else 0.7
    if settings.learning_rate_schedule != "constant" and not callable(learning_rate):
        learning_rate = ValueSchedule(
            peak=learning_rate,
            kind=settings.learning_rate_schedule,
            total_steps=max(1, outer_steps),
            final_ratio=settings.learning_rate_final_ratio,
        )
    if settings.name == "sgd":
        return Sgd(learning_rate=learning_rate)
    if settings.name == "adam":
        return Adam(learning_rate=learning_rate, betas=settings.betas, epsilon=settings.epsilon)
    momentum: ScalarSchedule = settings.momentum
    if settings.momentum_warmup_outer_steps:
        momentum = ValueSchedule(peak=settings.momentum, warmup_steps=settings.momentum_warmup_outer_steps)
    if is_own(settings.name):
        offered = {"learning_rate": learning_rate, "momentum": momentum}
        outer: OuterOptimizer = call(
            "sync.outer", settings.name, kind=OuterOptimizer, arguments=settings.arguments, offered=offered
        )
        return outer
    return Nesterov(learning_rate=learning_rate, momentum=momentum)


def check_own_code(settings: RunSettings) -> None:
    """Construct the user's own components that the settings name and check them with `diloco.testing`.

    Raises:
        ConfigurationError: if a component can't be constructed or violates its contract.
    """
    codec, outer, merge = settings.codec, settings.outer, settings.merge
    checks: tuple[tuple[str, str | None, Callable[[], object]], ...] = (
        ("sync.codec", codec.name, lambda: check_codec(lambda: make_configured_codec(codec))),
        ("sync.outer", outer.name, lambda: check_outer_optimizer(make_outer_optimizer(outer, 100))),
        ("sync.average", outer.average, lambda: check_average_rule(make_average_rule(outer))),
        ("sync.merge", merge.rule, lambda: check_merge_rule(make_merge_rule(merge))),
        ("optimizer.name", settings.optimizer.name, lambda: check_inner_arguments(settings.inner)),
    )
    for key, name, check in checks:
        try:
            if is_own(name):
                check()
        except ContractError as error:
            raise ConfigurationError(f"{key}={name} can't be used: {error}") from error


def make_average_rule(settings: OuterSettings) -> AverageRule | None:
    """Return the rule that averages contributions, or None for the weighted mean."""
    if is_own(settings.average):
        rule: AverageRule = call(
            "sync.average", settings.average, kind=AverageRule, arguments=settings.average_arguments
        )
        return rule
    return {"mean": None, "senders": SendersMean()}[settings.average]


def outer_arguments(settings: RunSettings, model: LanguageModel) -> dict[str, Any]:
    """Return the arguments of `DiLoCo` that are the same on all replicas, by name."""
    steps = settings.train.steps - settings.train.data_parallel_steps
    return {
        "schedule": make_schedule(settings),
        "fragments": make_fragments(settings.fragments, model),
        "outer_optimizer": make_outer_optimizer(settings.outer, steps // settings.sync.inner_steps),
        "merge": make_merge_rule(settings.merge),
        "codec": make_configured_codec(settings.codec),
        "error_feedback": settings.codec.kept_loss,
        "max_norm": settings.outer.max_norm,
        "mean_codec": _mean_codec(settings),
        "average": make_average_rule(settings.outer),
    }


def make_links(settings: TransportSettings) -> list[Link]:
    """Return the emulated link of each replica. Without settings, bandwidth is infinite and latency is 0."""
    bandwidths = _each(settings.bandwidth_bits_per_s or (math.inf,), settings.replicas)
    latencies = _each(settings.latency_s or (0.0,), settings.replicas)
    return [Link(bandwidth, latency) for bandwidth, latency in zip(bandwidths, latencies, strict=True)]


def make_transport(settings: TransportSettings) -> InProcessTransport:
    """Return the in-process transport with its emulated links and faults."""
    network = None
    if settings.step_time_s:
        links = make_links(settings)
        network = VirtualNetwork(links, _each(settings.step_time_s, settings.replicas))
    return InProcessTransport(
        settings.replicas,
        min_contributors=settings.min_contributors,
        round_timeout_s=settings.round_timeout_s,
        network=network,
        faults=[parse_fault(text) for text in settings.faults],
    )


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
