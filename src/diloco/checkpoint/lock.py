"""The lock of a folder that one process writes to. The system releases it when the process ends, however it ends."""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from diloco.errors import ConfigurationError
from diloco.private_files import make_private_folder

if sys.platform != "win32":
    import fcntl

__all__ = ["LOCK_FILE", "lock_folder", "one_at_a_time", "shared_lock"]

LOCK_FILE = "diloco.lock"  # says who has the folder, for people; only the lock on the open file counts

_SHARED = "DILOCO_LOCK"  # environment variable: the open lock file that this process has from its parent

_OPEN: set[int] = set()


@contextmanager
def lock_folder(folder: Path) -> Iterator[int]:
    """Create a folder if it is missing, and lock it until the block ends. Then remove it if nothing is in it.

    Yield the open lock file: as long as a process has it open, the folder stays locked. Forked children lose it, and it
    ends with this process, even if that is killed. A process that was started with `shared_lock` of the same folder
    shares its parent's lock. On NFS the lock also holds between machines. Where the file system has no locks, and on
    Windows, a warning says that nothing prevents a second run.
    """
    try:
        make_private_folder(folder)
        file, mine = _from_parent(folder), False
        if file is None:
            file, mine = _lock(folder), True
    except OSError as error:
        raise ConfigurationError(f"{folder} can't be written: {error.strerror or error}.") from error
    _OPEN.add(file)
    try:
        yield file
    finally:
        if file in _OPEN:  # not in a forked child
            _OPEN.discard(file)
            if mine:
                with suppress(OSError):
                    (folder / LOCK_FILE).unlink()
                    folder.rmdir()  # fails if the block has left anything there
            os.close(file)


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


@contextmanager
def shared_lock(file: int | None) -> Iterator[tuple[tuple[int, ...], dict[str, str]]]:
    """Yield ``pass_fds`` and the environment variable with which a child shares a lock, also after this process dies.

    Wait for the child before the block of `lock_folder` ends.
    """
    if file is None or sys.platform == "win32":
        yield (), {}
        return
    shared = os.dup(file)  # a forked child closes the lock itself
    try:
        yield (shared,), {_SHARED: str(shared)}
    finally:
        os.close(shared)


def _lock(folder: Path) -> int:
    path = folder / LOCK_FILE
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            _flock(file)
            if not _is_at(file, path):  # the process that had it has just deleted it
                os.close(file)
                continue
        except BlockingIOError as error:
            holder = os.read(file, 2000).decode(errors="replace").strip()
            os.close(file)
            raise ConfigurationError(
                f"{folder} is in use by {holder or 'another process'}, or by a process that it started. Wait until it "
                "has ended, stop it, or choose another folder."
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP):
                os.close(file)
                raise
            why = f"{folder} can't be locked ({error.strerror}): nothing prevents a second run in it."
            logging.getLogger(__name__).warning(why)
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        with suppress(OSError):  # a full disk does not weaken the lock
            os.ftruncate(file, 0)
            os.write(file, f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode())
        return file


def _flock(file: int) -> None:
    if sys.platform == "win32":
        raise OSError(errno.ENOTSUP, "there is no such lock on Windows")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _from_parent(folder: Path) -> int | None:
    with suppress(OSError, ValueError):
        file = int(os.environ.get(_SHARED, ""))
        if _is_at(file, folder / LOCK_FILE):
            os.set_inheritable(file, False)
            return file
    return None


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _close_in_child() -> None:
    for file in _OPEN:
        with suppress(OSError):
            os.close(file)
    _OPEN.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
