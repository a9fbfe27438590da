"""Ranges and places of a run's settings, checked before anything starts. Pure, and without torch."""

from __future__ import annotations

import math

from diloco.devices import check_device
from diloco.errors import ConfigurationError
from diloco.train.settings import RunSettings

__all__ = ["check_lengths", "check_optimizers", "check_places", "refuse"]


def refuse(given: str, works: str) -> ConfigurationError:
    """The error that says what was given and what would work."""
    return ConfigurationError(f"{given} was given; {works}. Nothing was started.")


def check_lengths(settings: RunSettings, max_sequence_length: int | None) -> None:
    """Steps, sequences and intervals; ``max_sequence_length`` is the model's, where known."""
    train, model, inner = settings.train, settings.model, settings.inner
    steps = train.steps
    if max_sequence_length is not None and train.sequence_length > max_sequence_length:
        longest = f"model.max_sequence_length={max_sequence_length}"
        if model.source is not None:
            longest = f"model.source={model.source}, whose longest is {max_sequence_length}"
        larger = "a larger model.max_sequence_length" if model.source is None else "another model"
        raise refuse(
            f"train.sequence_length={train.sequence_length} with {longest}",
            f"at most {max_sequence_length}, or {larger} would work",
        )
    if train.stop_after is not None and train.stop_after > steps:
        raise refuse(f"train.stop_after={train.stop_after} with train.steps={steps}", f"1 to {steps} would work")
    if not 0 <= inner.warmup_steps <= steps:
        raise refuse(
            f"inner.warmup_steps={inner.warmup_steps} with train.steps={steps}",
            f"0 to {steps} would work (--inner.warmup-steps)",
        )
    if inner.decay_steps is not None and not 0 <= inner.decay_steps <= steps - inner.warmup_steps:
        raise refuse(
            f"inner.decay_steps={inner.decay_steps} after {inner.warmup_steps} steps of warm-up in {steps}",
            f"0 to {steps - inner.warmup_steps} would work",
        )
    for name, value in (
        ("evaluation.every_steps", settings.evaluation.every_steps),
        ("evaluation.sequences", settings.evaluation.sequences),
        ("evaluation.sample_tokens", settings.evaluation.sample_tokens),
        ("evaluation.sample_every_steps", settings.evaluation.sample_every_steps),
        ("checkpoint.every_steps", settings.checkpoint.every_steps),
    ):
        if value is not None and value < 0:
            raise refuse(f"{name}={value}", "0 or more would work")
    if settings.checkpoint.keep < 1:
        raise refuse(f"checkpoint.keep={settings.checkpoint.keep}", "at least 1 would work")


def check_optimizers(settings: RunSettings) -> None:
    """Numbers of the inner and the outer optimizer."""
    inner, outer = settings.inner, settings.outer
    positive = [("inner.learning_rate", inner.learning_rate), ("outer.epsilon", outer.epsilon)]
    if outer.learning_rate is not None:
        positive.append(("outer.learning_rate", outer.learning_rate))
    if inner.clip_norm is not None:
        positive.append(("inner.clip_norm", inner.clip_norm))
    for name, value in positive:
        if not (value > 0 and math.isfinite(value)):
            raise refuse(f"{name}={value}", "a positive number would work")
    for name, value in (
        ("inner.final_ratio", inner.final_ratio),
        ("outer.learning_rate_final_ratio", outer.learning_rate_final_ratio),
    ):
        if not 0 <= value <= 1:
            raise refuse(f"{name}={value}", "0 to 1 would work")
    if not 0 <= outer.momentum < 1:
        raise refuse(f"outer.momentum={outer.momentum}", "0 or more and less than 1 would work")
    if not all(0 <= beta < 1 for beta in outer.betas):
        raise refuse(f"outer.betas={outer.betas}", "two numbers from 0 to less than 1 would work")
    bounds = {"outer.max_norm": outer.max_norm, "outer.median_norm_factor": outer.median_norm_factor}
    for name, bound in bounds.items():
        if bound is None:
            continue
        if not (bound > 0 and math.isfinite(bound)):
            raise refuse(f"{name}={bound}", "a positive number, or none, would work")
        if settings.algorithm not in ("streaming", "diloco"):
            raise refuse(
                f"{name}={bound} with algorithm={settings.algorithm!r}",
                "only the contributions of streaming and diloco are clipped; inner.clip_norm clips gradients",
            )
        if settings.transport.replica_size > 1 and settings.train.parallelism == "fsdp":
            raise refuse(
                f"{name}={bound} with transport.replica_size={settings.transport.replica_size} and "
                "train.parallelism='fsdp', where no rank has a whole contribution to take the norm of",
                "--train.parallelism ddp would work",
            )
    if outer.momentum_warmup_outer_steps < 0:
        raise refuse(f"outer.momentum_warmup_outer_steps={outer.momentum_warmup_outer_steps}", "0 or more would work")


def _check_wires(settings: RunSettings) -> None:
    """What only emulation can do, and what only processes can."""
    transport = settings.transport
    for name, value in (("faults", transport.faults), ("step_time_s", transport.step_time_s)):
        if value:
            raise refuse(
                f"transport.{name} with transport.name={transport.name!r}",
                "it is for the emulated links of --transport in-process; without it this would work",
            )
    if settings.data.streaming and transport.restarts:
        raise refuse(
            f"transport.restarts={transport.restarts} with data.streaming=true",
            "what a lost replica has read is known to nobody else; --data with a folder that `diloco tokenize` made, "
            "or transport.restarts=0 and --resume, would work",
        )
    if settings.algorithm == "none":
        raise refuse(
            f"algorithm='none' with transport.name={transport.name!r}",
            "independent replicas have nothing to say to each other; --transport in-process would work",
        )


def _check_swarm(settings: RunSettings) -> None:
    """What a swarm needs, and what can't be elastic."""
    transport, swarm = settings.transport, settings.swarm
    if swarm.run is None:
        raise refuse(
            "transport.name='hivemind' without swarm.run", "--run NAME, the same for all peers of the run, would work"
        )
    for given, value, works in (
        ("transport.replica_size", transport.replica_size, 1),
        ("data.sharding", settings.data.sharding, "shuffled"),
        ("transport.rendezvous", transport.rendezvous, None),
        ("transport.host", transport.host, None),
        ("transport.interface", transport.interface, None),
        ("transport.ports", transport.ports, "0"),
        ("transport.bandwidth_bits_per_s", transport.bandwidth_bits_per_s, ()),
        ("transport.latency_s", transport.latency_s, ()),
        ("transport.restarts", transport.restarts, 0),
    ):
        if value != works:
            raise refuse(f"{given}={value!r} with transport.name='hivemind'", f"{works!r} would work")
    if settings.data.streaming:
        raise refuse(
            "data.streaming=true with transport.name='hivemind'",
            "replicas that come and go can't share out what is read while training; --data with a folder that `diloco "
            "tokenize` made, or --transport torch would work",
        )
    if settings.algorithm == "data-parallel":
        raise refuse(
            "algorithm='data-parallel' with transport.name='hivemind'",
            "gradients can't be averaged at every step by replicas that come and go; --algorithm streaming or diloco, "
            "or --transport torch would work",
        )
    if transport.min_replicas > swarm.start_replicas:
        raise refuse(
            f"transport.min_replicas={transport.min_replicas} with swarm.start_replicas={swarm.start_replicas}",
            f"--start-replicas {transport.min_replicas} or more would work",
        )
    if swarm.straggler == "skip" and swarm.join_window_s < 2 * transport.heartbeat_s:
        raise refuse(
            f"swarm.join_window_s={swarm.join_window_s:g} with transport.heartbeat_s={transport.heartbeat_s:g}",
            f"whoever is quiet between two beats would count as late; {2 * transport.heartbeat_s:g} or more would work",
        )


def check_places(settings: RunSettings) -> None:
    """Where the run happens and what it begins from."""
    train = settings.train
    if settings.transport.name != "in-process":
        _check_wires(settings)
    if settings.transport.name == "hivemind":
        _check_swarm(settings)
    elif settings.swarm.run is not None:
        raise refuse(
            f"swarm.run={settings.swarm.run!r} with transport.name={settings.transport.name!r}",
            "--transport hivemind would work",
        )
    elif settings.swarm.dynamic_steps:
        raise refuse(
            f"swarm.dynamic_steps=true with transport.name={settings.transport.name!r}",
            "replicas tell each other their speeds only in a swarm: --transport hivemind would work, or all replicas "
            "taking every step (--swarm.no-dynamic-steps)",
        )
    check_device("train.device", train.device)
    if train.threads is not None and train.threads < 1:
        raise refuse(f"train.threads={train.threads}", "at least 1 would work")
    if settings.checkpoint.resume is not None and train.init_from is not None:
        raise refuse(
            f"checkpoint.resume={settings.checkpoint.resume} together with train.init_from={train.init_from}",
            "one of them would work: --resume goes on with a run, --init-from begins a new one from its parameters",
        )
