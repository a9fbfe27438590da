"""The plan of the run that a command line of `diloco train` asks for: a new run, or a resumed one."""

from __future__ import annotations

import dataclasses
import operator
import os
from dataclasses import dataclass
from pathlib import Path

from diloco import __version__
from diloco.config.configuration import Configuration, compose, overlay
from diloco.config.flags import CommandLine, command_text
from diloco.config.keys import Values, build, flatten, keys_of
from diloco.config.presets import preset_values
from diloco.config.renamed import OldKeyError
from diloco.config.toml import in_toml, read_toml, to_toml
from diloco.errors import ConfigurationError
from diloco.model import parse_source
from diloco.plugins import KEYS, absolute, confirm, is_own, same_code
from diloco.train import notes, resolve

__all__ = ["CONFIG_FILE", "PROCESS_KEYS", "RunPlan", "absolute_inputs", "model_limits", "plan_run", "read_record"]

CONFIG_FILE = "config.toml"

PROCESS_KEYS = ("network.replica", "network.join", "network.listen", "network.announce")
"""Settings that identify one process of a run. They are not written to ``config.toml``."""

_PER_CALL_KEYS = ("out", "train.stop_after", "checkpoint.resume")  # settings of one call of the command

CHANGEABLE = (
    *("train.steps", "train.stop_after", "train.parallelism", "out", "evaluation", "checkpoint", "monitor"),
    *("network", "emulate", "data.skip_bad"),
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
    asked = absolute_inputs(compose(line))
    if asked.checkpoint.resume is not None:
        raise ConfigurationError(
            f"checkpoint.resume={str(asked.checkpoint.resume)!r} cannot be set in {line.file}: a resumed run takes its "
            f"settings from its own folder. Use `{command_text('train', flags={'--resume': asked.checkpoint.resume})}`."
        )
    configuration = _resolved(asked)
    return RunPlan(
        configuration=configuration,
        record=_record(configuration, given=flatten(asked)),
        source=None,
        notes=notes(configuration),
    )


def model_limits(settings: Configuration) -> dict[str, int | None]:
    """Return the layers and the longest sequence of the model, as `resolve` takes them.

    A model from a source is built for this, without its parameters.
    """
    if settings.model.source is None:
        model = settings.model.decoder
        return {"num_layers": model.layers, "max_sequence_length": model.max_sequence_length}
    from diloco.train import outline

    built = outline(settings, 1024)  # any vocabulary size will do: layers and positions don't depend on it
    return {"num_layers": built.num_layers, "max_sequence_length": built.max_sequence_length}


def _resolved(asked: Configuration) -> Configuration:
    """Return ``asked`` resolved for its model."""
    resolved = resolve(asked, **model_limits(asked))
    if any(map(is_own, _named(resolved).values())) or resolved.sync.arguments:
        from diloco.train import check_own_code

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
    saved = flatten(read_record(record))
    confirm(source, saved, line.values)
    wanted = flatten(absolute_inputs(build(Configuration, overlay(saved, line.values))))
    changed = {name: wanted[name] for name in line.values if not same_code(wanted[name], saved[name])}
    allowed = {name for name in changed if {name, name.partition(".")[0]} & {*CHANGEABLE}}
    if "hivemind" in (saved["network.transport"], wanted["network.transport"]):  # a swarm divides the data otherwise
        allowed -= {"network.transport"}
    fixed = [name for name in changed if name not in allowed]
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


def read_record(path: Path) -> Configuration:
    """Return the settings in the ``config.toml`` of a run.

    Raises:
        ConfigurationError: the file can't be read, or the run is of a version before 0.6.
    """
    try:
        return build(Configuration, read_toml(path, Configuration))
    except OldKeyError:
        raise ConfigurationError(
            f"{path.parent} is a run of diloco 0.5 or older: that version resumes and evaluates it, and this one can "
            "only export it, generate with it, or start a new run with --init-from."
        ) from None


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


def _record(configuration: Configuration, *, given: Values | None = None) -> str:
    """Return the text of ``config.toml``, with which `diloco train config.toml` repeats the run."""
    keys = keys_of(Configuration)
    left_out = {name: keys[name].default for name in (*PROCESS_KEYS, *_PER_CALL_KEYS)}
    lasting = build(Configuration, flatten(configuration) | left_out)
    beneath = preset_values(lasting.preset, steps=lasting.train.steps)
    header = f"# Settings as resolved by diloco {__version__}; `diloco train config.toml` repeats this run."
    return f"{header}\n\n{to_toml(lasting, beneath=beneath, given=given)}"


def absolute_inputs(configuration: Configuration) -> Configuration:
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
