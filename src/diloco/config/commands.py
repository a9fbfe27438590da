"""The commands with which a run is joined and resumed, made from its resolved settings and not from what was typed."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco.config.configuration import Configuration, compose, parse_arguments
from diloco.config.finetune import finetune_line, usual_values, with_steps
from diloco.config.flags import CommandLine, command_text
from diloco.config.keys import flatten, keys_of
from diloco.config.presets import preset_values
from diloco.config.run_plan import CONFIG_FILE, PROCESS_KEYS, absolute_inputs, model_limits
from diloco.errors import ConfigurationError
from diloco.model import parse_source
from diloco.plugins import own_code
from diloco.train import resolve

__all__ = ["join_command", "resume_command"]

_PRIVATE = (
    *("out", "checkpoint", "monitor", "emulate", *PROCESS_KEYS),
    *("train.device", "train.global_device", "train.stop_after"),
    *("network.name", "network.behind_nat", "network.secret_file"),
)
"""Keys and sections about one machine and its owner, which a command for another machine does not repeat."""

_FIRST = (
    *("preset", "algorithm", "train.steps", "train.sequence_length", "optimizer.name", "model.source"),
    *("data.paths", "data.sources", "data.format", "network.transport", "network.run"),
)
"""Keys from which others follow, or without which a run is refused."""


def resume_command(command: str, configuration: Configuration, folder: Path, join: Sequence[str] = ()) -> str:
    """Return the command that resumes a stopped run, with the settings that the run's folder does not keep.

    Args:
        command: ``"train"`` or ``"finetune"``.
        join: addresses of peers that still train. Those that this run was started with may have been reused since.
    """
    values, usual = flatten(configuration), flatten(Configuration())
    swarm = configuration.network.transport == "hivemind"
    own = [name for name in PROCESS_KEYS if not (swarm and name == "network.join")]
    kept = own_code(values) | {name: values[name] for name in own if values[name] != usual[name]}
    kept |= {"network.join": tuple(join)} if join else {}
    return command_text(command, flags={"--resume": folder} | _flags(kept))


def join_command(command: str, configuration: Configuration, folder: Path) -> str:
    """Return the command with which other peers join the swarm of ``configuration``, without --join and an address.

    It sets the keys in which the run differs from what the other flags give, except those in `_PRIVATE`. Settings that
    no flags express are read from the record in ``folder``.

    Args:
        command: ``"train"`` or ``"finetune"``.
        configuration: the resolved settings.
    """
    goal, source = flatten(configuration), configuration.model.source
    place = None if source is None or command != "finetune" else parse_source(source).place
    private = {name for name in goal if {name, name.partition(".")[0]} & {*_PRIVATE}}
    usual = flatten(Configuration()) | preset_values(configuration.preset) | {"preset": Configuration.preset}
    if place is not None:
        usual |= usual_values(full=False) | {"train.sequence_length": goal["train.sequence_length"]}
    values = {name: goal[name] for name in _FIRST if goal[name] != usual[name] or (name == "train.steps" and place)}
    limits = model_limits(configuration)
    with contextlib.suppress(ConfigurationError):  # such as two values of a list that begin with dashes
        for _ in range(3):  # what was set may change what follows
            line = CommandLine(file=None if place is None else Path(place), print_config=False, values=values)
            if place is not None:
                line, _ = with_steps(finetune_line(line, full=False), 0, 1.0, 1)
            settings = flatten(resolve(absolute_inputs(compose(line)), **limits))
            other = {name: value for name, value in goal.items() if value != settings[name] and name not in private}
            if not other:
                shown = {name: _from_here(each) for name, each in values.items() if name != "model.source" or not place}
                text = command_text(command, *([_from_here(place)] if place else []), flags=_flags(shown))
                if parse_arguments(shlex.split(text)[2:]).values == shown:
                    return text
            values = values | other
    return command_text("train", folder / CONFIG_FILE)


def _flags(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by flag: the short one where there is one, except for switches, whose negation has none."""
    keys = keys_of(Configuration)

    def flag(name: str) -> str:
        short = [alias for alias in keys[name].aliases if alias.startswith("--")]
        return short[0] if short and keys[name].annotation is not bool else f"--{name.replace('_', '-')}"

    return {flag(name): value for name, value in values.items()}


def _from_here(value: Any) -> Any:
    """Return a path, or paths, below the working directory as relative ones, which other machines have as well."""
    if isinstance(value, tuple):
        return tuple(_from_here(item) for item in value)
    if isinstance(value, Path):
        return Path(_from_here(str(value)))
    if not isinstance(value, str):
        return value
    kind = "hf:" if value.startswith("hf:") else ""
    return kind + value.removeprefix(kind).removeprefix(f"{Path.cwd()}/")
