"""The names in a checkpoints folder, and the moves that never leave it without what was complete before.

``step-XXXXXXXX`` is a checkpoint, ``latest`` a line of text that names one. A dot, such a name, a token and a fate is
something on its way: ``partial`` is being written, ``replaced`` stands in for its successor until that has its name,
``deleted`` is going. Every move is one rename, so a kill falls before or after it.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from pathlib import Path

from diloco.errors import CheckpointError
from diloco.train.manifest import Manifest, read_manifest
from diloco.train.tensor_file import FileFacts, sync_folder, write_file

__all__ = [
    "LATEST",
    "STEP_NAME",
    "check_file",
    "complete",
    "delete",
    "hidden_name",
    "move_in",
    "point_latest_at",
    "put_right",
    "read_complete",
    "stand_in",
]

LATEST = "latest"
STEP_NAME = re.compile(r"step-\d{8,}\Z")
_HIDDEN_NAME = re.compile(r"\.(?P<name>step-\d{8,}|latest)\.[0-9a-f]{8}\.(?P<fate>partial|replaced|deleted)\Z")


def read_complete(place: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there and of the right size (their digests are not looked at).

    Raises:
        CheckpointError: when it is not complete.
    """
    manifest = read_manifest(place)
    for files in manifest.parts.values():
        for name, facts in files.items():
            check_file(place / name, facts)
    return manifest


def check_file(path: Path, facts: FileFacts) -> None:
    """Look whether a file is there, is a file, and has the size it should have.

    Raises:
        CheckpointError: when not.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}.") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is a link or no file at all, and may lead outside of the checkpoint's folder.")
    if status.st_size != facts.size_bytes:
        raise CheckpointError(
            f"{path} is damaged: it has {status.st_size} bytes, not the manifest's {facts.size_bytes}."
        )


def complete(folder: Path) -> list[tuple[int, Path]]:
    """Serial and place of every complete checkpoint, in the order of saving."""
    names = set()
    for entry in folder.iterdir() if folder.is_dir() else ():
        hidden = _HIDDEN_NAME.match(entry.name)
        if STEP_NAME.match(entry.name):
            names.add(entry.name)
        elif hidden and hidden["fate"] == "replaced":
            names.add(hidden["name"])
    found = []
    for place in (stand_in(folder / name) for name in names):
        if (serial := _serial(place)) is not None:
            found.append((serial, place))
    return sorted(found)


def _serial(place: Path) -> int | None:
    """The serial of a complete checkpoint, or None when it is not complete."""
    try:
        return read_complete(place).serial
    except CheckpointError:
        return None


def stand_in(place: Path) -> Path:
    """Where the checkpoint called ``place`` is: there, or aside when a kill fell while it was being replaced."""
    if place.exists():
        return place
    aside = sorted(place.parent.glob(f".{place.name}.*.replaced"))
    return next((path for path in aside if _serial(path) is not None), place)


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


def put_right(folder: Path) -> None:
    """Take away, or put back, what a save that died has left."""
    for entry in sorted(folder.iterdir()):
        if not (hidden := _HIDDEN_NAME.match(entry.name)):
            continue
        place = folder / hidden["name"]
        if hidden["fate"] == "replaced" and stand_in(place) == entry:
            os.replace(entry, place)
        elif entry.is_dir():
            delete(entry)
        else:
            entry.unlink()


def delete(path: Path) -> None:
    """Delete a folder, under another name, so that a half-deleted one never looks complete.

    Files that are still open elsewhere may stay (on network file systems, on Windows); the next save tries them again.
    """
    hidden = _HIDDEN_NAME.match(path.name)
    doomed = hidden_name(path.with_name(hidden["name"] if hidden else path.name), "deleted")
    os.replace(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def hidden_name(place: Path, fate: str) -> Path:
    """A new name beside ``place`` for something on its way: being written, replaced or deleted."""
    return place.with_name(f".{place.name}.{secrets.token_hex(4)}.{fate}")
