"""What a run is, in words: the facts that its start shows, and further details."""

from __future__ import annotations

import torch

from diloco.algorithm import Send, data_parallel_bytes, make_codec, plan_exchange
from diloco.model import LanguageModel, ModelSettings
from diloco.outer import described
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

__all__ = ["bytes_per_frozen", "bytes_per_trained", "describe"]

Facts = dict[str, str]  # name -> readable value, in the order to print them


def describe(settings: RunSettings, model: LanguageModel) -> tuple[Facts, Facts]:
    """Return what tells the user that this is the right run, and further facts that follow from the settings.

    Traffic is counted in each direction.

    Args:
        model: the model to train; it may be on the meta device.
    """
    facts, details, train = {}, {}, settings.train
    trained, total = model.num_trained(), model.num_parameters()
    if settings.model.source is not None:
        kind, weights = type(getattr(model, "wrapped", model)).__name__, getattr(model, "weights", None)
        part = f"; trains {trained / total:.2%} of it" if trained != total else ""
        facts["model"] = f"{kind} from {settings.model.source}{part}"
        details["weights"] = weights or "new"
    if rank := settings.model.lora_rank:
        details["LoRA"] = f"rank {rank} at {', '.join(settings.model.settings.lora_targets)}"
    facts["optimizers"] = f"{settings.optimizer.name}, learning rate {settings.optimizer.learning_rate:g}"
    if settings.algorithm in ("streaming", "diloco"):
        _describe_rounds(settings, model, facts, details)
    elif settings.algorithm == "data-parallel":
        codec = make_codec(settings.sync.codec or "float32")
        sent = plan_exchange(codec, trained, settings.network.replicas).mean_bytes
        facts["traffic"] = f"gradients as {codec.name}: {format_bytes(sent)} per replica and step"
    if optimizer := inner_optimizer_in_words(settings.optimizer, model):
        details["inner optimizer"] = optimizer
    batch, replicas = f"{train.batch_size} sequences x {train.sequence_length} tokens", settings.network.replicas
    details["batch"] = f"{replicas} replicas x {batch}"
    memory = round(
        bytes_per_trained(settings) * trained + bytes_per_frozen(settings.model.settings) * (total - trained)
    )
    details["memory"] = f"{format_bytes(memory)} per replica, without activations"
    details["evaluation"] = _every(settings.evaluation.every_steps)
    details["checkpoints"] = f"{_every(settings.checkpoint.every_steps)}, the last {settings.checkpoint.keep} kept"
    return facts, details


def _describe_rounds(settings: RunSettings, model: LanguageModel, facts: Facts, details: Facts) -> None:
    """Add the facts of an algorithm with an outer loop."""
    start, replicas = settings.train.data_parallel_steps, settings.network.replicas
    schedule, codec, mean = (
        make_schedule(settings),
        make_configured_codec(settings.sync),
        make_mean_encoding(settings.sync),
    )
    local_steps, whole = settings.train.steps - start, settings.sync.whole_contributions
    rounds = [schedule.rounds_of(fragment, local_steps) for fragment in range(schedule.num_fragments)]
    sizes = [fragment.numel for fragment in make_fragments(settings.sync, model)]
    exchanges = [plan_exchange(codec, size, replicas, mean=mean, whole=whole) for size in sizes]
    sent = sum(count * exchange.mean_bytes for count, exchange in zip(rounds, exchanges, strict=True))
    gradients = data_parallel_bytes(sum(sizes), replicas, 1)
    first = f"{start} data-parallel steps, then " if start else ""
    each = "the model" if len(sizes) == 1 else f"{len(sizes)} fragments"
    facts["optimizers"] += f"; outer {settings.sync.outer}, learning rate {settings.sync.outer_learning_rate:g}"
    facts["rounds"] = f"{first}{each} every {schedule.inner_steps} steps as {codec.name}"
    ratio = f", {format_ratio(gradients * local_steps / sent)} as much" if sent else ""
    each_step = format_bytes(sent / max(1, local_steps))
    facts["traffic"] = f"{each_step} per replica and step (data-parallel: {format_bytes(gradients)}{ratio})"
    sends: dict[int, int] = {}
    for step in reversed(range(1, 2 * schedule.inner_steps)):
        sends |= {action.fragment: start + step for action in schedule.actions(step) if isinstance(action, Send)}
    details["fragments"] = "; ".join(
        f"{format_count(size)} parameters from step {sends[number]} on, {count} x {format_bytes(exchange.mean_bytes)}"
        for number, (size, count, exchange) in enumerate(zip(sizes, rounds, exchanges, strict=True))
    )
    bits = 8 * sum(map(codec.payload_bytes, sizes)) / sum(sizes)
    feedback = " with error feedback" if settings.sync.error_feedback else ""
    details["codec"] = f"{codec.name}{feedback}, {bits:.3g} bits per parameter, exchanged by {exchanges[0].pattern}"
    rule = make_average_rule(settings.sync)
    details["average"] = "mean" if rule is None else described(rule)
    if (bound := settings.sync.max_norm) is not None:
        details["clipping"] = f"contributions are scaled down to the norm {bound:g}"
    details["outer optimizer"] = described(make_outer_optimizer(settings.sync, max(rounds)))
    details["merge"] = f"{described(make_merge_rule(settings.sync))}, overlap {schedule.overlap_steps}"


def _every(steps: int | None) -> str:
    return f"every {steps} steps and at the end" if steps else "at the end"


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
