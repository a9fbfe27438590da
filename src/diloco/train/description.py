"""What a run is: one dictionary that replicas and checkpoints compare, and what people see of it at the start."""

from __future__ import annotations

import functools
import json
import platform
import subprocess
import sys
from collections.abc import Collection, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from diloco.algorithm import MeanEncoding, data_parallel_bytes, make_codec, plan_exchange, trainable_parameters
from diloco.model import LanguageModel, base_digest, build_language_model
from diloco.outer import argument_facts, frozen_digests
from diloco.protocol import PROTOCOL_VERSION
from diloco.train.components import make_fragments, outer_arguments, outer_components
from diloco.train.resolve import make_schedule
from diloco.train.settings import RunSettings
from diloco.units import format_bytes, format_ratio

__all__ = ["describe", "describe_environment", "diff", "identity", "replica_bytes", "untrained_digest"]

_PACKAGES = ("diloco", "torch", "numpy", "safetensors", "tokenizers", "xxhash")


def identity(settings: RunSettings, model: LanguageModel, data: str = "", base: str = "") -> dict[str, str]:
    """Return what all replicas of a run must have in common, by name, the likeliest mistakes first.

    ``model`` may be on the meta device; ``data`` is the fingerprint of the data, ``base`` from `untrained_digest`.
    """
    train, network = settings.train, settings.network
    replicas = f"{network.replicas} of {network.replica_size} ranks"
    if network.transport == "swarm":
        replicas = f"any number, {network.replicas} to begin with"
    outer = {"codec": str(settings.sync.codec)}
    if settings.algorithm in ("streaming", "diloco"):
        outer = argument_facts(model, outer_arguments(settings, model))
    return {
        "protocol version": str(PROTOCOL_VERSION),
        "model": _model_fingerprint(trainable_parameters(model)),
        **({"base model": base} if base else {}),
        "algorithm": settings.algorithm,
        "steps": f"{train.steps}, {train.data_parallel_steps} of them shared ones",
        **outer,
        "token weighting": f"by the steps trained, in batches of {train.batch_size} x {train.sequence_length}",
        "dynamic steps": "yes" if network.straggler == "dynamic" else "no",
        "replicas": replicas,
        "seed": str(settings.seed),
        **({"data": data} if data else {}),
    }


def diff(mine: Mapping[str, str], theirs: Mapping[str, str], names: Collection[str] = ()) -> str:
    """Return the first difference between two identities in the facts ``names`` (none: all), or "" if there is none.

    >>> diff({"codec": "fp4", "seed": "0"}, {"codec": "int8", "seed": "1"})
    'codec = int8, but this run has codec = fp4'
    """
    for name in names or dict.fromkeys([*mine, *theirs]):
        here, there = mine.get(name, "nothing"), theirs.get(name, "nothing")
        if here != there:
            return f"{name} = {there}, but this run has {name} = {here}"
    return ""


def untrained_digest(settings: RunSettings, model: LanguageModel, definition: Mapping[str, Any] | None) -> str:
    """Return a digest of the values that every replica begins with and none trains, or "" if there are none.

    They are the stored weights, or what the user's own model freezes.
    """
    stored = base_digest(settings.model, definition)
    if stored or all(parameter.requires_grad for parameter in model.parameters()):
        return stored
    frozen = frozen_digests(build_language_model(settings.model, seed=settings.seed, definition=definition))
    return xxhash.xxh3_128_hexdigest(json.dumps(frozen).encode())


def _model_fingerprint(parameters: Mapping[str, Tensor]) -> str:
    """Return the number of values in ``parameters`` and a digest of their names, shapes and dtypes."""
    digest = xxhash.xxh3_64()
    for name, parameter in parameters.items():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
    numel = sum(parameter.numel() for parameter in parameters.values())
    dtypes = ", ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters.values()}))
    return f"{numel:,} parameters of {dtypes}, {digest.hexdigest()}"


def describe(settings: RunSettings, model: LanguageModel) -> dict[str, str]:
    """Return what tells the user that this is the right run, by name, in the order to print it.

    Traffic is counted in each direction. ``model`` may be on the meta device.
    """
    facts, trained, total = {}, model.num_trained(), model.num_parameters()
    if settings.model.source is not None:
        part = "" if trained == total else f"; trains {trained / total:.2%} of it"
        facts["model"] = f"{type(getattr(model, 'wrapped', model)).__name__} from {settings.model.source}{part}"
    facts["optimizers"] = f"{settings.optimizer.name}, learning rate {settings.optimizer.learning_rate:g}"
    if settings.algorithm in ("streaming", "diloco"):
        facts["optimizers"] += f"; outer {settings.sync.outer}, learning rate {settings.sync.outer_learning_rate:g}"
        facts |= _describe_rounds(settings, model)
    elif settings.algorithm == "data-parallel":
        codec = make_codec(settings.sync.codec or "float32")
        sent = plan_exchange(codec, trained, settings.network.replicas).mean_bytes
        facts["traffic"] = f"gradients as {codec.name}: {format_bytes(sent)} per replica and step"
    return facts


def _describe_rounds(settings: RunSettings, model: LanguageModel) -> dict[str, str]:
    start, replicas = settings.train.data_parallel_steps, settings.network.replicas
    schedule, components = make_schedule(settings), outer_components(settings.sync)
    codec, mean = components["codec"], MeanEncoding.of(components["mean_codec"])
    whole = settings.sync.whole_contributions
    local_steps = settings.train.steps - start
    sizes = [fragment.numel for fragment in make_fragments(settings.sync, model)]
    sent = sum(
        schedule.rounds_of(number, local_steps)
        * plan_exchange(codec, size, replicas, mean=mean, whole=whole).mean_bytes
        for number, size in enumerate(sizes)
    )
    gradients = data_parallel_bytes(sum(sizes), replicas, 1)
    first = f"{start} data-parallel steps, then " if start else ""
    unit = "the model" if len(sizes) == 1 else f"{len(sizes)} fragments"
    ratio = f", {format_ratio(gradients * local_steps / sent)} as much" if sent else ""
    per_step = format_bytes(sent / max(1, local_steps))
    return {
        "rounds": f"{first}{unit} every {schedule.inner_steps} steps as {codec.name}",
        "traffic": f"{per_step} per replica and step (data-parallel: {format_bytes(gradients)}{ratio})",
    }


def replica_bytes(settings: RunSettings, trained: int, frozen: int) -> int:
    """Return the bytes that a replica keeps of its trained and frozen values.

    For each trained value they are 16 for itself, its gradient and Adam's two moments, 4 for the global value, 4 for
    each slot of the outer optimizer, and 4 for the residual of error feedback. The scales of quantised blocks are left
    out.
    """
    model, per_trained = settings.model, 16
    if settings.algorithm in ("streaming", "diloco"):
        value = torch.zeros(1, dtype=torch.float32, device="cpu")
        slots = len(outer_components(settings.sync)["outer_optimizer"].init(value).slots)
        per_trained += 4 + 4 * slots + (4 if settings.sync.error_feedback else 0)
    kind = model.quantization or (model.huggingface.base_dtype if model.kind == "hf" else "float32")
    per_frozen = {"nf4": 0.5, "int8": 1.0, "bfloat16": 2.0, "float16": 2.0, "float32": 4.0}[kind]
    return per_trained * trained + round(per_frozen * frozen)


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
    here = Path(__file__).resolve().parent
    try:
        # an installed copy may lie inside the checkout of another project
        subprocess.run(["git", "ls-files", "--error-unmatch", __file__], cwd=here, capture_output=True, check=True)
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
