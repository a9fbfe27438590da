"""From what somebody asked for to what will run: every derived value filled in, every impossible combination refused.

Pure, and without torch: it runs before anything else does.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TypeVar

from diloco.algorithm.schedule import SyncSchedule
from diloco.algorithm.settings import CodecSettings, FragmentSettings, MergeSettings, OuterSettings, ScheduleSettings
from diloco.errors import nearest
from diloco.train.checks import check_lengths, check_optimizers, check_places, refuse
from diloco.train.settings import RunSettings, TrainSettings

__all__ = ["CODEC_NAMES", "LAYERS_PER_FRAGMENT", "notes", "resolve"]

CODEC_NAMES = ("float32", "float16", "bfloat16", "int8", "fp4")
"""The codecs of `diloco.algorithm.codec`, which imports torch; a test compares the two."""

GRADIENT_CODECS = ("float32", "float16", "bfloat16")
"""What data-parallel training can send its gradients as."""

LAYERS_PER_FRAGMENT = 3
"""Streaming DiLoCo, Fig. 6: three layers per fragment at every scale."""

S = TypeVar("S", bound=RunSettings)


def resolve(settings: S, *, num_layers: int | None = None, max_sequence_length: int | None = None) -> S:
    """The settings with everything derived, and proof that they can work together.

    Resolving twice gives the same as resolving once. What stays None has a meaning of its own: no end before the last
    step, no clipping, torch's own number of threads, all replicas as `min_contributors`, offsets spread evenly, and
    the tokeniser's vocabulary.

    Args:
        settings: what was asked for.
        num_layers: transformer layers of the model; None when unknown: P has no default then, and is not checked
            against them.
        max_sequence_length: of the model; None: the settings say it, or, where the model has a source, nobody.

    Raises:
        ConfigurationError: for settings that cannot work; it says what would.
    """
    if settings.transport.name == "hivemind":  # they come and go; what is planned with is how many begin
        replicas = settings.swarm.start_replicas
        settings = dataclasses.replace(settings, transport=dataclasses.replace(settings.transport, replicas=replicas))
    if max_sequence_length is None and settings.model.source is None:
        max_sequence_length = settings.model.max_sequence_length
    check_lengths(settings, max_sequence_length)
    check_optimizers(settings)
    check_places(settings)
    settings = dataclasses.replace(
        settings,
        train=_resolve_start(settings),
        outer=_resolve_outer(settings),
        codec=_resolve_codec(settings),
        merge=_resolve_merge(settings),
        fragments=_resolve_fragments(settings, num_layers),
        schedule=_resolve_schedule(settings),
    )
    _check_fragments(settings, num_layers)
    steps = settings.train.steps
    evaluation, checkpoint, inner = settings.evaluation, settings.checkpoint, settings.inner
    if evaluation.every_steps is None:
        evaluation = dataclasses.replace(evaluation, every_steps=max(1, steps // 10))
    if checkpoint.every_steps is None:
        checkpoint = dataclasses.replace(checkpoint, every_steps=max(1, steps // 4))
    if inner.decay_steps is None and inner.schedule == "wsd":
        inner = dataclasses.replace(inner, decay_steps=min(max(1, steps // 5), steps - inner.warmup_steps))
    return dataclasses.replace(settings, evaluation=evaluation, checkpoint=checkpoint, inner=inner)


def notes(settings: RunSettings) -> tuple[str, ...]:
    """What is allowed and probably not meant, a sentence each; for resolved settings."""
    found = []
    if settings.algorithm in ("streaming", "diloco"):
        if settings.merge.alpha == 1:
            found.append("merge.alpha=1: replicas never take over anything from each other; they train alone.")
        local_steps = settings.train.steps - settings.train.data_parallel_steps
        if 0 < local_steps < settings.schedule.inner_steps:
            found.append(
                f"No fragment is ever sent: the {local_steps} steps after the shared start are fewer than "
                f"schedule.inner_steps={settings.schedule.inner_steps}, and the global parameters do not move."
            )
    alone = settings.transport.replicas == 1 and settings.transport.name != "hivemind"
    if alone and settings.algorithm != "none":
        found.append("transport.replicas=1: one replica, so the mean is over itself.")
    return tuple(found)


def _resolve_start(settings: RunSettings) -> TrainSettings:
    """A data-parallel run is a shared start from its first step to its last, so a share of it says nothing."""
    if settings.algorithm == "data-parallel":
        return dataclasses.replace(settings.train, data_parallel_steps=0)
    return settings.train


def _resolve_outer(settings: RunSettings) -> OuterSettings:
    if settings.outer.learning_rate is None:
        default = 0.4 if settings.algorithm == "streaming" else 0.7
        return dataclasses.replace(settings.outer, learning_rate=default)
    return settings.outer


def _resolve_codec(settings: RunSettings) -> CodecSettings:
    codec, algorithm = settings.codec, settings.algorithm
    if codec.name is None:
        codec = dataclasses.replace(codec, name="fp4" if algorithm == "streaming" else "float32")
    if codec.name not in CODEC_NAMES:
        raise refuse(f"codec.name={codec.name!r}", f"{nearest(str(codec.name), CODEC_NAMES).rstrip('?.')}")
    if not 2 <= codec.block_size <= 65536 or codec.block_size % 2:
        raise refuse(f"codec.block_size={codec.block_size}", "an even number from 2 to 65536 would work")
    if algorithm == "data-parallel" and codec.name not in GRADIENT_CODECS:
        raise refuse(
            f"codec.name={codec.name!r} with algorithm='data-parallel'",
            f"its gradients can travel as {', '.join(GRADIENT_CODECS)} (--codec float32); "
            f"--algorithm streaming or diloco would send pseudo-gradients as {codec.name}",
        )
    if algorithm == "none" and codec.name != "float32":
        raise refuse(
            f"codec.name={codec.name!r} with algorithm='none'",
            "independent replicas send nothing; without --codec, or with another --algorithm it would work",
        )
    if codec.error_feedback and (codec.name == "float32" or algorithm in ("data-parallel", "none")):
        raise refuse(
            f"codec.error_feedback=true with codec.name={codec.name!r} and algorithm={algorithm!r}",
            "there is no loss to feed back; a lossy codec such as --codec int8 with --algorithm streaming or diloco, "
            "or no error feedback would work",
        )
    return codec


def _resolve_merge(settings: RunSettings) -> MergeSettings:
    merge, algorithm = settings.merge, settings.algorithm
    if merge.alpha is not None and not 0 <= merge.alpha <= 1:
        raise refuse(f"merge.alpha={merge.alpha}", "0 to 1 would work")
    if merge.alpha is not None and merge.rule == "rebase":
        raise refuse(
            f"merge.alpha={merge.alpha} with merge.rule='rebase'", "one of the two would work: rebase has no alpha"
        )
    if merge.alpha and algorithm != "streaming":
        raise refuse(
            f"merge.alpha={merge.alpha} with algorithm={algorithm!r}",
            "only Streaming DiLoCo mixes local and global parameters; --algorithm streaming would work",
        )
    rule = merge.rule
    if rule is None:
        rule = "rebase" if algorithm == "streaming" and merge.alpha is None else "alpha"
    if rule == "rebase" and algorithm == "diloco":
        raise refuse(
            "merge.rule='rebase' with algorithm='diloco'",
            "DiLoCo merges in the step in which it sends, with nothing to rebase; --algorithm streaming would work",
        )
    alpha = (merge.alpha or 0.0) if rule == "alpha" else None
    return dataclasses.replace(merge, rule=rule, alpha=alpha)


def _resolve_fragments(settings: RunSettings, num_layers: int | None) -> FragmentSettings:
    fragments, listed = settings.fragments, len(settings.fragments.patterns)
    if fragments.num_fragments is not None and fragments.num_fragments < 1:
        raise refuse(f"fragments.num_fragments={fragments.num_fragments}", "at least 1 would work")
    if listed and fragments.num_fragments not in (None, listed):
        raise refuse(
            f"fragments.num_fragments={fragments.num_fragments} with {listed} lists in fragments.patterns",
            f"{listed}, or leaving it out would work",
        )
    number = fragments.num_fragments or listed or None
    if settings.algorithm == "diloco" and number not in (None, 1):
        raise refuse(
            f"{number} fragments with algorithm='diloco'",
            "DiLoCo sends the whole model at once; --algorithm streaming would work",
        )
    if number is None and settings.algorithm != "streaming":
        number = 1
    if number is None:
        if num_layers is None:
            raise refuse(
                "no fragments.num_fragments, with a model of unknown depth", "a number of fragments (P) would work"
            )
        # One fragment more for what is in no layer; no more than H, so that no two need the same step.
        number = min(math.ceil(num_layers / LAYERS_PER_FRAGMENT) + 1, max(1, settings.schedule.inner_steps))
    return dataclasses.replace(fragments, num_fragments=number)


def _resolve_schedule(settings: RunSettings) -> ScheduleSettings:
    schedule, algorithm = settings.schedule, settings.algorithm
    overlap = schedule.overlap_steps
    if overlap and algorithm != "streaming":
        raise refuse(
            f"schedule.overlap_steps={overlap} with algorithm={algorithm!r}",
            "only Streaming DiLoCo trains on while a fragment is on its way; --algorithm streaming would work",
        )
    if overlap is None:
        overlap = 1 if algorithm == "streaming" and schedule.inner_steps > 1 else 0
    return dataclasses.replace(schedule, overlap_steps=overlap)


def _check_fragments(settings: RunSettings, num_layers: int | None) -> None:
    """P against the layers; then P, H, tau and the offsets against each other (the schedule's own checks)."""
    number = settings.fragments.num_fragments or 1
    if num_layers is not None and settings.fragments.strategy in ("strided", "sequential") and number - 1 > num_layers:
        most = min(num_layers + 1, max(1, settings.schedule.inner_steps))
        raise refuse(
            f"fragments.num_fragments={number} for a model of {num_layers} layers",
            f"1 to {most} would work (one is for what is in no layer), "
            "or --fragments.strategy balanced, which may cut layers",
        )
    SyncSchedule(
        inner_steps=settings.schedule.inner_steps,
        num_fragments=number,
        overlap_steps=settings.schedule.overlap_steps or 0,
        offsets=settings.schedule.offsets,
    )
