"""A run's folder: its lock, durable writes of files, the facts recorded about them to detect damage, and moves.

No move leaves a checkpoints folder without the checkpoints that were complete before: see `diloco.checkpoint`.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import xxhash

from diloco.errors import CheckpointError, ConfigurationError, DiLoCoError
from diloco.private_files import make_private_folder

if sys.platform != "win32":
    import fcntl

LOCK_FILE = "diloco.lock"  # says who has the folder, for people; only the lock on the open file counts
STEP_NAME = re.compile(r"step-\d{8,}\Z")
HIDDEN_NAME = re.compile(r"\.(?P<name>step-\d{8,})\.[0-9a-f]{8}\.(?P<fate>partial|replaced|deleted)\Z")

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


def write_whole(path: Path, content: str | bytes | Iterator[bytes]) -> None:
    """Write a temporary file, sync it to disk and rename it to ``path``. Text is written as UTF-8.

    Raises:
        DiLoCoError: it failed; what was there before is unchanged.
    """
    partial = hidden_name(path, "partial")
    content = content.encode() if isinstance(content, str) else content
    try:
        write_file(partial, [content] if isinstance(content, bytes) else content)
        os.replace(partial, path)
        sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):  # it does not exist, or its parent is a file
            partial.unlink()
        if not isinstance(error, OSError):
            raise
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


@contextmanager
def new_folder(place: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Yield a folder to fill, which becomes ``place`` when the block ends and is deleted if the block raises.

    There may be an empty folder at ``place``, unless another disk is mounted there. If it ``replaces`` a folder, that
    stays until the block ends.
    """
    partial = hidden_name(place, "partial")
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in partial.iterdir():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        sync_folder(partial)
        if replaces:
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


@contextmanager
def lock_folder(folder: Path) -> Iterator[int]:
    """Create a folder if it is missing, and lock it until the block ends. Then remove it if nothing is in it.

    Yield the open lock file. The lock ends with this process, even if that is killed, and with every child that has the
    file in ``pass_fds``. On NFS it also holds between machines. Where the file system has no locks, and on Windows, a
    warning says that nothing prevents a second run.

    Raises:
        ConfigurationError: another process has the folder, or it can't be written.
    """
    try:
        make_private_folder(folder)
        file = _lock(folder / LOCK_FILE)
    except OSError as error:
        raise ConfigurationError(f"{folder} can't be written: {error.strerror or error}.") from error
    try:
        yield file
    finally:
        with suppress(OSError):
            (folder / LOCK_FILE).unlink()
            folder.rmdir()  # fails if the block has left anything there
        os.close(file)


def _lock(path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    try:
        if sys.platform == "win32":
            raise OSError(errno.ENOTSUP, "Windows has no such lock")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(file, 2000).decode(errors="replace").strip()
        os.close(file)
        raise ConfigurationError(
            f"{path.parent} is in use by {holder or 'another process'}, or by a process that it started. Wait until it "
            "has ended, stop it, or choose another folder."
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP):
            os.close(file)
            raise
        why = f"{path.parent} can't be locked ({error.strerror}): nothing prevents a second run in it."
        logging.getLogger(__name__).warning(why)
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(file), os.stat(path)):
            since = datetime.now().astimezone().isoformat(" ", "seconds")
            with suppress(OSError):  # a full disk does not weaken the lock
                os.ftruncate(file, 0)
                os.write(file, f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode())
            return file
    os.close(file)
    return _lock(path)  # the process that had it has just deleted it


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait until no other process of this machine is in such a block of the same folder, where locks exist."""
    make_private_folder(folder)
    if sys.platform == "win32":
        yield
        return
    file = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
