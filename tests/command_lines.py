"""Command lines as they are once their flags have been parsed, which takes longer than most tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diloco.config.flags import CommandLine


def dotted(values: dict[str, Any]) -> dict[str, Any]:
    """Settings that were given as keyword arguments, which have ``__`` for a dot."""
    return {name.replace("__", "."): value for name, value in values.items()}


def command_line(file: Path | None = None, **values: Any) -> CommandLine:
    """With a TOML file and flags of these keys."""
    return CommandLine(file=file, print_config=False, values=dotted(values))


def toml_file(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path
