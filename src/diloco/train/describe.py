"""Descriptions of a run: facts derived from its settings, as text, and the environment it runs in."""

from __future__ import annotations

import functools
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from diloco.algorithm import (
    Exchange,
    Send,
    SyncSchedule,
    SyncSettings,
    data_parallel_bytes,
    make_codec,
    plan_exchange,
)
from diloco.model import LanguageModel, ModelSettings
from diloco.outer import described
from diloco.plugins import is_own
from diloco.train.components import (
    make_average_rule,
    make_configured_codec,
    make_fragments,
    make_mean_encoding,
    make_merge_rule,
    make_outer_optimizer,
)
from diloco.train.inner_optimizer import inner_optimizer_in_words
from diloco.train.resolve import make_schedule
from diloco.train.settings import RunSettings
from diloco.units import format_bytes, format_count, format_ratio

__all__ = ["bytes_per_frozen", "bytes_per_trained", "describe", "describe_environment"]

_PACKAGES = ("diloco", "torch", "numpy", "safetensors", "tokenizers", "xxhash")


def describe(settings: RunSettings, model: LanguageModel) -> dict[str, str]:
    """Return derived facts by name, in the order in which to print them.

    Args:
        model: the model to train; it may be on the meta device.
    """
    parameters, total = model.num_trained(), model.num_parameters()
    facts = {"model": f"{format_count(total)} parameters, {model.num_layers} layers{_origin(settings, model)}"}
    if parameters != total:
        facts["trained"] = f"{format_count(parameters)} parameters, {parameters / total:.2%} of them{_lora(settings)}"
    facts["algorithm"] = _algorithm(settings)
    if optimizer := inner_optimizer_in_words(settings.optimizer, model):
        facts["inner optimizer"] = optimizer
    train, replicas = settings.train, settings.network.replicas
    tokens = replicas * train.batch_size * train.sequence_length
    facts["tokens"] = (
        f"{format_count(tokens * train.steps)} in {train.steps} steps of {tokens:,} "
        f"({replicas} replicas x {train.batch_size} sequences x {train.sequence_length})"
    )
    if settings.algorithm in ("streaming", "diloco"):
        facts |= _synchronisation(settings, [fragment.numel for fragment in make_fragments(settings.sync, model)])
    elif settings.algorithm == "data-parallel":
        facts |= _gradients(settings, parameters)
    else:
        facts["traffic"] = "none"
    facts["memory"] = _memory(settings, parameters, total - parameters)
    evaluation, checkpoint = settings.evaluation, settings.checkpoint
    facts["evaluation"] = _every(evaluation.every_steps)
    facts["checkpoints"] = f"{_every(checkpoint.every_steps)}, the last {checkpoint.keep} kept"
    return facts


def _origin(settings: RunSettings, model: LanguageModel) -> str:
    """Return the class, source and weights of a model that is loaded from a source."""
    if settings.model.source is None:
        return ""
    kind = type(getattr(model, "wrapped", model)).__name__
    weights = getattr(model, "weights", None)
    return f"; {kind} from {settings.model.source}" + (f", {weights} weights" if weights else "")


def _every(steps: int | None) -> str:
    return f"every {steps} steps and at the end" if steps else "at the end"


def _algorithm(settings: RunSettings) -> str:
    start = settings.train.data_parallel_steps
    name = {
        "streaming": "Streaming DiLoCo",
        "diloco": "DiLoCo",
        "data-parallel": "data-parallel",
        "none": "independent replicas",
    }[settings.algorithm]
    return f"{name}, after {start} shared data-parallel steps" if start else name


def _synchronisation(settings: RunSettings, fragment_sizes: Sequence[int]) -> dict[str, str]:
    """Return the facts of an algorithm with an outer loop: schedule, codec, merge, outer optimizer and traffic."""
    replicas, start = settings.network.replicas, settings.train.data_parallel_steps
    local_steps = settings.train.steps - start
    schedule, codec = make_schedule(settings), make_configured_codec(settings.sync)
    payloads = [codec.payload_bytes(size) for size in fragment_sizes]
    mean, whole = make_mean_encoding(settings.sync), settings.sync.whole_contributions
    exchanges = [plan_exchange(codec, size, replicas, mean=mean, whole=whole) for size in fragment_sizes]
    rounds = [schedule.rounds_of(fragment, local_steps) for fragment in range(schedule.num_fragments)]
    sent = sum(count * exchange.mean_bytes for count, exchange in zip(rounds, exchanges, strict=True))
    parameters = sum(fragment_sizes)
    per_gradient = data_parallel_bytes(parameters, replicas, 1)
    ratio = f", {format_ratio(per_gradient * local_steps / sent)} as much" if sent else ""
    sync = settings.sync
    mixed = f"alpha = {sync.merge_alpha:g}" if sync.merge == "alpha" else "rebase"
    mixed = described(make_merge_rule(sync)) if is_own(sync.merge) else mixed
    feedback = " with error feedback" if settings.sync.error_feedback else ""
    facts = {
        "fragments": ", ".join(format_count(size) for size in fragment_sizes) + " parameters",
        "schedule": _schedule_in_words(schedule, start),
        "rounds": f"{sum(rounds)} in all ({', '.join(map(str, rounds))} by fragment)",
        "codec": f"{codec.name}{feedback}, {8 * sum(payloads) / parameters:.3g} bits per parameter",
        "weights": "by the steps that a replica trained since its last committed contribution",
        "merge": mixed,
        "outer optimizer": (
            described(make_outer_optimizer(settings.sync, max(rounds)))
            if is_own(settings.sync.outer)
            else _outer_in_words(settings.sync, rounds)
        ),
        "payload": f"{', '.join(format_bytes(payload) for payload in payloads)} per round",
        "exchange": f"{_exchange_in_words(exchanges)} per replica and round each way",
        "traffic": (
            f"{format_bytes(sent / max(1, local_steps))} per replica and step each way; data-parallel: "
            f"{format_bytes(per_gradient)}{ratio}"
        ),
    }
    if settings.sync.average != "mean":
        facts["average"] = described(make_average_rule(settings.sync))
    if (bound := settings.sync.max_norm) is not None:
        facts["clipping"] = f"contributions are scaled down to the norm {bound:g}"
    if settings.network.straggler == "dynamic":
        facts["dynamic steps"] = "a replica slower than the fastest skips steps, so that no replica waits for it"
    if start:
        facts["traffic"] += f" (plus {format_bytes(per_gradient * start)} for the shared start)"
    return facts


def _outer_in_words(sync: SyncSettings, rounds: Sequence[int]) -> str:
    """Describe the outer optimizer, its gain and its number of rounds per fragment.

    >>> _outer_in_words(SyncSettings(outer_learning_rate=0.4), [40, 39, 39])
    'nesterov, learning rate 0.4, momentum 0.9: gain 4, 39 to 40 rounds per fragment'
    """
    momentum = f", momentum {sync.outer_momentum:g}" if sync.outer == "nesterov" else ""
    gain = "" if sync.lasting_gain is None else f": gain {sync.lasting_gain:.3g}"
    each = " to ".join(map(str, sorted({min(rounds), max(rounds)})))
    return f"{sync.outer}, learning rate {sync.outer_learning_rate:g}{momentum}{gain}, {each} rounds per fragment"


def _exchange_in_words(exchanges: Sequence[Exchange]) -> str:
    """List the exchange patterns in use and the bytes of each fragment.

    >>> plans = [plan_exchange(make_codec("fp4"), size, 16) for size in (100_000, 256)]
    >>> _exchange_in_words(plans)
    'reduce-scatter with means as float32, all-gather: 422 kB, 1.9 kB'
    """
    words = {"all-gather": "all-gather", "reduce-scatter": f"reduce-scatter with means as {exchanges[0].mean}"}
    patterns = dict.fromkeys(words[exchange.pattern] for exchange in exchanges)
    return f"{', '.join(patterns)}: {', '.join(format_bytes(exchange.mean_bytes) for exchange in exchanges)}"


def _gradients(settings: RunSettings, parameters: int) -> dict[str, str]:
    codec = make_codec(settings.sync.codec or "float32")
    exchange = plan_exchange(codec, parameters, settings.network.replicas)
    return {
        "gradients": f"averaged at every step, as {codec.name}",
        "traffic": f"{format_bytes(exchange.mean_bytes)} per replica and step each way",
    }


def _schedule_in_words(schedule: SyncSchedule, start: int) -> str:
    """Describe when each fragment is first sent, how often and how late it is merged, from the schedule's actions.

    >>> _schedule_in_words(SyncSchedule(inner_steps=10, num_fragments=3, overlap_steps=1), start=200)
    'fragment 0 at step 210, 1 at 213, 2 at 216, then every 10 steps; merged 1 step later'
    >>> _schedule_in_words(SyncSchedule(inner_steps=100, num_fragments=37), start=0)
    'fragment 0 at step 100, 1 at 102, ..., 36 at 197, then every 100 steps; merged at once'
    """
    first_cycles = range(1, 2 * schedule.inner_steps)
    sends = {a.fragment: step for step in reversed(first_cycles) for a in schedule.actions(step) if isinstance(a, Send)}
    firsts = [f"{fragment} at {start + step}" for fragment, step in sorted(sends.items())]
    subject = "fragment 0" if len(firsts) > 1 else "the whole model"
    firsts[0] = f"{subject} at step {start + sends[0]}"
    shown = firsts if len(firsts) <= 4 else [*firsts[:2], "...", firsts[-1]]
    late = schedule.overlap_steps
    merged = f"{late} step{'s' if late > 1 else ''} later" if late else "at once"
    return f"{', '.join(shown)}, then every {schedule.inner_steps} steps; merged {merged}"


def bytes_per_trained(settings: RunSettings) -> int:
    """Return the bytes that a replica keeps per trained value.

    They are 16 for the value, its gradient and Adam's two moments, 4 for the global value, 4 for each slot of the outer
    optimizer, and 4 for the residual of error feedback.
    """
    each = 16
    if settings.algorithm in ("streaming", "diloco"):
        value = torch.zeros(1, dtype=torch.float32, device="cpu")
        each += 4 + 4 * len(make_outer_optimizer(settings.sync, 1).init(value).slots)
        each += 4 if settings.sync.error_feedback else 0
    return each


def bytes_per_frozen(settings: ModelSettings) -> float:
    """Return the bytes per frozen value; for quantised values, without the scales of their blocks."""
    if settings.quantization is not None:
        return {"nf4": 0.5, "int8": 1.0}[settings.quantization]
    return {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}[settings.base_dtype]


def _memory(settings: RunSettings, trained: int, frozen: int) -> str:
    each, replicas = bytes_per_trained(settings), settings.network.replicas
    total = each * trained + bytes_per_frozen(settings.model.settings) * frozen
    parameter = (
        f"trained and {bytes_per_frozen(settings.model.settings):g} per frozen parameter" if frozen else "parameter"
    )
    memory = format_bytes(round(total * replicas))
    return f"{memory} for {replicas} replicas at {each} bytes per {parameter}, plus activations"


def _lora(settings: RunSettings) -> str:
    model = settings.model.settings
    if not model.lora_rank:
        return ""
    targets, frozen = ", ".join(model.lora_targets), model.quantization or model.base_dtype
    return f"; LoRA of rank {model.lora_rank} at {targets}, frozen weights as {frozen}"


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return versions, processor and git commit as plain values; an unknown value is None."""
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


@functools.cache  # the running code is what was imported, whatever happens to the checkout later
def _git(*arguments: str) -> str | None:
    """Return the output of a git command in this package's own checkout, or None outside of one."""
    here = Path(__file__).resolve().parent
    try:
        # an installed copy may lie inside the checkout of another project
        subprocess.run(["git", "ls-files", "--error-unmatch", __file__], cwd=here, capture_output=True, check=True)
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
