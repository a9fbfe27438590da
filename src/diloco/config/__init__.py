"""Everything that can be set: presets, one TOML file, the command line, in this order. No torch here."""

from __future__ import annotations

from diloco.config.configuration import Configuration, load_configuration
from diloco.config.toml import to_toml

__all__ = ["Configuration", "load_configuration", "to_toml"]
