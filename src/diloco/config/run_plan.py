"""The plan of the run that a command line of `diloco train` asks for: a new run, or a resumed one."""

from __future__ import annotations

import dataclasses
import operator
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_origin

from diloco import __version__
from diloco.config.configuration import Configuration, compose, filled_tables
from diloco.config.flags import CommandLine
from diloco.config.keys import Key, Values, build, flatten, keys_of
from diloco.config.presets import preset_values
from diloco.config.toml import in_toml, read_toml, to_toml
from diloco.errors import ConfigurationError
from diloco.model.settings import native_keys, parse_source
from diloco.plugins import KEYS, absolute, confirm, is_own, names_in, own_code, same_code
from diloco.train.resolve import notes, resolve

__all__ = ["RunPlan", "join_command", "plan_run", "resume_command"]

CONFIG_FILE = "config.toml"

PROCESS_KEYS = ("transport.replica", "transport.position", "transport.rendezvous", "transport.inner_store")
"""Settings that identify one process of a run. They are not written to ``config.toml``."""

PEER_KEYS = tuple(f"swarm.{name}" for name in ("join", "identity", "listen", "announce"))  # the same for a swarm peer

_PER_CALL_KEYS = ("out", "train.stop_after", "checkpoint.resume")  # settings of one call of the command

WIRE_KEYS = (
    *(f"transport.{name}" for name in ("on_failure", "min_replicas", "restarts", "host", "ports", "interface")),
    *(f"transport.{name}" for name in ("streams", "piece_bytes", "heartbeat_s", "silence_s")),
    *(f"transport.{name}" for name in ("rendezvous_timeout_s", "round_timeout_s")),
)

CHANGEABLE = (
    *("train.steps", "train.stop_after", "train.threads", "out", "evaluation", "checkpoint", "monitor"),
    *("outer.telemetry", "train.parallelism", "transport.replica_size", "swarm", "data.skip_bad"),
    *(f"transport.{name}" for name in ("replicas", "min_contributors")),
    *(f"transport.{name}" for name in ("bandwidth_bits_per_s", "latency_s", "step_time_s")),
    *PROCESS_KEYS,
    *WIRE_KEYS,
)
"""Keys and sections that may change when a run resumes. None of them changes what a step of a replica computes, except
that `train.steps` stretches the learning-rate schedule. Another number of replicas changes the mean. The run prints a
note about both."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run that is ready to start."""

    configuration: Configuration  # resolved, with absolute paths
    record: str  # text of ``config.toml``, without the settings of this process and this call
    source: Path | None  # run folder to resume from; None for a new run
    notes: tuple[str, ...]  # sentences for the user


def plan_run(line: CommandLine) -> RunPlan:
    """Return the plan for a command line. This function reads files but writes none.

    Raises:
        ConfigurationError: if the settings are invalid.
    """
    resume = line.values.get("checkpoint.resume")
    if resume is not None:
        return _plan_resumed(line, resume)
    asked = _absolute(compose(line))
    if asked.checkpoint.resume is not None:
        raise ConfigurationError(
            f"checkpoint.resume={str(asked.checkpoint.resume)!r} cannot be set in {line.file}: a resumed run takes its "
            f"settings from its own folder. Use `diloco train --resume {asked.checkpoint.resume}`."
        )
    configuration = _resolved(asked)
    return RunPlan(
        configuration=configuration,
        record=_record(configuration, given=flatten(asked)),
        source=None,
        notes=notes(configuration),
    )


def _resolved(asked: Configuration) -> Configuration:
    """Return ``asked`` resolved for its model. A model from a source is built for this, without its parameters."""
    model = asked.model
    num_layers, longest = model.layers, model.max_sequence_length
    if model.source is not None:
        from diloco.train.components import outline

        built = outline(asked, 1024)  # any vocabulary size will do: layers and positions don't depend on it
        num_layers, longest = built.num_layers, built.max_sequence_length
    resolved = resolve(asked, num_layers=num_layers, max_sequence_length=longest)
    if any(is_own(name) for name in _named(resolved).values()):
        from diloco.train.components import check_own_code

        check_own_code(resolved)
    return resolved


def _named(configuration: Configuration) -> Values:
    """Return the settings that may name user-defined code, except for the model."""
    return {
        key: operator.attrgetter(key)(configuration) for key in KEYS if key not in ("model.source", "monitor.sinks")
    }


def _plan_resumed(line: CommandLine, resume: Path) -> RunPlan:
    """Plan to resume the run at ``resume``, with the few changes of settings that are allowed."""
    if line.file is not None:
        raise ConfigurationError(
            f"{line.file} cannot be given together with --resume {resume}: a resumed run takes its settings from its "
            "own folder. Leave the file out."
        )
    source, record = _run_folder(resume)
    saved = flatten(build(Configuration, read_toml(record, Configuration)))
    confirm(source, saved, line.values)
    wanted = flatten(_absolute(build(Configuration, saved | line.values | filled_tables(saved, line.values))))
    changed = {name: wanted[name] for name in line.values if not same_code(wanted[name], saved[name])}
    fixed = [name for name in changed if name not in CHANGEABLE and name.partition(".")[0] not in CHANGEABLE]
    if fixed:
        changes = ", ".join(f"{name} from {in_toml(saved[name])} to {in_toml(changed[name])}" for name in fixed)
        raise ConfigurationError(
            f"--resume {resume} cannot change {changes}: the steps of a resumed run must compute the same. Leave that "
            f"out, or start a new run with --init-from {resume}."
        )
    before, after = saved["train.steps"], wanted["train.steps"]
    if after < before:
        raise ConfigurationError(f"--steps {after} is too few for a run planned for {before}: give {before} or more.")
    stretched = (
        f"train.steps changes from {before} to {after}: the learning-rate schedule now extends over {after} steps, and "
        f"the result differs from that of a run with {after} steps from the start.",
    )
    # The checkpoint holds the parameters that the run started from; only the record keeps their name.
    configuration = _resolved(build(Configuration, wanted | {"train.init_from": None}))
    recorded = build(Configuration, flatten(configuration) | {"train.init_from": saved["train.init_from"]})
    return RunPlan(
        configuration=configuration,
        record=_record(recorded),
        source=source,
        notes=(stretched if after > before else ()) + notes(configuration),
    )


def _run_folder(resume: Path) -> tuple[Path, Path]:
    """Return the run folder that ``resume`` is, or that contains the checkpoint ``resume``, and its settings file.

    On a machine with only some of a run's replicas, the settings are in the replicas' own folders.
    """
    parents = Path(os.path.abspath(resume)).parents
    for folder in (resume, *parents[:2]):
        if (folder / CONFIG_FILE).is_file():
            return folder, folder / CONFIG_FILE
    for record in sorted(resume.glob(f"replica-*/{CONFIG_FILE}")):
        return resume, record
    wrong = f"there is no {CONFIG_FILE} in it" if resume.exists() else "it does not exist"
    raise ConfigurationError(
        f"--resume {resume} must be a run folder, such as runs/streaming-tiny, or a checkpoint in one, but {wrong}."
    )


def resume_command(configuration: Configuration, folder: Path) -> str:
    """Return the command that resumes a stopped run, with the settings that the run's folder does not keep."""
    words = ["diloco", "train", "--resume", str(folder)]
    given, usual = flatten(configuration), flatten(Configuration())
    kept = {name: given[name] for name in (*PROCESS_KEYS, *PEER_KEYS) if given[name] != usual[name]}
    for name, value in (own_code(given) | kept).items():
        words += [f"--{name.replace('_', '-')}", *map(str, names_in(value))]
    return shlex.join(words)


def join_command(typed: Sequence[str], configuration: Configuration) -> list[str]:
    """Return the command with which other peers join the swarm of ``configuration``, up to ``--join``.

    The command repeats ``typed`` without the options about this peer alone. For a resumed run it has only the name of
    the run.
    """
    rest = list(typed)
    if configuration.checkpoint.resume is not None:
        rest = ["train", "--transport", "hivemind", "--run", str(configuration.swarm.run)]
    keys = keys_of(Configuration)
    own = {flag: keys[name] for name in ("out", *PROCESS_KEYS, *PEER_KEYS) for flag in _flags(keys[name])}
    kept, place = [], 0
    while place < len(rest):
        flag, equals, _ = rest[place].partition("=")
        place += 1
        if flag not in own:
            kept.append(shlex.quote(rest[place - 1]))
            continue
        many = get_origin(own[flag].annotation) is tuple
        while not equals and place < len(rest) and not rest[place].startswith("-"):
            place += 1
            if not many:
                break
    return ["diloco", *kept, "--join"]


def _flags(key: Key) -> tuple[str, ...]:
    return (f"--{key.name.replace('_', '-')}", *key.aliases)


def _record(configuration: Configuration, *, given: Values | None = None) -> str:
    """Return the text of ``config.toml``, with which `diloco train config.toml` repeats the run."""
    keys = keys_of(Configuration)
    left_out = {name: keys[name].default for name in (*PROCESS_KEYS, *PEER_KEYS, *_PER_CALL_KEYS)}
    lasting = build(Configuration, flatten(configuration) | left_out)
    beneath = preset_values(lasting.preset, steps=lasting.train.steps)
    header = f"# Settings as resolved by diloco {__version__}; `diloco train config.toml` repeats this run."
    without = {f"model.{name}" for name in native_keys(lasting.model.source)}
    return f"{header}\n\n{to_toml(lasting, beneath=beneath, given=given, without=without)}"


def _absolute(configuration: Configuration) -> Configuration:
    """Return the configuration with absolute input paths, so that the run can resume in another working directory."""
    model, train = configuration.model, configuration.train
    init_from = None if train.init_from is None else Path(os.path.abspath(train.init_from.expanduser()))
    values: Values = {"train.init_from": init_from, "model.source": _absolute_source(model.source)}
    values |= {key: absolute(name) for key, name in _named(configuration).items() if name is not None}
    absolute_data = dataclasses.replace(configuration, data=configuration.data.absolute())
    return build(Configuration, flatten(absolute_data) | values)


def _absolute_source(source: str | None) -> str | None:
    """Return the source with an absolute path if it names a path. Names on the hub and of modules stay the same."""
    if source is None:
        return None
    parsed = parse_source(source)
    if parsed.kind == "module":
        return absolute(source)
    path = Path(parsed.place).expanduser()
    return f"hf:{os.path.abspath(path)}" if path.exists() else source
