"""The plan of the run that a command line of `diloco train` asks for: a new run, or a resumed one."""

from __future__ import annotations

import dataclasses
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco import __version__
from diloco.config.configuration import Configuration, compose, layered
from diloco.config.flags import CommandLine, command_text
from diloco.config.keys import build, flatten, keys_of
from diloco.config.names import OldKeyError
from diloco.config.presets import preset_values
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

_CHANGEABLE = (
    *("train.steps", "train.stop_after", "train.parallelism", "out", "evaluation", "checkpoint", "monitor"),
    *("network", "emulate", "data.skip_bad"),
)
"""Keys and sections that may change when a run resumes. None of them changes what a step of a replica computes, except
that `train.steps` stretches the learning-rate schedule. Another number of replicas changes the mean. The run prints a
note about both."""

_CODE_KEYS = [key for key in KEYS if key not in ("model.source", "monitor.sinks")]


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
    resolved = _resolved(asked)
    record = _record(resolved, flatten(asked))
    return RunPlan(configuration=resolved, record=record, source=None, notes=notes(resolved))


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
    if resolved.sync.arguments or any(is_own(operator.attrgetter(key)(resolved)) for key in _CODE_KEYS):
        from diloco.train import check_own_code

        check_own_code(resolved)
    return resolved


def _plan_resumed(line: CommandLine, resume: Path) -> RunPlan:
    """Plan to resume the run at ``resume``, with the few changes of settings that are allowed."""
    if line.file is not None:
        raise ConfigurationError(
            f"{line.file} cannot be given together with --resume {resume}: a resumed run takes its settings from its "
            "own folder. Leave the file out."
        )
    source, path = _run_folder(resume)
    saved = flatten(read_record(path))
    confirm(source, saved, line.values)
    wanted = flatten(absolute_inputs(build(Configuration, layered(saved, line.values))))
    swarm = "hivemind" in (saved["network.transport"], wanted["network.transport"])  # it divides the data otherwise
    fixed = [
        f"{name} from {in_toml(saved[name])} to {in_toml(wanted[name])}"
        for name in line.values
        if not same_code(wanted[name], saved[name])
        and ((swarm and name == "network.transport") or not {name, name.partition(".")[0]} & {*_CHANGEABLE})
    ]
    if fixed:
        raise ConfigurationError(
            f"--resume {resume} cannot change {', '.join(fixed)}: the steps of a resumed run must compute the same. "
            f"Leave that out, or start a new run with --init-from {resume}."
        )
    before, after = saved["train.steps"], wanted["train.steps"]
    if after < before:
        raise ConfigurationError(f"--steps {after} is too few for a run planned for {before}: give {before} or more.")
    stretched = (
        f"train.steps changes from {before} to {after}: the learning-rate schedule now extends over {after} steps, and "
        f"the result differs from that of a run with {after} steps from the start.",
    )
    # The checkpoint holds the parameters that the run started from; only the record keeps their name.
    resolved = _resolved(build(Configuration, wanted | {"train.init_from": None}))
    return RunPlan(
        configuration=resolved,
        record=_record(build(Configuration, flatten(resolved) | {"train.init_from": saved["train.init_from"]})),
        source=source,
        notes=(stretched if after > before else ()) + notes(resolved),
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
    for folder in (resume, *Path(os.path.abspath(resume)).parents[:2]):
        if (folder / CONFIG_FILE).is_file():
            return folder, folder / CONFIG_FILE
    for path in sorted(resume.glob(f"replica-*/{CONFIG_FILE}")):
        return resume, path
    wrong = f"there is no {CONFIG_FILE} in it" if resume.exists() else "it does not exist"
    raise ConfigurationError(
        f"--resume {resume} must be a run folder, such as runs/streaming-tiny, or a checkpoint in one, but {wrong}."
    )


def _record(configuration: Configuration, given: Mapping[str, Any] = {}) -> str:
    """Return the text of ``config.toml``, with which `diloco train config.toml` repeats the run."""
    keys = keys_of(Configuration)
    left_out = {name: keys[name].default for name in (*PROCESS_KEYS, *_PER_CALL_KEYS)}
    values = flatten(configuration) | left_out
    text = to_toml(build(Configuration, values), beneath=preset_values(configuration.preset, values), given=given)
    return f"# Settings as resolved by diloco {__version__}; `diloco train config.toml` repeats this run.\n\n{text}"


def absolute_inputs(configuration: Configuration) -> Configuration:
    """Return the configuration with absolute input paths, so that the run can resume in another working directory."""
    values = flatten(dataclasses.replace(configuration, data=configuration.data.absolute()))
    values |= {key: absolute(values[key]) for key in _CODE_KEYS if values[key] is not None}
    if values["train.init_from"] is not None:
        values["train.init_from"] = Path(os.path.abspath(values["train.init_from"].expanduser()))
    if values["model.source"] is not None:
        source = parse_source(values["model.source"])
        path = Path(source.place).expanduser()
        if source.kind == "module":
            values["model.source"] = absolute(values["model.source"])
        elif path.exists():  # else a name on the hub
            values["model.source"] = f"hf:{os.path.abspath(path)}"
    return build(Configuration, values)
