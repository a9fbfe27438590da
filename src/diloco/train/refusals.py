"""Settings that can't work together: what is refused, whatever the algorithm derives from the rest. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from diloco.algorithm.settings import AUTO_MEANS_FROM_REPLICAS
from diloco.errors import ConfigurationError, nearest
from diloco.plugins import is_own
from diloco.train.settings import RunSettings

__all__ = ["check_averaging", "check_lengths", "check_means", "check_name", "check_transport", "refuse_if"]

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
"""The only values of these settings that fit replicas that come and go."""


def refuse_if(wrong: bool, message: str) -> None:
    """Raise `ConfigurationError` with ``message`` if ``wrong``."""
    if wrong:
        raise ConfigurationError(message)


def check_name(
    key: str, name: str, known: Sequence[str], arguments: Mapping[str, Any], arguments_key: str | None = None
) -> None:
    """``name`` is one of ours, or code of the user's own; ``arguments`` are for the latter."""
    refuse_if(
        name not in known and not is_own(name),
        f"{key}={name!r} is unknown; {nearest(name, known)} Your own is named module:Class, or FILE.py:Class.",
    )
    section = key.partition(".")[0]
    refuse_if(
        bool(arguments) and not is_own(name),
        f"{arguments_key or f'{section}.arguments'} was given with {key}={name!r}, which has settings of its own in "
        f"[{section}]. Arguments are for your own code, named module:Class.",
    )


def check_lengths(settings: RunSettings, longest: int | None) -> None:
    """Numbers of steps and tokens against each other; ``longest`` is the model's sequence, where known."""
    train, model, inner, steps = settings.train, settings.model, settings.inner, settings.train.steps
    if longest is None and model.source is None:
        longest = model.max_sequence_length
    limit = f"the {longest} tokens of {model.source}" if model.source else f"model.max_sequence_length={longest}"
    refuse_if(
        longest is not None and train.sequence_length > longest,
        f"train.sequence_length={train.sequence_length} exceeds {limit}. Use at most {longest}, or a model that reads "
        "longer sequences.",
    )
    divisor = max(
        n for n in range(1, min(train.batch_size, train.gradient_accumulation) + 1) if train.batch_size % n == 0
    )
    refuse_if(
        divisor != train.gradient_accumulation,
        f"train.gradient_accumulation={train.gradient_accumulation} does not divide "
        f"train.batch_size={train.batch_size}; {divisor} does.",
    )
    for name, least in (("train.data_parallel_steps", 0), ("train.stop_after", 1), ("inner.warmup_steps", 0)):
        value = attrgetter(name)(settings)
        wrong = value is not None and not least <= value <= steps
        refuse_if(wrong, f"{name}={value} was given with train.steps={steps}. Use {least} to {steps}.")
    rest = steps - inner.warmup_steps
    refuse_if(
        inner.decay_steps is not None and not 0 <= inner.decay_steps <= rest,
        f"inner.decay_steps={inner.decay_steps} was given, and {rest} steps follow the warm-up. Use 0 to {rest}.",
    )


def check_averaging(settings: RunSettings) -> None:
    """Clipping takes the norm of whole contributions, and an average by tensors needs whole tensors."""
    average = settings.outer.average
    sharded = settings.transport.replica_size > 1 and settings.train.parallelism == "fsdp"
    refuse_if(
        average != "mean" and settings.algorithm not in ("streaming", "diloco"),
        f"outer.average={average!r} was given with algorithm={settings.algorithm!r}, but only the contributions of "
        "streaming and diloco are averaged in other ways than the mean.",
    )
    refuse_if(
        average == "rda" and sharded,
        f"outer.average='rda' needs whole tensors, and with train.parallelism='fsdp' and "
        f"transport.replica_size={settings.transport.replica_size} no rank has one. Use --train.parallelism ddp.",
    )
    for name in ("max_norm", "median_norm_factor"):
        if (bound := getattr(settings.outer, name)) is None:
            continue
        refuse_if(
            settings.algorithm not in ("streaming", "diloco"),
            f"outer.{name}={bound} was given with algorithm={settings.algorithm!r}, but only the contributions of "
            "streaming and diloco are clipped; inner.clip_norm clips gradients.",
        )
        refuse_if(
            sharded,
            f"outer.{name}={bound} needs whole contributions, and with train.parallelism='fsdp' and "
            f"transport.replica_size={settings.transport.replica_size} no rank has one. Use --train.parallelism ddp.",
        )


def check_means(settings: RunSettings) -> None:
    """Means are encoded where pseudo-gradients are averaged."""
    transport, algorithm, codec = settings.transport, settings.algorithm, settings.transport.mean_codec
    for name, plain in (("mean_codec", ("auto", "float32")), ("mean_error_feedback", (False,))):
        value = getattr(transport, name)
        refuse_if(
            value not in plain and algorithm not in ("streaming", "diloco"),
            f"transport.{name}={value!r} was given with algorithm={algorithm!r}, but only the means of streaming and "
            "diloco are encoded. Leave it out.",
        )
    few = transport.name != "hivemind" and transport.replicas < AUTO_MEANS_FROM_REPLICAS
    refuse_if(
        transport.mean_error_feedback and (codec == "float32" or (codec == "auto" and few)),
        f"transport.mean_error_feedback=true was given with transport.mean_codec={codec!r} and transport.replicas="
        f"{transport.replicas}, where means are float32, which loses nothing. Use --transport.mean-codec fp4 or int8, "
        "or leave it out.",
    )


def check_transport(settings: RunSettings) -> None:
    """What each way between replicas can't do."""
    transport, swarm = settings.transport, settings.swarm
    given = f"transport.name={transport.name!r}"
    if transport.name != "in-process":
        for name in ("faults", "step_time_s"):
            wrong = bool(getattr(transport, name))
            refuse_if(wrong, f"transport.{name} was given with {given}. Use --transport in-process, or leave it out.")
        refuse_if(
            settings.data.streaming and transport.restarts > 0,
            f"transport.restarts={transport.restarts} was given with data.streaming=true, but nobody knows what a "
            "lost replica has read. Use a folder made by `diloco tokenize` as --data, or --resume without restarts.",
        )
        refuse_if(
            settings.algorithm == "none",
            f"algorithm='none', which sends nothing, was given with {given}. Use --transport in-process.",
        )
    else:
        refuse_if(
            transport.secret_file is not None,
            f"transport.secret_file={str(transport.secret_file)!r} was given with {given}, whose replicas are one "
            "process. Leave it out, or use --transport torch.",
        )
    if transport.name == "hivemind":
        refuse_if(
            transport.secret_file is not None,
            f"transport.secret_file={str(transport.secret_file)!r} was given with {given}. Use --swarm.secret-file.",
        )
        _check_swarm(settings)
    else:
        refuse_if(swarm.run is not None, f"swarm.run={swarm.run!r} was given with {given}. Use --transport hivemind.")
        refuse_if(
            swarm.dynamic_steps,
            f"swarm.dynamic_steps=true was given with {given}, but replicas know each other's speeds only in a swarm. "
            "Use --transport hivemind, or let all replicas take every step (--swarm.no-dynamic-steps).",
        )
        refuse_if(
            swarm.straggler == "grace",
            f"swarm.straggler='grace' was given with {given}, but replicas know each other's speeds only in a swarm. "
            "Use --transport hivemind, or --swarm.straggler wait.",
        )


def _check_swarm(settings: RunSettings) -> None:
    """What a swarm needs, and what can't be elastic."""
    transport, swarm, least = settings.transport, settings.swarm, settings.transport.min_replicas
    without = "transport.name='hivemind' was given without swarm.run"
    refuse_if(swarm.run is None, f"{without}. Use --run NAME, the same for all peers of the run.")
    for name, works in _IN_A_SWARM.items():
        value = attrgetter(name)(settings)
        refuse_if(value != works, f"{name}={value!r} was given with transport.name='hivemind'. Use {works!r}.")
    refuse_if(
        settings.data.streaming,
        "data.streaming=true was given with transport.name='hivemind', but replicas that come and go can't share out "
        "what is read while training. Use a folder made by `diloco tokenize` as --data, or --transport torch.",
    )
    refuse_if(
        settings.algorithm == "data-parallel",
        "algorithm='data-parallel' was given with transport.name='hivemind', but replicas that come and go can't "
        "average gradients at every step. Use --algorithm streaming or diloco, or --transport torch.",
    )
    refuse_if(
        least > swarm.start_replicas,
        f"transport.min_replicas={least} was given with swarm.start_replicas={swarm.start_replicas}. "
        f"Use --start-replicas {least} or more.",
    )
    beat_s = transport.heartbeat_s
    refuse_if(
        swarm.straggler != "wait" and swarm.join_window_s < 2 * beat_s,
        f"swarm.join_window_s={swarm.join_window_s:g} was given with transport.heartbeat_s={beat_s:g}, so that a "
        f"replica would count as late between two heartbeats. Use {2 * beat_s:g} or more.",
    )
