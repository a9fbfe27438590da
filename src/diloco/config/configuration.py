"""The configuration of `diloco train`, composed from a preset, a TOML file and the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from diloco.config.flags import CommandLine, parse_flags
from diloco.config.keys import Values, build, flatten, keys_of, layered
from diloco.config.presets import DEFAULT_PRESET, preset_values
from diloco.config.toml import read_toml
from diloco.errors import CheckpointError, ConfigurationError
from diloco.model import get_preset, parse_source
from diloco.monitor import MonitorSettings
from diloco.plugins import is_own, same_code
from diloco.train import RunSettings

__all__ = ["Configuration", "compose", "load_configuration", "overlay", "parse_arguments"]

DESCRIPTION = """Train a language model with DiLoCo or Streaming DiLoCo. Flags override a TOML
file, which overrides the preset. The defaults shown are those of the preset tiny.

Examples:
  diloco train                               the quick start, on bundled text
  diloco train run.toml --steps 2000         settings from a file and from flags
  diloco train --algorithm data-parallel     the baseline, all else the same
  diloco train --resume runs/streaming-tiny  resume a stopped run"""

_NAMED_BY = {"optimizer.arguments": "optimizer.name", "model.arguments": "model.source"}
"""Each table of arguments, and the key that names the object which takes them."""

_ROLES = {"codec": "sync.codec", "outer": "sync.outer", "merge": "sync.merge", "average": "sync.average"}
"""Each table in ``sync.arguments``, and the key that names the object which takes it."""


@dataclass(frozen=True, kw_only=True)
class Configuration(RunSettings):
    """The settings of a run, its preset, and the settings of its monitoring."""

    preset: str = DEFAULT_PRESET
    """Preset of model and training; `diloco presets` lists all."""
    monitor: MonitorSettings = field(default_factory=MonitorSettings)

    @property
    def model_label(self) -> str:
        """The name of the model in the names of run folders."""
        return self.preset if self.model.source is None else parse_source(self.model.source).label

    def __post_init__(self) -> None:
        super().__post_init__()
        # The dataclass is frozen, so object.__setattr__ replaces an alias by the listed name.
        object.__setattr__(self, "preset", get_preset(self.preset).name)


def load_configuration(arguments: Sequence[str]) -> Configuration:
    """Return the configuration for the arguments of `diloco train`, before derived values are resolved.

    Args:
        arguments: an optional TOML file and flags, in any order.

    Raises:
        ConfigurationError: for an unknown flag, key or preset, or a value of the wrong type or out of range.

    >>> load_configuration(["--replicas", "2", "--inner-steps", "25"]).sync.inner_steps
    25
    """
    return compose(parse_arguments(arguments))


def parse_arguments(arguments: Sequence[str]) -> CommandLine:
    """Parse the arguments of `diloco train` without applying defaults."""
    shown = flatten(Configuration()) | preset_values(DEFAULT_PRESET)
    return parse_flags(Configuration, "train", DESCRIPTION, arguments, shown=shown)


def compose(line: CommandLine) -> Configuration:
    """Return the configuration composed of the layers preset, TOML file and flags.

    A model from a source replaces the model of the preset. If the source is a transformers folder with a tokeniser and
    none is given, that tokeniser is used. A run that starts from the checkpoint of such a model (``train.init_from``)
    and names no preset or model uses the model of the checkpoint.

    Raises:
        ConfigurationError: as in `load_configuration`, and for a size of the native decoder together with a source.
    """
    swallowed = [path for path in line.values.get("data.paths", ()) if path.suffix == ".toml"]
    if line.file is None and swallowed:
        raise ConfigurationError(
            f"--data includes {swallowed[-1]}, which looks like a settings file. To use it as settings, put it before "
            "--data. To train on it as text, put it in a folder and give the folder."
        )
    in_file: Values = line.defaults | ({} if line.file is None else read_toml(line.file, Configuration))
    asked = in_file | line.values
    steps = asked.get("train.steps")
    # a number of steps that is invalid is left to the checks of the settings
    preset = preset_values(
        asked.get("preset", DEFAULT_PRESET), steps=steps if isinstance(steps, int) and steps >= 1 else None
    )
    values = overlay(in_file, line.values, preset)
    if values.get("network.transport") == "hivemind" and "network.replicas" not in values:
        values["network.replicas"] = 1  # a swarm begins with its first peer
    init_from = values.get("train.init_from")
    named = {name for name in values if name.startswith("model.")}
    if init_from is not None and "preset" not in values and named <= {"model.source"}:
        values = _model_of_checkpoint(init_from.expanduser(), values) | values
    source = values.get("model.source")
    if source is None:
        return build(Configuration, overlay(preset | _model_of_folder(init_from), values))
    parsed = parse_source(source)
    preset = {name: value for name, value in preset.items() if not name.startswith("model.")}
    place = Path(parsed.place).expanduser()
    if parsed.kind == "hf" and (place / "tokenizer.json").is_file() and "data.tokenizer" not in values:
        values = values | {"data.tokenizer": str(place)}
    return build(Configuration, overlay(preset, values))


def overlay(below: Values, above: Values, beneath: Mapping[str, Any] = {}) -> Values:
    """Return the values of both layers, which lie on those of ``beneath``; those of ``above`` win.

    A table of arguments changes only the entries that it names. If ``above`` selects another optimizer, codec or the
    like, it does not inherit the arguments of the one below.
    """
    before = flatten(RunSettings()) | dict(beneath) | below
    others = {table for table, name in _NAMED_BY.items() if above.get(name, before[name]) != before[name]}
    roles = {role for role, name in _ROLES.items() if above.get(name, before[name]) != before[name]}
    lower = dict(below)
    for table in keys_of(Configuration):
        if table in others:
            lower[table] = {}
        elif (  # with ``beneath``, a later call puts the table on what lies below, which may be another model's
            not beneath and table in _NAMED_BY and table not in lower and any(name.startswith(table) for name in above)
        ):
            lower[table] = before[table]
    if roles:
        lower["sync.arguments"] = {role: each for role, each in before["sync.arguments"].items() if role not in roles}
    return layered(Configuration, lower, above)


def _model_of_checkpoint(path: Path, typed: Values) -> Values:
    """Return the ``model.*`` keys of a checkpoint if its model came from a source and the user chose no other.

    Raises:
        ConfigurationError: that source is code which the user has not named.
    """
    if path.suffix == ".safetensors" or (path / "config.json").is_file():
        return {}
    from diloco.checkpoint import open_checkpoint

    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError:
        return {}  # the code that loads the checkpoint reports what is wrong with it
    described: Any = checkpoint.about.get("model")
    stored, named = described.get("source") if isinstance(described, dict) else None, typed.get("model.source")
    if stored is None or (named is not None and not (is_own(stored) and same_code(stored, named))):
        return {}
    from diloco.trained import model_settings

    section = model_settings(checkpoint, named)
    values = {f"model.{each.name}": getattr(section, each.name) for each in fields(section)}
    return {name: value for name, value in values.items() if value not in (None, {}, 0)}


def _model_of_folder(init_from: Path | None) -> Values:
    """Return the sizes and tokeniser for a native decoder that starts from a transformers folder, or none."""
    folder = None if init_from is None else init_from.expanduser()
    if folder is None or not (folder / "config.json").is_file():
        return {}
    from diloco.model import native_settings

    arguments = native_settings(folder).arguments()
    tokenizer = {"data.tokenizer": str(folder)} if (folder / "tokenizer.json").is_file() else {}
    return {"model.arguments": arguments, **tokenizer}
