"""Checks that refuse settings which can't work together, before any value is derived. Does not import torch."""

from __future__ import annotations

from operator import attrgetter

from diloco.errors import ConfigurationError
from diloco.train.settings import RunSettings

__all__ = ["check_averaging", "check_lengths", "check_network", "refuse_if"]


def refuse_if(wrong: bool, message: str) -> None:
    """Raise `ConfigurationError` with ``message`` if ``wrong``."""
    if wrong:
        raise ConfigurationError(message)


def check_lengths(settings: RunSettings, longest: int | None) -> None:
    """Check numbers of steps and tokens against each other.

    Args:
        longest: the longest sequence of the model, or None if it is not known here.
    """
    train, model, steps = settings.train, settings.model.settings, settings.train.steps
    if longest is None and model.source is None:
        longest = model.max_sequence_length
    limit = (
        f"the {longest} tokens of {model.source}" if model.source else f"model.arguments.max_sequence_length={longest}"
    )
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
    for name, least in (("train.data_parallel_steps", 0), ("train.stop_after", 1), ("optimizer.warmup_steps", 0)):
        value = attrgetter(name)(settings)
        wrong = value is not None and not least <= value <= steps
        refuse_if(wrong, f"{name} must be from {least} to train.steps={steps}, got {value}.")


def check_averaging(settings: RunSettings) -> None:
    """Check clipping, which needs the norm of whole contributions, and what only some algorithms average."""
    sync, algorithm = settings.sync, settings.algorithm
    outer_loop = algorithm in ("streaming", "diloco")
    refuse_if(
        sync.average != "mean" and not outer_loop,
        f"sync.average={sync.average!r} can't be used with algorithm={algorithm!r}: only streaming and diloco send "
        "contributions that can be averaged by another rule than the mean. Leave it out.",
    )
    refuse_if(
        sync.mean_codec not in ("auto", "float32") and not outer_loop,
        f"sync.arguments.average.codec={sync.mean_codec!r} can't be used with algorithm={algorithm!r}: only the means "
        "of streaming and diloco are encoded. Leave it out.",
    )
    if sync.max_norm is not None:
        bound = f"sync.arguments.average.max_norm={sync.max_norm}"
        refuse_if(
            not outer_loop,
            f"{bound} can't be used with algorithm={algorithm!r}: only streaming and diloco send contributions to "
            "clip. Leave it out, or use optimizer.clip_norm to clip gradients.",
        )
        refuse_if(
            settings.network.replica_size > 1 and settings.train.parallelism == "fsdp",
            f"{bound} needs whole contributions, but with train.parallelism='fsdp' and network.replica_size="
            f"{settings.network.replica_size} each rank has only shards. Use --train.parallelism ddp.",
        )


def check_network(settings: RunSettings) -> None:
    """Refuse settings that the chosen transport does not support."""
    network = settings.network
    chosen = f"network.transport={network.transport!r}"
    if network.transport == "hivemind":
        _check_swarm(settings)
    else:
        refuse_if(
            network.run is not None,
            f"--run {network.run} needs a swarm, but {chosen}. Add --transport hivemind, or leave --run out.",
        )
        refuse_if(
            network.straggler != "wait",
            f"network.straggler={network.straggler!r} can't be used with {chosen}: only a swarm continues without a "
            "late replica. Use --transport hivemind, or leave it out.",
        )
        for name in ("allow", "announce", "behind_nat"):
            refuse_if(
                bool(getattr(network, name)),
                f"network.{name} can't be used with {chosen}. Use --transport hivemind, or leave it out.",
            )
    if network.transport == "in-process":
        for name in ("secret_file", "join", "listen"):
            refuse_if(
                bool(getattr(network, name)),
                f"network.{name}={getattr(network, name)!s} can't be used with {chosen}, which has a single process. "
                "Use --transport torch or hivemind, or leave it out.",
            )
    else:
        refuse_if(
            settings.algorithm == "none",
            f"algorithm='none' sends nothing and can't be used with {chosen}. Use --transport in-process.",
        )


def _check_swarm(settings: RunSettings) -> None:
    """Check the settings that a swarm needs, and refuse those that can't work with replicas that join and leave."""
    network = settings.network
    chosen = "network.transport='hivemind'"
    refuse_if(
        network.run is None,
        f"{chosen} needs the name of the run. Use --run NAME, the same for all peers of the run.",
    )
    for name, value, works in (
        ("network.replica_size", network.replica_size, 1),
        ("sharding", settings.data.sharding, "shuffled"),
    ):
        refuse_if(value != works, f"{name}={value!r} can't be used with {chosen}. Use {works!r}.")
    refuse_if(
        settings.data.streaming,
        f"data.streaming=true can't be used with {chosen}, because replicas that join and leave can't divide data that "
        "is read while training. Pass a folder made by `diloco tokenize` as --data, or use --transport torch.",
    )
    refuse_if(
        settings.algorithm == "data-parallel",
        f"algorithm='data-parallel' can't be used with {chosen}, because replicas that join and leave can't average "
        "gradients at every step. Use --algorithm streaming or diloco, or --transport torch.",
    )
    refuse_if(
        network.min_replicas > network.replicas,
        f"network.replicas must be at least network.min_replicas={network.min_replicas}, got {network.replicas}. Use "
        f"--replicas {network.min_replicas} or more.",
    )
