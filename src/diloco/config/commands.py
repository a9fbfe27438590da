"""The commands with which a run is joined and resumed, made from its resolved settings and not from what was typed."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco.config.configuration import Configuration, compose, parse_arguments
from diloco.config.flags import CommandLine, command_text
from diloco.config.keys import Values, flatten, keys_of
from diloco.config.presets import FINETUNE, preset_values
from diloco.config.run_plan import CONFIG_FILE, PROCESS_KEYS, absolute_inputs, model_limits
from diloco.errors import ConfigurationError
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


def resume_command(configuration: Configuration, folder: Path, join: Sequence[str] = ()) -> str:
    """Return the command that resumes a stopped run, with the settings that the run's folder does not keep.

    Args:
        join: addresses of peers that still train. Those that this run was started with may have been reused since.
    """
    values, usual = flatten(configuration), flatten(Configuration())
    swarm = configuration.network.transport == "hivemind"
    own = [name for name in PROCESS_KEYS if not (swarm and name == "network.join")]
    kept = own_code(values) | {name: values[name] for name in own if values[name] != usual[name]}
    kept |= {"network.join": tuple(join)} if join else {}
    return command_text("train", flags={"--resume": folder} | _flags(kept))


def join_command(configuration: Configuration, folder: Path) -> str:
    """Return the command with which other peers join the swarm of ``configuration``, without --join and an address.

    It sets the keys in which the run differs from what the other flags give, except those in `_PRIVATE`. Settings that
    no flags express are read from the record in ``folder``.

    Args:
        configuration: the resolved settings.
    """
    goal = {name: value for name, value in flatten(configuration).items()}
    private = {name for name in goal if {name, name.partition(".")[0]} & {*_PRIVATE}}
    usual = flatten(Configuration()) | preset_values(configuration.preset, {"model.source": configuration.model.source})
    values: Values = {name: goal[name] for name in _FIRST if goal[name] != usual[name]}
    if configuration.preset != Configuration.preset:
        values = {"preset": configuration.preset, **values}
    if configuration.preset == FINETUNE:  # its number of steps follows from data
        values["train.steps"] = goal["train.steps"]
    limits = model_limits(configuration)
    with contextlib.suppress(ConfigurationError):  # such as a list that is empty
        for _ in range(3):  # what was set may change what follows
            settings = flatten(resolve(absolute_inputs(compose(CommandLine(values=values))), **limits))
            other = {name: value for name, value in goal.items() if value != settings[name] and name not in private}
            if not other:
                shown = {name: _from_here(value) for name, value in values.items()}
                text = command_text("train", flags=_flags(shown))
                if parse_arguments(shlex.split(text)[2:]).values == shown:
                    return text
            values |= other
    return command_text("train", folder / CONFIG_FILE)


def _flags(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by flag: the short one where there is one, except for switches, whose negation has none."""
    keys = keys_of(Configuration)

    def flag(name: str) -> str:
        short = [alias for alias in keys[name].aliases if alias.startswith("--")]
        return short[0] if short and not keys[name].is_switch else keys[name].flag

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
