"""Checks that refuse settings which can't work together, before any value is derived. Does not import torch."""

from __future__ import annotations

from operator import attrgetter

from diloco.errors import ConfigurationError
from diloco.train.settings import RunSettings

__all__ = ["check_averaging", "check_lengths", "check_means", "check_transport", "refuse_if"]

_IN_A_SWARM = {
    "transport.replica_size": 1,
    "data.sharding": "shuffled",
    "transport.rendezvous": None,
    "transport.host": None,
    "transport.interface": None,
    "transport.ports": "0",
    "transport.bandwidth_bits_per_s": (),
    "transport.latency_s": (),
    "transport.restarts": 0,
}
"""The only values of these settings that work with replicas that join and leave."""


def refuse_if(wrong: bool, message: str) -> None:
    """Raise `ConfigurationError` with ``message`` if ``wrong``."""
    if wrong:
        raise ConfigurationError(message)


def check_lengths(settings: RunSettings, longest: int | None) -> None:
    """Check numbers of steps and tokens against each other.

    Args:
        longest: the longest sequence of the model, or None if it is not known here.
    """
    train, model, inner, steps = settings.train, settings.model, settings.inner, settings.train.steps
    if longest is None and model.source is None:
        longest = model.max_sequence_length
    limit = f"the {longest} tokens of {model.source}" if model.source else f"model.max_sequence_length={longest}"
    refuse_if(
        longest is not None and train.sequence_length > longest,
        f"train.sequence_length={train.sequence_length} exceeds {limit}. Use at most {longest}, or a model that "
        "supports longer sequences.",
    )
    divisor = max(
        n for n in range(1, min(train.batch_size, train.gradient_accumulation) + 1) if train.batch_size % n == 0
    )
    refuse_if(
        divisor != train.gradient_accumulation,
        f"train.gradient_accumulation={train.gradient_accumulation} must divide train.batch_size={train.batch_size}. "
        f"Use {divisor}, for example.",
    )
    for name, least in (("train.data_parallel_steps", 0), ("train.stop_after", 1), ("inner.warmup_steps", 0)):
        value = attrgetter(name)(settings)
        wrong = value is not None and not least <= value <= steps
        refuse_if(wrong, f"{name} must be from {least} to train.steps={steps}, got {value}.")
    rest = steps - inner.warmup_steps
    refuse_if(
        inner.decay_steps is not None and not 0 <= inner.decay_steps <= rest,
        f"inner.decay_steps must be from 0 to {rest}, the steps that follow the warm-up, got {inner.decay_steps}.",
    )


def check_averaging(settings: RunSettings) -> None:
    """Check clipping, which needs the norm of whole contributions, and average rules."""
    average = settings.outer.average
    refuse_if(
        average != "mean" and settings.algorithm not in ("streaming", "diloco"),
        f"outer.average={average!r} can't be used with algorithm={settings.algorithm!r}: only streaming and diloco "
        "send contributions that can be averaged by another rule than the mean. Leave it out.",
    )
    if (bound := settings.outer.max_norm) is None:
        return
    refuse_if(
        settings.algorithm not in ("streaming", "diloco"),
        f"outer.max_norm={bound} can't be used with algorithm={settings.algorithm!r}: only streaming and diloco send "
        "contributions to clip. Leave it out, or use inner.clip_norm to clip gradients.",
    )
    refuse_if(
        settings.transport.replica_size > 1 and settings.train.parallelism == "fsdp",
        f"outer.max_norm={bound} needs whole contributions, but with train.parallelism='fsdp' and "
        f"transport.replica_size={settings.transport.replica_size} each rank has only shards. Use --train.parallelism "
        "ddp.",
    )


def check_means(settings: RunSettings) -> None:
    """Check the encoding of means, which only algorithms that average pseudo-gradients have."""
    algorithm, codec = settings.algorithm, settings.transport.mean_codec
    refuse_if(
        codec not in ("auto", "float32") and algorithm not in ("streaming", "diloco"),
        f"transport.mean_codec={codec!r} can't be used with algorithm={algorithm!r}: only the means of streaming and "
        "diloco are encoded. Leave it out.",
    )


def check_transport(settings: RunSettings) -> None:
    """Refuse settings that the chosen transport does not support."""
    transport, swarm = settings.transport, settings.swarm
    chosen = f"transport.name={transport.name!r}"
    if transport.name != "in-process":
        for name in ("faults", "step_time_s"):
            wrong = bool(getattr(transport, name))
            refuse_if(
                wrong, f"transport.{name} can't be used with {chosen}. Use --transport in-process, or leave it out."
            )
        refuse_if(
            settings.data.streaming and transport.restarts > 0,
            f"transport.restarts={transport.restarts} can't be used with data.streaming=true, because it is not known "
            "what a lost replica has read. Pass a folder made by `diloco tokenize` as --data, or leave out "
            "transport.restarts and continue a failed run with --resume.",
        )
        refuse_if(
            settings.algorithm == "none",
            f"algorithm='none' sends nothing and can't be used with {chosen}. Use --transport in-process.",
        )
    else:
        refuse_if(
            transport.secret_file is not None,
            f"transport.secret_file={str(transport.secret_file)!r} can't be used with {chosen}, which has a single "
            "process. Leave it out, or use --transport torch.",
        )
    if transport.name == "hivemind":
        refuse_if(
            transport.secret_file is not None,
            f"transport.secret_file={str(transport.secret_file)!r} can't be used with {chosen}. Use "
            "--swarm.secret-file.",
        )
        _check_swarm(settings)
    else:
        refuse_if(
            swarm.run is not None, f"swarm.run={swarm.run!r} can't be used with {chosen}. Use --transport hivemind."
        )
        refuse_if(
            swarm.dynamic_steps,
            f"swarm.dynamic_steps=true can't be used with {chosen}: replicas know each other's speeds only in a "
            "swarm. Use --transport hivemind, or make all replicas train every step (--swarm.no-dynamic-steps).",
        )


def _check_swarm(settings: RunSettings) -> None:
    """Check the settings that a swarm needs, and refuse those that can't work with replicas that join and leave."""
    transport, swarm, least = settings.transport, settings.swarm, settings.transport.min_replicas
    refuse_if(
        swarm.run is None,
        "transport.name='hivemind' needs the name of the run. Use --run NAME, the same for all peers of the run.",
    )
    for name, works in _IN_A_SWARM.items():
        value = attrgetter(name)(settings)
        refuse_if(value != works, f"{name}={value!r} can't be used with transport.name='hivemind'. Use {works!r}.")
    refuse_if(
        settings.data.streaming,
        "data.streaming=true can't be used with transport.name='hivemind', because replicas that join and leave "
        "can't divide data that is read while training. Pass a folder made by `diloco tokenize` as --data, or use "
        "--transport torch.",
    )
    refuse_if(
        settings.algorithm == "data-parallel",
        "algorithm='data-parallel' can't be used with transport.name='hivemind', because replicas that join and leave "
        "can't average gradients at every step. Use --algorithm streaming or diloco, or --transport torch.",
    )
    refuse_if(
        least > swarm.start_replicas,
        f"swarm.start_replicas must be at least transport.min_replicas={least}, got {swarm.start_replicas}. "
        f"Use --start-replicas {least} or more.",
    )
    beat_s = transport.heartbeat_s
    refuse_if(
        swarm.straggler != "wait" and swarm.join_window_s < 2 * beat_s,
        f"swarm.join_window_s must be at least {2 * beat_s:g} s with transport.heartbeat_s={beat_s:g}, got "
        f"{swarm.join_window_s:g}. A replica would otherwise count as late between two heartbeats.",
    )
