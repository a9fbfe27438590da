"""Durable writes of files, the facts recorded about them to detect damage, and moves of folders.

No move leaves a checkpoints folder without the checkpoints that were complete before: see `diloco.checkpoint`.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from diloco.errors import CheckpointError, DiLoCoError

__all__ = ["FileFacts", "new_folder", "replace_file", "write_whole"]

LATEST = "latest"
STEP_NAME = re.compile(r"step-\d{8,}\Z")
HIDDEN_NAME = re.compile(r"\.(?P<name>step-\d{8,}|latest)\.[0-9a-f]{8}\.(?P<fate>partial|replaced|deleted)\Z")

_PIECE_BYTES = 1 << 20  # small enough to be hashed and written while in the processor's cache


@dataclass(frozen=True)
class FileFacts:
    """The facts about a file in a manifest."""

    size_bytes: int
    digest: str  # xxh3_128 of the content, 32 hexadecimal digits; it detects damage but is not a signature


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileFacts:
    """Write a new file and sync it to disk."""
    digest, size_bytes = xxhash.xxh3_128(), 0
    with open(path, "xb") as file:
        for chunk in chunks:
            view = memoryview(chunk)
            for start in range(0, len(view), _PIECE_BYTES):
                piece = view[start : start + _PIECE_BYTES]
                digest.update(piece)
                file.write(piece)
            size_bytes += len(view)
        file.flush()
        os.fsync(file.fileno())
    return FileFacts(size_bytes, digest.hexdigest())


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file as `replace_file` does; a failure is a `DiLoCoError`. Text is written as UTF-8."""
    try:
        replace_file(path, [content.encode() if isinstance(content, str) else content])
    except OSError as error:
        raise DiLoCoError(
            f"{path} can't be written: {error.strerror or error}. Its folder must be writable and have free space. "
            "Nothing was changed."
        ) from error


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk. Windows does so by itself and has no call for it."""
    if os.name != "nt":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_size(path: Path, facts: FileFacts) -> None:
    """Raise `CheckpointError` unless a file exists, is a regular file, and has the recorded size."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file and may point outside the checkpoint's folder.")
    if status.st_size != facts.size_bytes:
        raise CheckpointError(
            f"{path} is damaged: it has {status.st_size} bytes, but the manifest records {facts.size_bytes}."
        )


def check_content(path: Path, facts: FileFacts) -> None:
    """Read a whole file and raise `CheckpointError` unless its content is what was written."""
    check_size(path, facts)
    with open(path, "rb") as file:
        if hashlib.file_digest(file, xxhash.xxh3_128).hexdigest() != facts.digest:
            raise CheckpointError(f"{path} is damaged: its digest differs from the manifest's.")


def hidden_name(place: Path, fate: str) -> Path:
    """Return a new hidden name next to ``place`` for a file or folder that is being written, replaced or deleted."""
    return place.with_name(f".{place.name}.{secrets.token_hex(4)}.{fate}")


def move_in(partial: Path, place: Path) -> None:
    """Give a finished checkpoint its final name. An existing checkpoint of that name stays loadable until then."""
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


def replace_file(place: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a temporary file, sync it to disk and rename it to ``place``. A failure leaves what was there before."""
    partial = hidden_name(place, "partial")
    try:
        write_file(partial, chunks)
        os.replace(partial, place)
    except BaseException:
        with suppress(OSError):  # it does not exist, or its parent is a file
            partial.unlink()
        raise
    sync_folder(place.parent)


@contextmanager
def new_folder(place: Path, *, last: str, replaces: bool = False) -> Iterator[Path]:
    """Yield a folder to fill, which becomes ``place`` when the block ends and is deleted if the block raises.

    An existing empty folder at ``place`` is kept, as it may be a mount point or a shell's working directory. The files
    are then moved into it, the one called ``last`` last. If it ``replaces`` a folder, that stays until the block ends.
    """
    fills = place.is_dir() and not any(place.iterdir())
    partial = hidden_name(place / place.name if fills else place, "partial")
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in partial.iterdir():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        sync_folder(partial)
        if fills:
            if os.listdir(place) != [partial.name]:
                raise FileExistsError(errno.EEXIST, "another process has written to it meanwhile", str(place))
            for path in sorted(partial.iterdir(), key=lambda path: path.name == last):
                os.replace(path, place / path.name)
            partial.rmdir()
            sync_folder(place)
        elif replaces:
            move_in(partial, place)
        else:
            os.replace(partial, place)
            sync_folder(place.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def delete(path: Path) -> None:
    """Rename a folder and delete it, so that a partly deleted folder never looks complete.

    Files that are open elsewhere may remain (on network file systems and Windows); the next save tries to delete them
    again.
    """
    hidden = HIDDEN_NAME.match(path.name)
    doomed = hidden_name(path.with_name(hidden["name"] if hidden else path.name), "deleted")
    os.replace(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
