"""The whole configuration of `diloco train`, and how it comes about: preset, then TOML file, then command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from diloco.config.flags import CommandLine, parse_flags
from diloco.config.keys import Values, build, flatten
from diloco.config.model_source import with_source
from diloco.config.presets import DEFAULT_PRESET, preset_values
from diloco.config.toml import read_toml
from diloco.errors import ConfigurationError
from diloco.model.presets import get_preset
from diloco.model.settings import parse_source
from diloco.monitor.settings import MonitorSettings
from diloco.train.settings import RunSettings

__all__ = ["Configuration", "compose", "load_configuration", "parse_arguments"]

DESCRIPTION = """Train a language model with DiLoCo or Streaming DiLoCo.

Examples:
  diloco train                               the quick start, on bundled text
  diloco train run.toml --steps 2000         a file; flags override any key
  diloco train --algorithm data-parallel     the baseline, all else the same
  diloco train --resume runs/streaming-tiny  go on with a stopped run

Order: preset, TOML file, flags. Defaults shown are those of preset tiny."""


@dataclass(frozen=True, kw_only=True)
class Configuration(RunSettings):
    """A run, the preset it began from, and what is shown of it."""

    preset: str = DEFAULT_PRESET
    """Model and training defaults to begin from; `diloco presets` lists them."""
    monitor: MonitorSettings = field(default_factory=MonitorSettings)

    @property
    def model_label(self) -> str:
        """What its model is called in the names of run folders."""
        return self.preset if self.model.source is None else parse_source(self.model.source).label

    def __post_init__(self) -> None:
        super().__post_init__()
        # object.__setattr__ is the frozen dataclass's own way to derive a field: an alias becomes the listed name.
        object.__setattr__(self, "preset", get_preset(self.preset).name)
        if self.monitor.every_steps < 1:
            raise ConfigurationError(
                f"monitor.every_steps={self.monitor.every_steps} was given; at least 1 is needed. Nothing was started."
            )


def load_configuration(arguments: Sequence[str]) -> Configuration:
    """The configuration for the arguments of `diloco train`, not yet resolved.

    Args:
        arguments: an optional TOML file and flags, in any order.

    Raises:
        ConfigurationError: an unknown key or preset, a value of the wrong type or out of range.
        SystemExit: with code 2 for an unknown flag or a flag's value of the wrong type (a message is on stderr).

    >>> load_configuration(["--replicas", "2", "--schedule.inner-steps", "25"]).schedule.inner_steps
    25
    """
    return compose(parse_arguments(arguments))


def parse_arguments(arguments: Sequence[str]) -> CommandLine:
    """What was typed after `diloco train`, without any defaults."""
    return parse_flags(
        arguments,
        Configuration,
        shown=flatten(Configuration()) | preset_values(DEFAULT_PRESET),
        program="diloco train",
        description=DESCRIPTION,
    )


def compose(line: CommandLine) -> Configuration:
    """Preset, then what the weights to begin from are of, then the TOML file, then the flags of ``line``."""
    swallowed = [path for path in line.values.get("data.paths", ()) if path.suffix == ".toml"]
    if line.file is None and swallowed:
        raise ConfigurationError(
            f"--data was given {swallowed[-1]}, which looks like the settings of a run; before --data it would be read "
            "as that, and TOML files in a folder as text. Nothing was started."
        )
    values: Values = {} if line.file is None else read_toml(line.file, Configuration)
    values = _overlay(values, line.values)
    preset = preset_values(values.get("preset", DEFAULT_PRESET), steps=_positive(values.get("train.steps")))
    preset, values = with_source(preset, values)
    return build(Configuration, _overlay(preset, values))


def _overlay(below: Values, above: Mapping[str, object]) -> Values:
    """Both layers; another inner optimizer does not inherit the arguments of the one below."""
    values = below | dict(above)
    renamed = "inner.name" in above and above["inner.name"] != below.get("inner.name", RunSettings().inner.name)
    if renamed and "inner.arguments" not in above:
        values["inner.arguments"] = {}
    return values


def _positive(steps: object) -> int | None:
    """The number of steps that a preset can be laid out over; anything else is refused by the settings themselves."""
    return steps if isinstance(steps, int) and steps >= 1 else None
