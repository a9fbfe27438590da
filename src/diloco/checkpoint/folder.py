"""The names in a checkpoints folder, and the moves that never leave it without what was complete before.

::

    checkpoints/
      latest                      a line of text, the newest one's name (not every Windows user may make symlinks)
      step-00001000/
        manifest.json             what it holds, with size and digest of every file
        NAME.json                 the skeleton of part NAME (see `diloco.state_tree`)
        NAME.safetensors          its tensors

A checkpoint is written beside its place as ``.step-00001000.TOKEN.partial`` and renamed when all of it is on the disk.
Only then does ``latest`` move, and only then do the oldest ones go, renamed to ``....deleted`` first. One that is saved
again steps aside as ``....replaced`` and stands in for its successor until that has its name. Every move is one rename,
so a kill falls before or after it. One process writes to a folder; any number may read.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from diloco.checkpoint.disk import sync_folder, write_file

__all__ = ["HIDDEN_NAME", "LATEST", "STEP_NAME", "delete", "hidden_name", "move_in", "point_latest_at"]

LATEST = "latest"
STEP_NAME = re.compile(r"step-\d{8,}\Z")
HIDDEN_NAME = re.compile(r"\.(?P<name>step-\d{8,}|latest)\.[0-9a-f]{8}\.(?P<fate>partial|replaced|deleted)\Z")


def hidden_name(place: Path, fate: str) -> Path:
    """A new name beside ``place`` for something on its way: being written, replaced or deleted."""
    return place.with_name(f".{place.name}.{secrets.token_hex(4)}.{fate}")


def move_in(partial: Path, place: Path) -> None:
    """Give a finished checkpoint its name; one that has that name stays loadable until then."""
    aside = hidden_name(place, "replaced") if place.exists() else None
    if aside:
        os.replace(place, aside)
    try:
        os.replace(partial, place)
    except BaseException:
        if aside:
            os.replace(aside, place)
        raise
    sync_folder(place.parent)
    if aside:
        delete(aside)


def point_latest_at(place: Path) -> None:
    """Make ``latest`` name this checkpoint."""
    latest = place.with_name(LATEST)
    partial = hidden_name(latest, "partial")
    try:
        write_file(partial, [f"{place.name}\n".encode()])
        os.replace(partial, latest)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(place.parent)


def delete(path: Path) -> None:
    """Delete a folder, under another name, so that a half-deleted one never looks complete.

    Files that are still open elsewhere may stay (on network file systems, on Windows); the next save tries them again.
    """
    hidden = HIDDEN_NAME.match(path.name)
    doomed = hidden_name(path.with_name(hidden["name"] if hidden else path.name), "deleted")
    os.replace(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
