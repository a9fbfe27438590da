"""Resolution of settings: derives every value that was left out and refuses combinations that can't work.

It is pure and does not import torch, so that it can run before anything else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from operator import attrgetter
from typing import TypeVar

from diloco.algorithm import AVERAGES, CODECS, MERGE_RULES, OUTER_OPTIMIZERS, SyncSchedule, learning_rate_of_gain
from diloco.devices import check_device
from diloco.errors import ConfigurationError
from diloco.train.refusals import check_averaging, check_lengths, check_means, check_transport, refuse_if
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
    clipping, torch's own number of threads, all replicas as `min_contributors`, evenly spread offsets, and the
    vocabulary of the tokeniser.

    Args:
        num_layers: the number of transformer layers of the model. If it is None (unknown), the number of fragments has
            no default and is not checked against it.
        max_sequence_length: the longest sequence of the model. None: the value of ``settings.model``, or no limit if
            the model has a source.

    Raises:
        ConfigurationError: if the settings can't work; the message says which values would.
    """
    if settings.transport.name == "hivemind":  # peers join and leave; plans assume the number at the start
        settings = _with(settings, {"transport.replicas": settings.swarm.start_replicas})
    train, inner, resume = settings.train, settings.inner, settings.checkpoint.resume
    check_lengths(settings, max_sequence_length)
    check_averaging(settings)
    check_means(settings)
    check_transport(settings)
    check_device("train.device", train.device)
    refuse_if(
        resume is not None and train.init_from is not None,
        f"checkpoint.resume={resume} can't be combined with train.init_from={train.init_from}. Use one of them: "
        "--resume continues a run, --init-from starts a new run from saved parameters.",
    )
    settings = _gain_as_learning_rate(settings)
    rule, alpha = _merge(settings)
    number, overlap = _fragments_and_overlap(settings, num_layers)
    derived: dict[str, object] = {
        "codec.name": _codec(settings),
        "merge.rule": rule,
        "merge.alpha": alpha,
        "fragments.num_fragments": number,
        "schedule.overlap_steps": overlap,
        "inner.decay_steps": inner.decay_over(train.steps) if inner.schedule == "wsd" else inner.decay_steps,
        # a data-parallel run consists of such steps only
        "train.data_parallel_steps": 0 if settings.algorithm == "data-parallel" else train.data_parallel_steps,
    }
    outer = settings.outer
    OUTER_OPTIMIZERS.check(outer.name)
    AVERAGES.check(outer.average)
    defaults: dict[str, float] = {
        "outer.learning_rate": 0.4 if settings.algorithm == "streaming" else 0.7,
        "evaluation.every_steps": max(1, train.steps // 10),
        "checkpoint.every_steps": max(1, train.steps // 4),
    }
    missing = {name: value for name, value in defaults.items() if attrgetter(name)(settings) is None}
    return _with(settings, derived | missing)


def make_schedule(settings: RunSettings) -> SyncSchedule:
    """Return the synchronisation schedule of resolved settings."""
    schedule, fragments = settings.schedule, settings.fragments
    return SyncSchedule(
        inner_steps=schedule.inner_steps,
        num_fragments=fragments.num_fragments or 1,
        overlap_steps=schedule.overlap_steps or 0,
        offsets=schedule.offsets,
    )


def notes(settings: RunSettings) -> tuple[str, ...]:
    """Return warnings, a sentence each, about resolved settings that are allowed but probably a mistake."""
    found = []
    if settings.algorithm in ("streaming", "diloco"):
        if settings.merge.alpha == 1:
            found.append("merge.alpha=1: local parameters ignore the global parameters, so every replica trains alone.")
        found += _notes_on_rounds(settings)
    alone = settings.transport.replicas == 1 and settings.transport.name != "hivemind"
    if alone and settings.algorithm != "none":
        found.append("transport.replicas=1: the mean is over a single replica.")
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
            f"than schedule.inner_steps={schedule.inner_steps}."
        ]
    found = []
    if unsent := [fragment for fragment, count in enumerate(rounds) if not count]:
        found.append(
            f"Fragment {', '.join(map(str, unsent))} is never sent in the {steps} steps{after}, so its global "
            f"parameters do not change: with schedule.inner_steps={schedule.inner_steps} the last fragment is first "
            f"sent after step {schedule.inner_steps + max(schedule.fragment_offsets)}."
        )
    gain = settings.outer.lasting_gain
    # after a shared start, a high gain was best even with 40 rounds (benchmarks/parity)
    if gain is not None and gain > _HIGH_GAIN and max(rounds) < _MANY_ROUNDS and not start:
        found.append(
            f"The outer optimizer has a gain of {gain:.3g} but only {max(rounds)} rounds per fragment, too few for its "
            f"momentum to build up. Below about {_MANY_ROUNDS} rounds, a gain of 1 to 2 often gives a lower loss. Try "
            "--outer.gain 1.75 --outer.momentum 0.6."
        )
    return found


def _with(settings: S, values: Mapping[str, object]) -> S:
    """Return the settings with new ``values`` by key, such as ``train.steps``."""
    for key, value in values.items():
        section, name = key.split(".")
        changed = dataclasses.replace(getattr(settings, section), **{name: value})
        settings = dataclasses.replace(settings, **{section: changed})
    return settings


def _gain_as_learning_rate(settings: S) -> S:
    """Return the settings with the outer gain, if any, replaced by the learning rate that follows from it."""
    outer, momentum = settings.outer, settings.outer.lasting_momentum
    if outer.gain is None:
        return settings
    refuse_if(
        outer.learning_rate is not None,
        f"outer.gain={outer.gain:g} can't be combined with outer.learning_rate={outer.learning_rate}, because the gain "
        "determines the learning rate. Use one of them.",
    )
    if momentum is None:
        raise ConfigurationError(
            f"outer.gain={outer.gain:g} can't be used with outer.name={outer.name!r}, which has no gain. Use "
            "outer.learning_rate, or outer.name nesterov or sgd."
        )
    learning_rate = learning_rate_of_gain(outer.gain, momentum)
    return _with(settings, {"outer.gain": None, "outer.learning_rate": learning_rate})


def _codec(settings: RunSettings) -> str:
    codec, algorithm = settings.codec, settings.algorithm
    default = "fp4" if algorithm == "streaming" else "float32"
    name = default if codec.name is None else codec.name
    CODECS.check(name)
    refuse_if(
        algorithm == "data-parallel" and name not in _GRADIENT_CODECS,
        f"codec.name={name!r} can't carry the gradients of algorithm='data-parallel'. Use --codec float32, or one of "
        f"{', '.join(_GRADIENT_CODECS)}, or --algorithm streaming or diloco, which send pseudo-gradients.",
    )
    refuse_if(
        algorithm == "none" and name != "float32",
        f"codec.name={name!r} can't be used with algorithm='none', whose independent replicas send nothing. Leave it "
        "out.",
    )
    refuse_if(
        codec.error_feedback and (name == "float32" or algorithm in ("data-parallel", "none")),
        f"codec.error_feedback=true can't be used with codec.name={name!r} and algorithm={algorithm!r}, where there is "
        "no loss to feed back. Use a lossy codec such as --codec int8 with --algorithm streaming or diloco.",
    )
    refuse_if(
        name == "topk2" and not codec.kept_loss,
        "codec.name='topk2' drops 98 % of the values, which are lost without error feedback. Add "
        "--codec.error-feedback, with a codec.error_feedback_decay above 0.",
    )
    return name


def _merge(settings: RunSettings) -> tuple[str, float | None]:
    """Return the merge rule, and alpha if the rule has one."""
    merge, algorithm = settings.merge, settings.algorithm
    refuse_if(
        merge.alpha is not None and merge.rule not in (None, "alpha"),
        f"merge.alpha={merge.alpha} can't be used with merge.rule={merge.rule!r}, which has no alpha. Use one of the "
        "two.",
    )
    refuse_if(
        bool(merge.alpha) and algorithm != "streaming",
        f"merge.alpha={merge.alpha} can't be used with algorithm={algorithm!r}, which does not mix local and global "
        "parameters. Use --algorithm streaming.",
    )
    rule = merge.rule or ("rebase" if algorithm == "streaming" and merge.alpha is None else "alpha")
    MERGE_RULES.check(rule)
    refuse_if(
        rule == "rebase" and algorithm == "diloco",
        "merge.rule='rebase' can't be used with algorithm='diloco', which merges in the step in which it sends and "
        "so has nothing to rebase. Use --algorithm streaming.",
    )
    return rule, (merge.alpha or 0.0) if rule == "alpha" else None


def _fragments_and_overlap(settings: RunSettings, num_layers: int | None) -> tuple[int, int]:
    """Return P and tau, after checking P, H, tau and the offsets against each other and the layers."""
    fragments, schedule, algorithm = settings.fragments, settings.schedule, settings.algorithm
    streaming, longest_cycle = algorithm == "streaming", max(1, schedule.inner_steps)
    number, listed, overlap = fragments.num_fragments, len(fragments.patterns), schedule.overlap_steps
    refuse_if(
        listed > 0 and number not in (None, listed),
        f"fragments.num_fragments must match the {listed} lists in fragments.patterns, got {number}. Use {listed}, or "
        "leave it out.",
    )
    number = number or listed or (None if streaming else 1)
    refuse_if(
        algorithm == "diloco" and number != 1,
        f"{number} fragments can't be used with algorithm='diloco', which sends the whole model at once. Use "
        "--algorithm streaming.",
    )
    if number is None:
        if num_layers is None:
            raise ConfigurationError("fragments.num_fragments must be set, because the depth of this model is unknown.")
        # one fragment more for the parameters outside layers; at most H, so that no two share a step
        number = min(math.ceil(num_layers / LAYERS_PER_FRAGMENT) + 1, longest_cycle)
    if num_layers is not None and fragments.strategy in ("strided", "sequential"):
        refuse_if(
            number - 1 > num_layers,
            f"fragments.num_fragments={number} is too many for a model of {num_layers} layers. Use 1 to "
            f"{min(num_layers + 1, longest_cycle)} (one is for the parameters outside layers), or --fragments.strategy "
            "balanced, which may split layers.",
        )
    refuse_if(
        bool(overlap) and not streaming,
        f"schedule.overlap_steps={overlap} can't be used with algorithm={algorithm!r}: only Streaming DiLoCo trains "
        "while a fragment is in flight. Use --algorithm streaming.",
    )
    if overlap is None:
        overlap = 1 if streaming and schedule.inner_steps > 1 else 0
    made = SyncSchedule(  # the constructor checks the values
        inner_steps=schedule.inner_steps, num_fragments=number, overlap_steps=overlap, offsets=schedule.offsets
    )
    refuse_if(
        made.whole_round_late and _merge(settings)[0] == "alpha",
        f"schedule.overlap_steps={overlap}, a whole round late, can't be used with merge.rule='alpha', which drops "
        "what was trained since the fragment was sent: here everything. Use --merge.rule rebase, or fewer overlap "
        "steps.",
    )
    return number, overlap
