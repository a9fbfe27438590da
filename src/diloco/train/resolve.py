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
from diloco.train.settings import RunSettings

__all__ = ["make_schedule", "notes", "resolve"]

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
    _check_lengths(settings, max_sequence_length)
    _check_averaging(settings)
    _check_network(settings)
    check_device("train.device", train.device)
    _refuse_if(
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
    alone = settings.network.replicas == 1 and settings.network.transport != "swarm"
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
    _refuse_if(
        algorithm == "data-parallel" and name not in _GRADIENT_CODECS,
        f"sync.codec={name!r} can't carry the gradients of algorithm='data-parallel'. Use --codec float32, or one of "
        f"{', '.join(_GRADIENT_CODECS)}, or --algorithm streaming or diloco, which send pseudo-gradients.",
    )
    _refuse_if(
        algorithm == "none" and name != "float32",
        f"sync.codec={name!r} can't be used with algorithm='none', whose independent replicas send nothing. Leave it "
        "out.",
    )
    _refuse_if(
        sync.error_feedback > 0 and (name == "float32" or algorithm in ("data-parallel", "none")),
        f"sync.error_feedback={sync.error_feedback:g} can't be used with sync.codec={name!r} and algorithm="
        f"{algorithm!r}, where there is no loss to feed back. Use a lossy codec such as --codec int8 with --algorithm "
        "streaming or diloco.",
    )
    _refuse_if(
        name == "topk2" and not sync.error_feedback,
        "sync.codec='topk2' drops 98 % of the values, which are lost without error feedback. Add --error-feedback "
        "0.95, for example.",
    )
    return name


def _merge(settings: RunSettings) -> tuple[str, float | None]:
    """Return the merge rule, and alpha if the rule has one."""
    sync, algorithm = settings.sync, settings.algorithm
    alpha = sync.merge_alpha
    _refuse_if(
        alpha is not None and sync.merge not in (None, "alpha"),
        f"sync.merge_alpha={alpha} can't be used with sync.merge={sync.merge!r}, which has no alpha. Use one of the "
        "two.",
    )
    _refuse_if(
        bool(alpha) and algorithm != "streaming",
        f"sync.merge_alpha={alpha} can't be used with algorithm={algorithm!r}, which does not mix local and global "
        "parameters. Use --algorithm streaming.",
    )
    rule = sync.merge or ("rebase" if algorithm == "streaming" and alpha is None else "alpha")
    MERGE_RULES.check(rule)
    _refuse_if(
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
    _refuse_if(
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
        _refuse_if(
            number - 1 > num_layers,
            f"sync.num_fragments={number} is too many for a model of {num_layers} layers. Use 1 to "
            f"{min(num_layers + 1, longest_cycle)} (one is for the parameters outside layers), or "
            "--sync.fragment-strategy balanced, which may split layers.",
        )
    _refuse_if(
        bool(overlap) and not streaming,
        f"sync.overlap_steps={overlap} can't be used with algorithm={algorithm!r}: only Streaming DiLoCo trains while "
        "a fragment is in flight. Use --algorithm streaming.",
    )
    if overlap is None:
        overlap = 1 if streaming and sync.inner_steps > 1 else 0
    # the constructor checks the values
    schedule = SyncSchedule(inner_steps=sync.inner_steps, num_fragments=number, overlap_steps=overlap)
    _refuse_if(
        schedule.whole_round_late and _merge(settings)[0] == "alpha",
        f"sync.overlap_steps={overlap}, a whole round late, can't be used with sync.merge='alpha', which drops what "
        "was trained since the fragment was sent: here everything. Use --sync.merge rebase, or fewer overlap steps.",
    )
    return number, overlap


def _refuse_if(wrong: bool, message: str) -> None:
    """Raise `ConfigurationError` with ``message`` if ``wrong``."""
    if wrong:
        raise ConfigurationError(message)


def _check_lengths(settings: RunSettings, longest: int | None) -> None:
    """Check numbers of steps and tokens against each other.

    Args:
        longest: the longest sequence of the model, or None if it is not known here.
    """
    train, model, steps = settings.train, settings.model, settings.train.steps
    if longest is None and model.source is None:
        longest = model.decoder.max_sequence_length
    limit = (
        f"the {longest} tokens of {model.source}" if model.source else f"model.arguments.max_sequence_length={longest}"
    )
    _refuse_if(
        longest is not None and train.sequence_length > longest,
        f"train.sequence_length={train.sequence_length} exceeds {limit}. Use at most {longest}, or a model that "
        "supports longer sequences.",
    )
    divisor = max(
        n for n in range(1, min(train.batch_size, train.gradient_accumulation) + 1) if train.batch_size % n == 0
    )
    _refuse_if(
        divisor != train.gradient_accumulation,
        f"train.gradient_accumulation={train.gradient_accumulation} must divide train.batch_size={train.batch_size}. "
        f"Use {divisor}, for example.",
    )
    for name, least in (("train.data_parallel_steps", 0), ("train.stop_after", 1), ("optimizer.warmup_steps", 0)):
        value = attrgetter(name)(settings)
        wrong = value is not None and not least <= value <= steps
        _refuse_if(wrong, f"{name} must be from {least} to train.steps={steps}, got {value}.")


def _check_averaging(settings: RunSettings) -> None:
    """Check clipping, which needs the norm of whole contributions, and what only some algorithms average."""
    sync, algorithm = settings.sync, settings.algorithm
    outer_loop = algorithm in ("streaming", "diloco")
    _refuse_if(
        sync.average != "mean" and not outer_loop,
        f"sync.average={sync.average!r} can't be used with algorithm={algorithm!r}: only streaming and diloco send "
        "contributions that can be averaged by another rule than the mean. Leave it out.",
    )
    _refuse_if(
        sync.mean_codec not in ("auto", "float32") and not outer_loop,
        f"sync.arguments.average.codec={sync.mean_codec!r} can't be used with algorithm={algorithm!r}: only the means "
        "of streaming and diloco are encoded. Leave it out.",
    )
    if sync.max_norm is not None:
        bound = f"sync.arguments.average.max_norm={sync.max_norm}"
        _refuse_if(
            not outer_loop,
            f"{bound} can't be used with algorithm={algorithm!r}: only streaming and diloco send contributions to "
            "clip. Leave it out, or use optimizer.clip_norm to clip gradients.",
        )
        _refuse_if(
            settings.network.replica_size > 1 and settings.train.parallelism == "fsdp",
            f"{bound} needs whole contributions, but with train.parallelism='fsdp' and network.replica_size="
            f"{settings.network.replica_size} each rank has only shards. Use --train.parallelism ddp.",
        )


def _check_network(settings: RunSettings) -> None:
    """Refuse settings that the chosen transport does not support."""
    network = settings.network
    chosen = f"network.transport={network.transport!r}"
    if network.transport == "swarm":
        _check_swarm(settings)
    else:
        _refuse_if(
            network.run is not None,
            f"--run {network.run} needs a swarm, but {chosen}. Add --transport swarm, or leave --run out.",
        )
        _refuse_if(
            network.straggler != "wait",
            f"network.straggler={network.straggler!r} can't be used with {chosen}: only a swarm continues without a "
            "late replica. Use --transport swarm, or leave it out.",
        )
        for name in ("allow", "announce", "behind_nat"):
            _refuse_if(
                bool(getattr(network, name)),
                f"network.{name} can't be used with {chosen}. Use --transport swarm, or leave it out.",
            )
    if network.transport == "in-process":
        for name in ("secret_file", "join", "listen"):
            _refuse_if(
                bool(getattr(network, name)),
                f"network.{name}={getattr(network, name)!s} can't be used with {chosen}, which has a single process. "
                "Use --transport tcp or swarm, or leave it out.",
            )
    else:
        _refuse_if(
            settings.algorithm == "none",
            f"algorithm='none' sends nothing and can't be used with {chosen}. Use --transport in-process.",
        )


def _check_swarm(settings: RunSettings) -> None:
    """Check the settings that a swarm needs, and refuse those that can't work with replicas that join and leave."""
    network = settings.network
    chosen = "network.transport='swarm'"
    _refuse_if(
        network.run is None,
        f"{chosen} needs the name of the run. Use --run NAME, the same for all peers of the run.",
    )
    size = network.replica_size
    _refuse_if(size != 1, f"network.replica_size={size} can't be used with {chosen}. Use 1.")
    _refuse_if(
        settings.data.streaming,
        f"data.streaming=true can't be used with {chosen}, because replicas that join and leave can't divide data that "
        "is read while training. Pass a folder made by `diloco tokenize` as --data, or use --transport tcp.",
    )
    _refuse_if(
        settings.algorithm == "data-parallel",
        f"algorithm='data-parallel' can't be used with {chosen}, because replicas that join and leave can't average "
        "gradients at every step. Use --algorithm streaming or diloco, or --transport tcp.",
    )
    _refuse_if(
        network.min_replicas > network.replicas,
        f"network.replicas must be at least network.min_replicas={network.min_replicas}, got {network.replicas}. Use "
        f"--replicas {network.min_replicas} or more.",
    )
