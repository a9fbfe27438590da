"""What a run is: what its settings name, the facts that replicas and checkpoints compare, and what people see of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from diloco.algorithm import (
    AVERAGES,
    CODECS,
    MERGE_RULES,
    OUTER_OPTIMIZERS,
    FragmentLayout,
    SyncSettings,
    data_parallel_bytes,
    names_at_home,
    partition,
    plan_exchange,
    trainable_parameters,
)
from diloco.model import LanguageModel, base_digest, build_language_model, with_vocabulary
from diloco.outer import argument_facts, check_kinds, complete, frozen_digests
from diloco.plugins import is_own
from diloco.protocol import PROTOCOL_VERSION
from diloco.train.inner import check_inner_arguments
from diloco.train.settings import RunSettings, make_schedule
from diloco.transport import InProcessTransport, Link, VirtualNetwork
from diloco.units import format_bytes, format_ratio, in_short


def outer_components(sync: SyncSettings, outer_steps: int = 1) -> dict[str, Any]:
    """Return those arguments of `DiLoCo` that follow from resolved settings alone, by name.

    The schedules of the outer optimizer span ``outer_steps``, the rounds of one fragment in the whole run.
    """
    codec, mean_codec = sync.arguments_of("codec"), sync.mean_codec
    rate = 0.7 if sync.outer_learning_rate is None else sync.outer_learning_rate
    span = {} if is_own(sync.outer) else {"outer_steps": max(1, outer_steps)}
    outer = {"learning_rate": rate, "momentum": sync.outer_momentum, **span}
    if mean_codec != "auto":
        mean_codec = CODECS.make(mean_codec, block_size=codec.get("block_size", 256))
    return {
        "codec": CODECS.make(sync.codec or "float32", codec),
        "mean_codec": mean_codec,
        "error_feedback": sync.error_feedback,
        "outer_optimizer": OUTER_OPTIMIZERS.make(sync.outer, sync.arguments_of("outer"), **outer),
        "merge": MERGE_RULES.make(sync.merge or "alpha", sync.arguments_of("merge"), alpha=sync.merge_alpha or 0.0),
        "average": AVERAGES.make(sync.average, sync.arguments_of("average")),
        "max_norm": sync.max_norm,
        "at_home": sync.at_home,
        "isotropic": sync.isotropic,
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
    check_kinds(outer_components(settings.sync))
    check_inner_arguments(settings.optimizer)


def make_fragments(sync: SyncSettings, model: LanguageModel) -> tuple[FragmentLayout, ...]:
    """Partition ``model`` into fragments as resolved settings say."""
    number, strategy = sync.num_fragments or 1, sync.fragment_strategy
    return partition(model, num_fragments=number, strategy=strategy, at_home=sync.at_home)


def make_transport(settings: RunSettings) -> InProcessTransport:
    """Return the in-process transport with its emulated links; without settings, bandwidth is infinite, latency 0."""
    network, emulate, replicas = None, settings.emulate, settings.network.replicas
    if emulate.step_time:
        rows = (emulate.bandwidth or (math.inf,), emulate.latency or (0.0,), emulate.step_time)
        bandwidths, latencies, step_times = (row * replicas if len(row) == 1 else row for row in rows)
        network = VirtualNetwork([*map(Link, bandwidths, latencies)], step_times)
    return InProcessTransport(replicas, round_timeout_s=settings.network.round_timeout, network=network)


def outline(settings: RunSettings, vocab_size: int) -> LanguageModel:
    """Build the model on the meta device; ``vocab_size`` counts if neither settings nor the model's source give one."""
    return build_language_model(with_vocabulary(settings.model, vocab_size), seed=0, device="meta")


def identity(
    settings: RunSettings,
    model: LanguageModel,
    data: str = "",
    base: str = "",
    tokenizer: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return what all replicas of a run must have in common, by name, the likeliest mistakes first.

    Args:
        model: it may be on the meta device.
        data: the fingerprint of the data.
        base: from `untrained_digest`. The base of adapters must stay what it is; other stored weights are only where
            the replicas begin.
        tokenizer: the facts of the tokenizer.
    """
    train, network, packing = settings.train, settings.network, settings.data.packing
    first = "base model" if settings.model.lora_rank else "first weights"
    documents, usual_packing = ("conversations", "masked") if settings.data.chat else ("text", "joined")
    weighting = {"tokens": "by the steps trained", "equal": "all alike"}.get(str(settings.sync.weight), "as given")
    replicas = f"{network.replicas} of {network.replica_size} ranks"
    if network.elastic:
        replicas = f"any number, {network.replicas} to begin with"
    outer = {"codec": str(settings.sync.codec)}
    if settings.algorithm in ("streaming", "diloco"):
        outer = argument_facts(complete(model=model, **outer_arguments(settings, model)))
    return {
        "protocol version": str(PROTOCOL_VERSION),
        "model": _model_fingerprint(trainable_parameters(model)),
        "configuration": _configuration_digest(settings, model),
        **({first: base} if base else {}),
        **(tokenizer or {}),
        "algorithm": settings.algorithm,
        "steps": f"{train.steps}, {train.data_parallel_steps} of them shared ones",
        **outer,
        "token weighting": f"{weighting}, in batches of {train.batch_size} x {train.sequence_length}",
        "dynamic steps": "yes" if network.straggler == "dynamic" else "no",
        "replicas": replicas,
        "seed": str(settings.seed),
        "data.local": "yes" if settings.data.local else "no",
        "documents": f"{documents}, {packing or usual_packing}",
        **({"data": data} if data else {}),
    }


def compared(settings: RunSettings, facts: Mapping[str, str]) -> dict[str, str]:
    """Return what replicas compare of the `identity` of a run: not their data, if each has its own."""
    return {name: value for name, value in facts.items() if name != "data" or not settings.data.local}


def untrained_digest(settings: RunSettings, model: LanguageModel) -> str:
    """Return a digest of the values that every replica begins with and none trains, or "" if there are none.

    They are the stored weights, or what the user's own model freezes.
    """
    stored = base_digest(settings.model)
    if stored or all(parameter.requires_grad for parameter in model.parameters()):
        return stored
    frozen = frozen_digests(build_language_model(settings.model, seed=settings.seed))
    return xxhash.xxh3_128_hexdigest(json.dumps(frozen).encode())


def _configuration_digest(settings: RunSettings, model: LanguageModel) -> str:
    """Return a digest of what a model computes beside its weights, in whatever folder it lies."""
    values = model.configuration() or settings.model.described()["arguments"]
    return xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True, default=str).encode())


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
    if names := names_at_home(model, settings.sync.at_home):
        facts["at home"] = f"{in_short(names)}: each replica keeps its own"
    return facts


def _describe_rounds(settings: RunSettings, model: LanguageModel) -> dict[str, str]:
    start, replicas = settings.train.data_parallel_steps, settings.network.replicas
    joinable = settings.network.elastic and replicas == 1  # alone it sends nothing
    replicas = 2 if joinable else replicas
    schedule, components = make_schedule(settings), outer_components(settings.sync)
    codec, mean = components["codec"], components["mean_codec"]
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
    of_start = f"{format_bytes(gradients)} in each data-parallel step, then " if start else ""
    return {
        "rounds": f"{first}{unit} every {schedule.inner_steps} steps as {codec.name}",
        "traffic": f"{of_start}{per_step} per replica and step{', with one other' if joinable else ''} "
        f"(data-parallel: {format_bytes(gradients)}{ratio})",
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
