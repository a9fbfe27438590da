"""What a command line of `diloco train` comes to: a new run, or an old one that goes on."""

from __future__ import annotations

import dataclasses
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from diloco import __version__
from diloco.config.configuration import Configuration, compose
from diloco.config.flags import CommandLine
from diloco.config.keys import Values, build, flatten
from diloco.config.model_source import absolute_source, outline_of
from diloco.config.presets import preset_values
from diloco.config.toml import in_toml, read_toml, to_toml
from diloco.errors import ConfigurationError
from diloco.model.settings import native_keys
from diloco.train.resolve import notes, resolve
from diloco.transport.hivemind.settings import SwarmSettings

__all__ = ["RunPlan", "command_to_go_on", "plan_run"]

CONFIG_FILE = "config.toml"

_LISTEN = SwarmSettings().listen

PROCESS_KEYS = ("transport.replica", "transport.position", "transport.rendezvous", "transport.inner_store")
"""Which of the processes this one is: in no record."""

_PEER_KEYS = tuple(f"swarm.{name}" for name in ("join", "identity", "listen", "announce"))
"""The same of a peer."""

WIRE_KEYS = (
    *(f"transport.{name}" for name in ("on_failure", "min_replicas", "restarts", "host", "ports", "interface")),
    *(f"transport.{name}" for name in ("streams", "piece_bytes", "heartbeat_s", "silence_s")),
    *(f"transport.{name}" for name in ("rendezvous_timeout_s", "round_timeout_s")),
)

PER_REPLICA = ("bandwidth_bits_per_s", "latency_s", "step_time_s")

CHANGEABLE = (
    *("train.steps", "train.stop_after", "train.threads", "out", "evaluation", "checkpoint", "monitor"),
    *("train.parallelism", "transport.replica_size", "swarm"),
    *(f"transport.{name}" for name in ("replicas", "min_contributors", *PER_REPLICA)),
    *PROCESS_KEYS,
    *WIRE_KEYS,
)
"""Keys and sections that may differ when a run goes on: none of them changes what a step of a replica computes, but
`train.steps` stretches the learning-rate schedule, and with another number of replicas the mean is over others. Both
are told."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run that can begin.

    Attributes:
        configuration: resolved, paths absolute.
        record: what ``config.toml`` shall hold: all of it but where it goes, when it stops and what it goes on from.
        source: the run folder that it goes on from; None for a new run.
        notes: what the user should know, a sentence each.
    """

    configuration: Configuration
    record: str
    source: Path | None
    notes: tuple[str, ...]


def plan_run(line: CommandLine) -> RunPlan:
    """Resolve a command line; reads files and writes none.

    Raises:
        ConfigurationError: for anything that cannot work.
    """
    resume = line.values.get("checkpoint.resume")
    if resume is not None:
        return _go_on(line, resume)
    asked = _absolute(compose(line))
    if asked.checkpoint.resume is not None:
        raise ConfigurationError(
            f"checkpoint.resume={str(asked.checkpoint.resume)!r} stands in {line.file}; the settings of a run that "
            f"goes on come from its own folder: `diloco train --resume {asked.checkpoint.resume}` would work. "
            "Nothing was started."
        )
    configuration = _resolved(asked)
    return RunPlan(
        configuration=configuration,
        record=_record(configuration, given=flatten(asked)),
        source=None,
        notes=notes(configuration),
    )


def _resolved(asked: Configuration) -> Configuration:
    outline = outline_of(asked)
    return resolve(asked, num_layers=outline.num_layers, max_sequence_length=outline.max_sequence_length)


def _go_on(line: CommandLine, resume: Path) -> RunPlan:
    """The settings of the run at ``resume``, with the few changes that a run can take."""
    if line.file is not None:
        raise ConfigurationError(
            f"{line.file} was given together with --resume {resume}; the settings come from {resume} then, and either "
            "of the two alone would work. Nothing was started."
        )
    source, record = _run_folder(resume)
    saved = flatten(build(Configuration, read_toml(record, Configuration)))
    wanted = flatten(_absolute(build(Configuration, saved | line.values)))
    changed = {name: wanted[name] for name in line.values if wanted[name] != saved[name]}
    fixed = [name for name in changed if name not in CHANGEABLE and name.partition(".")[0] not in CHANGEABLE]
    if fixed:
        changes = ", ".join(f"{name} from {in_toml(saved[name])} to {in_toml(changed[name])}" for name in fixed)
        raise ConfigurationError(
            f"--resume {resume} was given with a change of {changes}; a run that goes on keeps what its steps compute. "
            f"Without that, or as a new run with --init-from {resume} it would work. Nothing was started."
        )
    before, after = saved["train.steps"], wanted["train.steps"]
    if after < before:
        raise ConfigurationError(
            f"--steps {after} was given for a run laid out over {before}; {before} or more would work. "
            "Nothing was started."
        )
    stretched = (
        f"train.steps goes from {before} to {after}: the learning-rate schedule is laid out anew over {after} steps, "
        "and the run is not what it would have been with either number from the start.",
    )
    # What the run began from is in its checkpoint; the record keeps the name.
    values: Values = wanted | {"train.init_from": None}
    asked = build(Configuration, values)
    configuration = _resolved(asked)
    init_from = saved["train.init_from"]
    recorded = dataclasses.replace(configuration, train=dataclasses.replace(configuration.train, init_from=init_from))
    return RunPlan(
        configuration=configuration,
        record=_record(recorded),
        source=source,
        notes=(stretched if after > before else ()) + notes(configuration),
    )


def _run_folder(resume: Path) -> tuple[Path, Path]:
    """The run folder for a run folder, its checkpoints, or one of them; and where its settings are.

    On a machine that had only some of a run's replicas, their own folders hold the settings.
    """
    parents = Path(os.path.abspath(resume)).parents
    for folder in (resume, *parents[:2]):
        if (folder / CONFIG_FILE).is_file():
            return folder, folder / CONFIG_FILE
    for record in sorted(resume.glob(f"replica-*/{CONFIG_FILE}")):
        return resume, record
    wrong = f"there is no {CONFIG_FILE} in it" if resume.exists() else "it does not exist"
    raise ConfigurationError(
        f"--resume {resume} was given, and {wrong}; a run folder such as runs/streaming-tiny, or a checkpoint in one, "
        "would work. Nothing was started."
    )


def command_to_go_on(configuration: Configuration, folder: Path) -> str:
    """What somebody types to go on with a run that was stopped, with what its folder does not keep."""
    words = ["diloco", "train", "--resume", str(folder)]
    given, usual = flatten(configuration), flatten(Configuration())
    for name in (*PROCESS_KEYS, *_PEER_KEYS):
        if given[name] != usual[name]:
            values = given[name] if isinstance(given[name], tuple) else (given[name],)
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return shlex.join(words)


def _record(configuration: Configuration, *, given: Values | None = None) -> str:
    """The text of ``config.toml``: `diloco train config.toml` begins the same run again."""
    lasting = dataclasses.replace(
        configuration,
        out=None,
        train=dataclasses.replace(configuration.train, stop_after=None),
        checkpoint=dataclasses.replace(configuration.checkpoint, resume=None),
        transport=dataclasses.replace(
            configuration.transport, replica=None, position=0, rendezvous=None, inner_store=None
        ),
        swarm=dataclasses.replace(configuration.swarm, join=(), identity=None, listen=_LISTEN, announce=()),
    )
    beneath = preset_values(lasting.preset, steps=lasting.train.steps)
    header = f"# As resolved by diloco {__version__}; `diloco train config.toml` begins this run again."
    without = {f"model.{name}" for name in native_keys(lasting.model.source)}
    return f"{header}\n\n{to_toml(lasting, beneath=beneath, given=given, without=without)}"


def _absolute(configuration: Configuration) -> Configuration:
    """The configuration with every input path absolute, so that the run can go on from another working directory."""
    train = configuration.train
    init_from = None if train.init_from is None else _expand(train.init_from)
    return dataclasses.replace(
        configuration,
        data=configuration.data.absolute(),
        model=dataclasses.replace(configuration.model, source=absolute_source(configuration.model.source)),
        train=dataclasses.replace(train, init_from=init_from),
    )


def _expand(path: Path) -> Path:
    return Path(os.path.abspath(path.expanduser()))
