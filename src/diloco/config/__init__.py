"""The settings of a run, in layers: preset, TOML file, command line. This package works without torch."""

from __future__ import annotations

from diloco.config.configuration import Configuration, load_configuration
from diloco.config.toml import to_toml

__all__ = ["Configuration", "load_configuration", "to_toml"]
