"""Files that are on the disk when the call returns, what is remembered of them to find damage, and moves of folders.

The moves never leave a checkpoints folder without what was complete before: see `diloco.checkpoint`.
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

__all__ = [
    "HIDDEN_NAME",
    "LATEST",
    "STEP_NAME",
    "FileFacts",
    "check_content",
    "check_size",
    "delete",
    "hidden_name",
    "move_in",
    "new_folder",
    "replace_file",
    "sync_folder",
    "write_file",
    "write_whole",
]

LATEST = "latest"
STEP_NAME = re.compile(r"step-\d{8,}\Z")
HIDDEN_NAME = re.compile(r"\.(?P<name>step-\d{8,}|latest)\.[0-9a-f]{8}\.(?P<fate>partial|replaced|deleted)\Z")

_PIECE_BYTES = 1 << 20  # hashed and written while it is still in the processor's cache


@dataclass(frozen=True)
class FileFacts:
    """What a manifest says about a file."""

    size_bytes: int
    digest: str  # xxh3_128 of the content, 32 hexadecimal digits. It finds damage; it is no signature.


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileFacts:
    """Write a new file and see it to the disk.

    Raises:
        OSError: when it exists, the disk is full, or anything else goes wrong.
    """
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
    """Write beside and rename, so that nobody reads half a file; text as UTF-8.

    Raises:
        DiLoCoError: if it can't be written; an earlier file is still there.
    """
    beside = path.with_name(f".{path.name}.partial")
    try:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(beside, path)
    except OSError as error:
        raise DiLoCoError(
            f"{path} can't be written: {error.strerror or error}. Its folder must be writable and have room. "
            "Nothing was changed."
        ) from error


def sync_folder(folder: Path) -> None:
    """See the names in a folder to the disk; Windows does so by itself and can't be asked."""
    if os.name != "nt":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_size(path: Path, facts: FileFacts) -> None:
    """Look whether a file is there, is a plain file, and has its size.

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
        raise CheckpointError(f"{path} is not a plain file, and may lead outside of the checkpoint's folder.")
    if status.st_size != facts.size_bytes:
        raise CheckpointError(
            f"{path} is damaged: it has {status.st_size} bytes, and the manifest says {facts.size_bytes}."
        )


def check_content(path: Path, facts: FileFacts) -> None:
    """Read all of a file to see whether it is what was written.

    Raises:
        CheckpointError: when not.
    """
    check_size(path, facts)
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}.") from error
    if digest != facts.digest:
        raise CheckpointError(f"{path} is damaged: its digest differs from the manifest's.")


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


def replace_file(place: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file beside ``place``, see it to the disk, and give it that name; nothing half-written is left.

    Raises:
        OSError: when it can't be written; an earlier file is still there.
    """
    partial = hidden_name(place, "partial")
    try:
        write_file(partial, chunks)
        os.replace(partial, place)
    except BaseException:
        with suppress(OSError):  # not there, or below a file
            partial.unlink()
        raise
    sync_folder(place.parent)


@contextmanager
def new_folder(place: Path, *, last: str, replaces: bool = False) -> Iterator[Path]:
    """A folder to fill, which becomes ``place`` where the block ends, and is gone where it raises.

    An empty folder at ``place``, perhaps a mounted disk or where somebody works, stays the same one: the files are
    moved into it, the one called ``last`` last.

    Args:
        replaces: whether it takes the place of another folder, which stays until then.

    Raises:
        OSError: when it can't be written, or something is there that it doesn't replace.
    """
    fills = place.is_dir() and not any(place.iterdir())
    partial = hidden_name(place / place.name if fills else place, "partial")
    try:
        partial.mkdir(parents=True)
        yield partial
        sync_folder(partial)
        if fills:
            if os.listdir(place) != [partial.name]:
                raise FileExistsError(errno.EEXIST, "somebody else wrote there meanwhile", str(place))
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
    """Delete a folder, under another name, so that a half-deleted one never looks complete.

    Files that are still open elsewhere may stay (on network file systems, on Windows); the next save tries them again.
    """
    hidden = HIDDEN_NAME.match(path.name)
    doomed = hidden_name(path.with_name(hidden["name"] if hidden else path.name), "deleted")
    os.replace(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
