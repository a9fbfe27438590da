"""What a run is: what follows from its settings, in words, and the environment it runs in."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from diloco.algorithm.clipping import Clipping
from diloco.algorithm.codec import make_codec
from diloco.algorithm.exchange import data_parallel_bytes, plan_exchange
from diloco.algorithm.schedule import Send, SyncSchedule
from diloco.model.language_model import LanguageModel
from diloco.train.components import make_clipping, make_configured_codec, make_fragments, make_schedule
from diloco.train.inner_optimizer import inner_optimizer_in_words
from diloco.train.settings import RunSettings
from diloco.units import format_bytes, format_count, format_ratio

__all__ = ["describe", "describe_environment"]

_PACKAGES = ("diloco", "torch", "numpy", "safetensors", "tokenizers", "xxhash")


def describe(settings: RunSettings, model: LanguageModel) -> dict[str, str]:
    """Derived facts by name, in the order to print them.

    Args:
        settings: resolved.
        model: the one to be trained; a model on the meta device will do.
    """
    parameters = model.num_parameters()
    facts = {"model": f"{format_count(parameters)} parameters, {model.num_layers} layers{_origin(settings, model)}"}
    facts["algorithm"] = _algorithm(settings)
    if words := inner_optimizer_in_words(settings.inner, model):
        facts["inner optimizer"] = words
    train, replicas = settings.train, settings.transport.replicas
    tokens = replicas * train.batch_size * train.sequence_length
    facts["tokens"] = (
        f"{format_count(tokens * train.steps)} in {train.steps} steps of {tokens:,} "
        f"({replicas} replicas x {train.batch_size} sequences x {train.sequence_length})"
    )
    if settings.algorithm in ("streaming", "diloco"):
        facts |= _synchronisation(settings, [fragment.numel for fragment in make_fragments(settings.fragments, model)])
    elif settings.algorithm == "data-parallel":
        facts |= _gradients(settings, parameters)
    else:
        facts["traffic"] = "none"
    facts["memory"] = _memory(settings, parameters)
    evaluation, checkpoint = settings.evaluation, settings.checkpoint
    facts["evaluation"] = _every(evaluation.every_steps)
    facts["checkpoints"] = f"{_every(checkpoint.every_steps)}, the last {checkpoint.keep} kept"
    return facts


def _origin(settings: RunSettings, model: LanguageModel) -> str:
    """What a model from a source is, and where it is from."""
    if settings.model.source is None:
        return ""
    kind = type(getattr(model, "wrapped", model)).__name__
    weights = getattr(model, "weights", None)
    return f"; {kind} from {settings.model.source}" + (f", {weights} weights" if weights else "")


def _every(steps: int | None) -> str:
    return f"every {steps} steps and at the end" if steps else "at the end"


def _algorithm(settings: RunSettings) -> str:
    start = settings.train.data_parallel_steps
    words = {
        "streaming": "Streaming DiLoCo",
        "diloco": "DiLoCo",
        "data-parallel": "data-parallel",
        "none": "independent replicas",
    }[settings.algorithm]
    return f"{words}, after {start} shared data-parallel steps" if start else words


def _synchronisation(settings: RunSettings, fragment_sizes: Sequence[int]) -> dict[str, str]:
    """Schedule, codec, merge, outer optimizer and traffic of an algorithm with an outer loop."""
    replicas, start = settings.transport.replicas, settings.train.data_parallel_steps
    local_steps = settings.train.steps - start
    schedule, codec = make_schedule(settings), make_configured_codec(settings.codec)
    payloads = [codec.payload_bytes(size) for size in fragment_sizes]
    clipping = make_clipping(settings.outer)
    exchanges = [plan_exchange(codec, size, replicas, whole=clipping.active) for size in fragment_sizes]
    rounds = [schedule.rounds_of(fragment, local_steps) for fragment in range(schedule.num_fragments)]
    sent = sum(count * exchange.mean_bytes for count, exchange in zip(rounds, exchanges, strict=True))
    parameters = sum(fragment_sizes)
    per_gradient = data_parallel_bytes(parameters, replicas, 1)
    ratio = f", {format_ratio(per_gradient * local_steps / sent)} as much" if sent else ""
    outer, merge = settings.outer, settings.merge
    mixed = f"alpha = {merge.alpha:g}" if merge.rule == "alpha" else "rebase"
    feedback = " with error feedback" if settings.codec.error_feedback else ""
    momentum = f", momentum {outer.momentum:g}" if outer.name == "nesterov" else ""
    facts = {
        "fragments": ", ".join(format_count(size) for size in fragment_sizes) + " parameters",
        "schedule": _schedule_in_words(schedule, start),
        "rounds": f"{sum(rounds)} in all ({', '.join(map(str, rounds))} by fragment)",
        "codec": f"{codec.name}{feedback}, {8 * sum(payloads) / parameters:.3g} bits per parameter",
        "weights": "by the steps that a replica trained since its last contribution that counted",
        "merge": mixed,
        "outer optimizer": f"{outer.name}, learning rate {outer.learning_rate:g}{momentum}",
        "payload": f"{', '.join(format_bytes(payload) for payload in payloads)} per round",
        "traffic": (
            f"{format_bytes(sent / max(1, local_steps))} per replica and step each way; data-parallel: "
            f"{format_bytes(per_gradient)}{ratio}"
        ),
    }
    if clipping.active:
        facts["clipping"] = _bounds_in_words(clipping)
    if settings.swarm.dynamic_steps:
        facts["dynamic steps"] = "a replica slower than the fastest leaves steps out; none is waited for"
    if start:
        facts["traffic"] += f" (the shared start sends {format_bytes(per_gradient * start)} beside it)"
    return facts


def _bounds_in_words(clipping: Clipping) -> str:
    """What contributions are scaled down to.

    >>> _bounds_in_words(Clipping(max_norm=0.5, median_norm_factor=3.0))
    'contributions are scaled down to the norm 0.5, and to 3 times the median norm of a round'
    """
    bounds = []
    if clipping.max_norm is not None:
        bounds.append(f"to the norm {clipping.max_norm:g}")
    if clipping.median_norm_factor is not None:
        bounds.append(f"to {clipping.median_norm_factor:g} times the median norm of a round")
    return f"contributions are scaled down {', and '.join(bounds)}"


def _gradients(settings: RunSettings, parameters: int) -> dict[str, str]:
    codec = make_codec(settings.codec.name or "float32")
    exchange = plan_exchange(codec, parameters, settings.transport.replicas)
    return {
        "gradients": f"averaged at every step, as {codec.name}",
        "traffic": f"{format_bytes(exchange.mean_bytes)} per replica and step each way",
    }


def _schedule_in_words(schedule: SyncSchedule, start: int) -> str:
    """When each fragment is sent first, and how it goes on: from the schedule's own actions.

    >>> _schedule_in_words(SyncSchedule(inner_steps=10, num_fragments=3, overlap_steps=1), start=200)
    'fragment 0 at step 210, 1 at 213, 2 at 216, and every 10 steps again; merged 1 later'
    >>> _schedule_in_words(SyncSchedule(inner_steps=100, num_fragments=37), start=0)
    'fragment 0 at step 100, 1 at 102, ..., 36 at 197, and every 100 steps again; merged at once'
    """
    first_cycles = range(1, 2 * schedule.inner_steps)
    sends = {a.fragment: step for step in reversed(first_cycles) for a in schedule.actions(step) if isinstance(a, Send)}
    firsts = [f"{fragment} at {start + step}" for fragment, step in sorted(sends.items())]
    subject = "fragment 0" if len(firsts) > 1 else "the whole model"
    firsts[0] = f"{subject} at step {start + sends[0]}"
    shown = firsts if len(firsts) <= 4 else [*firsts[:2], "...", firsts[-1]]
    merged = f"{schedule.overlap_steps} later" if schedule.overlap_steps else "at once"
    return f"{', '.join(shown)}, and every {schedule.inner_steps} steps again; merged {merged}"


def _memory(settings: RunSettings, parameters: int) -> str:
    """Parameters, gradients and Adam's two moments: 16 bytes; global parameters and momentum: 8 more."""
    outer = {"nesterov": 4, "sgd": 0, "adam": 8}[settings.outer.name]
    each = 16
    if settings.algorithm in ("streaming", "diloco"):
        each += 4 + outer + (4 if settings.codec.error_feedback else 0)
    replicas = settings.transport.replicas
    return (
        f"{format_bytes(each * parameters * replicas)} for {replicas} replicas at {each} bytes per parameter, "
        "activations beside it"
    )


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions, processor and git commit, as plain values; unknown ones are None."""
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor(),
        "threads": torch.get_num_threads(),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changed": bool(_git("status", "--porcelain")),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Output of a git command in this package's own checkout; None when it is no checkout."""
    here = Path(__file__).resolve().parent
    try:
        # An installed copy may lie inside somebody else's checkout.
        subprocess.run(["git", "ls-files", "--error-unmatch", __file__], cwd=here, capture_output=True, check=True)
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
