"""Command lines in their parsed form, because parsing flags takes longer than most tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diloco.config import CommandLine


def dotted(values: dict[str, Any]) -> dict[str, Any]:
    """Convert keyword arguments to settings keys, with ``__`` for a dot."""
    return {name.replace("__", "."): value for name, value in values.items()}


def command_line(file: Path | None = None, **values: Any) -> CommandLine:
    """Return a command line with a TOML file and flags for the given keys."""
    return CommandLine(file=file, print_config=False, values=dotted(values))


def toml_file(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path
