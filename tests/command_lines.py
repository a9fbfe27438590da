"""Command lines in their parsed form, because parsing flags takes longer than most tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco.config import CommandLine, Configuration, compose, parse_arguments


def dotted(values: dict[str, Any]) -> dict[str, Any]:
    """Convert keyword arguments to settings keys, with ``__`` for a dot. An entry of a table becomes a table."""
    keys: dict[str, Any] = {}
    for name, value in values.items():
        key, table, entries = name.replace("__", ".").partition(".arguments.")
        for entry in reversed(entries.split(".") if table else []):
            value = {entry: value}
        name = f"{key}.arguments" if table else key
        keys[name] = keys.get(name, {}) | value if table else value
    return keys


def command_line(file: Path | None = None, **values: Any) -> CommandLine:
    """Return a command line with a TOML file and flags for the given keys."""
    return CommandLine(file=file, values=dotted(values))


def load_configuration(arguments: Sequence[str]) -> Configuration:
    """Return the configuration for the arguments of `diloco train`, before derived values are resolved."""
    return compose(parse_arguments(arguments))


def toml_file(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path
