"""Resolution of settings: derives every value that was left out and refuses combinations that can't work.

It is pure and does not import torch, so that it can run before anything else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from operator import attrgetter
from typing import TypeVar

from diloco.algorithm import AVERAGES, CODECS, MERGE_RULES, OUTER_OPTIMIZERS, SyncSchedule
from diloco.devices import check_device
from diloco.errors import ConfigurationError
from diloco.train.refusals import check_averaging, check_lengths, check_network, refuse_if
from diloco.train.settings import RunSettings

__all__ = ["LAYERS_PER_FRAGMENT", "make_schedule", "notes", "resolve"]

_GRADIENT_CODECS = ("float32", "float16", "bfloat16")  # the codecs for gradients of data-parallel training

LAYERS_PER_FRAGMENT = 3  # Streaming DiLoCo, Fig. 6: three layers per fragment at every scale

_MANY_ROUNDS, _HIGH_GAIN = 50, 2.0
"""With fewer rounds, a gain above this is too high: stock Nesterov lost up to 10 % in runs of 6 rounds (yeto, 27B)."""

S = TypeVar("S", bound=RunSettings)


def resolve(settings: S, *, num_layers: int | None = None, max_sequence_length: int | None = None) -> S:
    """Derive every setting that was left out and check that the settings work together.

    Resolving is idempotent. A setting that stays None has a meaning of its own: no end before the last step, no
    clipping.

    Args:
        num_layers: the number of transformer layers of the model. If it is None (unknown), the number of fragments has
            no default and is not checked against it.
        max_sequence_length: the longest sequence of the model. None: the value of ``settings.model``, or no limit if
            the model has a source.

    Raises:
        ConfigurationError: if the settings can't work; the message says which values would.
    """
    train, sync, resume = settings.train, settings.sync, settings.checkpoint.resume
    check_lengths(settings, max_sequence_length)
    check_averaging(settings)
    check_network(settings)
    check_device("train.device", train.device)
    refuse_if(
        resume is not None and train.init_from is not None,
        f"checkpoint.resume={resume} can't be combined with train.init_from={train.init_from}. Use one of them: "
        "--resume continues a run, --init-from starts a new run from saved parameters.",
    )
    rule, alpha = _merge(settings)
    number, overlap = _fragments_and_overlap(settings, num_layers)
    OUTER_OPTIMIZERS.check(sync.outer)
    AVERAGES.check(sync.average)
    if sync.mean_codec != "auto":
        CODECS.check(sync.mean_codec)
    derived: dict[str, object] = {
        "sync.codec": _codec(settings),
        "sync.merge": rule,
        "sync.merge_alpha": alpha,
        "sync.num_fragments": number,
        "sync.overlap_steps": overlap,
        # a data-parallel run consists of such steps only
        "train.data_parallel_steps": 0 if settings.algorithm == "data-parallel" else train.data_parallel_steps,
    }
    defaults: dict[str, float] = {
        "sync.outer_learning_rate": 0.4 if settings.algorithm == "streaming" else 0.7,
        "evaluation.every_steps": max(1, train.steps // 10),
        "checkpoint.every_steps": max(1, train.steps // 4),
    }
    missing = {name: value for name, value in defaults.items() if attrgetter(name)(settings) is None}
    return _with(settings, derived | missing)


def make_schedule(settings: RunSettings) -> SyncSchedule:
    """Return the synchronisation schedule of resolved settings."""
    sync = settings.sync
    return SyncSchedule(
        inner_steps=sync.inner_steps, num_fragments=sync.num_fragments or 1, overlap_steps=sync.overlap_steps or 0
    )


def notes(settings: RunSettings) -> tuple[str, ...]:
    """Return warnings, a sentence each, about resolved settings that are allowed but probably a mistake."""
    found = []
    if settings.algorithm in ("streaming", "diloco"):
        if settings.sync.merge_alpha == 1:
            found.append(
                "sync.merge_alpha=1: local parameters ignore the global parameters, so every replica trains alone."
            )
        found += _notes_on_rounds(settings)
    alone = settings.network.replicas == 1 and settings.network.transport != "hivemind"
    if alone and settings.algorithm != "none":
        found.append("network.replicas=1: the mean is over a single replica.")
    return tuple(found)


def _notes_on_rounds(settings: RunSettings) -> list[str]:
    """Return warnings about a number of rounds that is too small."""
    start, schedule = settings.train.data_parallel_steps, make_schedule(settings)
    steps, after = settings.train.steps - start, " after the shared start" if start else ""
    if steps <= 0:
        return []
    rounds = [schedule.rounds_of(fragment, steps) for fragment in range(schedule.num_fragments)]
    if not any(rounds):
        return [
            f"No fragment is ever sent, so the global parameters do not change: the {steps} steps{after} are fewer "
            f"than sync.inner_steps={schedule.inner_steps}."
        ]
    found = []
    if unsent := [fragment for fragment, count in enumerate(rounds) if not count]:
        found.append(
            f"Never sent in the {steps} steps{after}: fragment {', '.join(map(str, unsent))}. Its global "
            f"parameters do not change. With sync.inner_steps={schedule.inner_steps} the last fragment is first "
            f"sent after step {schedule.inner_steps + max(schedule.fragment_offsets)}."
        )
    gain = settings.sync.lasting_gain
    # after a shared start, a high gain was best even with 40 rounds (benchmarks/parity)
    if gain is not None and gain > _HIGH_GAIN and max(rounds) < _MANY_ROUNDS and not start:
        found.append(
            f"The outer optimizer has a gain of {gain:.3g} but too few rounds per fragment ({max(rounds)}) for its "
            f"momentum to build up. Below about {_MANY_ROUNDS} rounds, a gain of 1 to 2 often gives a lower loss. Try "
            "--outer-learning-rate 0.7 --outer-momentum 0.6."
        )
    return found


def _with(settings: S, values: Mapping[str, object]) -> S:
    """Return the settings with new ``values`` by key, such as ``train.steps``."""
    for key, value in values.items():
        section, name = key.split(".")
        changed = dataclasses.replace(getattr(settings, section), **{name: value})
        settings = dataclasses.replace(settings, **{section: changed})
    return settings


def _codec(settings: RunSettings) -> str:
    sync, algorithm = settings.sync, settings.algorithm
    name = sync.codec or ("fp4" if algorithm == "streaming" else "float32")
    CODECS.check(name)
    refuse_if(
        algorithm == "data-parallel" and name not in _GRADIENT_CODECS,
        f"sync.codec={name!r} can't carry the gradients of algorithm='data-parallel'. Use --codec float32, or one of "
        f"{', '.join(_GRADIENT_CODECS)}, or --algorithm streaming or diloco, which send pseudo-gradients.",
    )
    refuse_if(
        algorithm == "none" and name != "float32",
        f"sync.codec={name!r} can't be used with algorithm='none', whose independent replicas send nothing. Leave it "
        "out.",
    )
    refuse_if(
        sync.error_feedback > 0 and (name == "float32" or algorithm in ("data-parallel", "none")),
        f"sync.error_feedback={sync.error_feedback:g} can't be used with sync.codec={name!r} and algorithm="
        f"{algorithm!r}, where there is no loss to feed back. Use a lossy codec such as --codec int8 with --algorithm "
        "streaming or diloco.",
    )
    refuse_if(
        name == "topk2" and not sync.error_feedback,
        "sync.codec='topk2' drops 98 % of the values, which are lost without error feedback. Add --error-feedback "
        "0.95, for example.",
    )
    return name


def _merge(settings: RunSettings) -> tuple[str, float | None]:
    """Return the merge rule, and alpha if the rule has one."""
    sync, algorithm = settings.sync, settings.algorithm
    alpha = sync.merge_alpha
    refuse_if(
        alpha is not None and sync.merge not in (None, "alpha"),
        f"sync.merge_alpha={alpha} can't be used with sync.merge={sync.merge!r}, which has no alpha. Use one of the "
        "two.",
    )
    refuse_if(
        bool(alpha) and algorithm != "streaming",
        f"sync.merge_alpha={alpha} can't be used with algorithm={algorithm!r}, which does not mix local and global "
        "parameters. Use --algorithm streaming.",
    )
    rule = sync.merge or ("rebase" if algorithm == "streaming" and alpha is None else "alpha")
    MERGE_RULES.check(rule)
    refuse_if(
        rule == "rebase" and algorithm == "diloco",
        "sync.merge='rebase' can't be used with algorithm='diloco', which merges in the step in which it sends and so "
        "has nothing to rebase. Use --algorithm streaming.",
    )
    return rule, (alpha or 0.0) if rule == "alpha" else None


def _fragments_and_overlap(settings: RunSettings, num_layers: int | None) -> tuple[int, int]:
    """Return P and tau, after checking P, H and tau against each other and the layers."""
    sync, algorithm = settings.sync, settings.algorithm
    streaming, longest_cycle = algorithm == "streaming", max(1, sync.inner_steps)
    number, overlap = sync.num_fragments or (None if streaming else 1), sync.overlap_steps
    refuse_if(
        algorithm == "diloco" and number != 1,
        f"{number} fragments can't be used with algorithm='diloco', which sends the whole model at once. Use "
        "--algorithm streaming.",
    )
    if number is None:
        if num_layers is None:
            raise ConfigurationError("sync.num_fragments must be set, because the depth of this model is unknown.")
        # one fragment more for the parameters outside layers; at most H, so that no two share a step
        number = min(math.ceil(num_layers / LAYERS_PER_FRAGMENT) + 1, longest_cycle)
    if num_layers is not None and sync.fragment_strategy in ("strided", "sequential"):
        refuse_if(
            number - 1 > num_layers,
            f"sync.num_fragments={number} is too many for a model of {num_layers} layers. Use 1 to "
            f"{min(num_layers + 1, longest_cycle)} (one is for the parameters outside layers), or "
            "--sync.fragment-strategy balanced, which may split layers.",
        )
    refuse_if(
        bool(overlap) and not streaming,
        f"sync.overlap_steps={overlap} can't be used with algorithm={algorithm!r}: only Streaming DiLoCo trains while "
        "a fragment is in flight. Use --algorithm streaming.",
    )
    if overlap is None:
        overlap = 1 if streaming and sync.inner_steps > 1 else 0
    # the constructor checks the values
    schedule = SyncSchedule(inner_steps=sync.inner_steps, num_fragments=number, overlap_steps=overlap)
    refuse_if(
        schedule.whole_round_late and _merge(settings)[0] == "alpha",
        f"sync.overlap_steps={overlap}, a whole round late, can't be used with sync.merge='alpha', which drops what "
        "was trained since the fragment was sent: here everything. Use --sync.merge rebase, or fewer overlap steps.",
    )
    return number, overlap
