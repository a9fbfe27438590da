"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from diloco.errors import DiLoCoError

__all__ = ["write_whole"]


def write_whole(path: Path, content: str | bytes) -> None:
    """Write beside and rename, so that nobody reads half a file; text as UTF-8.

    Raises:
        DiLoCoError: if it can't be written; what was there before still is.
    """
    beside = path.with_name(f".{path.name}.partial")
    try:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(beside, path)
    except OSError as error:
        raise DiLoCoError(
            f"{path} can't be written: {error.strerror or error}. A folder that can be written to, with room in it, "
            "would work. What was there before still is."
        ) from error
