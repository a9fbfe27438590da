"""Files and folders that are their owner's alone, whatever the umask, and files and URLs that others may have made."""

import errno
import os
import re
import secrets
import stat
import sys
from pathlib import Path
from typing import Any

from diloco.errors import ConfigurationError

MAX_BYTES = 1 << 16
"""Of a file that is its owner's alone."""
MAX_READ_BYTES = 1 << 26
"""Of a file with settings, in a folder from elsewhere."""


def check_url(url: str) -> None:
    """Refuse a URL with a password, which would get into settings and logs, or of a store that can run foreign code.

    >>> check_url("sftp://me:hunter2@host/x")
    Traceback (most recent call last):
    diloco.errors.ConfigurationError: sftp://... has a password, which would be stored with the settings. ...
    """
    protocol = re.match(r"\w*", url)
    shown = f"{protocol[0] if protocol else ''}://..."
    if re.search(r"(?<!git:)(?<!github:)//[^/@]*:[^/@]*@", url):  # those two write REPOSITORY@REVISION like this
        raise ConfigurationError(
            f"{shown} has a password, which would be stored with the settings. Leave it out, and give it to fsspec "
            "with an environment variable such as FSSPEC_SFTP_PASSWORD."
        )
    # older versions of fsspec render templates of a reference file without a sandbox; dask unpickles what it gets
    if re.search(r"(?:^|::)(?:reference|dask):", url):
        raise ConfigurationError(f"{shown} can run code of whoever has written it, so it can't be used.")


def open_store(url: str, **options: Any) -> tuple[Any, str]:
    """Return the file system of fsspec that a URL or path names, and the path in it.

    The instance is a new one without a cache of listings, also below a chained one (``simplecache::s3://...``). So it
    shows the names and sizes of now, and uses the credentials of now.
    """
    from fsspec.core import split_protocol, url_to_fs

    fresh = {"skip_instance_cache": True, "use_listings_cache": False}
    chained = {split_protocol(part)[0] or part: fresh for part in url.split("::")[1:]}
    system, path = url_to_fs(url, **fresh, **chained, **options)
    system.invalidate_cache()  # a class may share one between its instances
    return system, path


def read_regular(path: Path, max_bytes: int = MAX_READ_BYTES) -> bytes:
    """Return the content of a file in a folder from elsewhere, where a FIFO would never end. A link is followed.

    Raises:
        OSError: It can't be read, is not a regular file, or is larger.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        _check(os.fstat(file.fileno()), path, max_bytes)
        return file.read()


def check_regular(path: Path, max_bytes: int = MAX_READ_BYTES) -> None:
    """Raise the errors of `read_regular` for a file that a library will read."""
    _check(path.stat(), path, max_bytes)


def _check(about: os.stat_result, path: Path, max_bytes: int) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if about.st_size > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", str(path))


def read_private(path: Path, what: str) -> bytes:
    """Return the content of a file that no other user can read or change.

    ``what`` is what errors call the file. A link is followed.

    Raises:
        ConfigurationError: The file can't be read, is not a regular file or too large, belongs to another user than
            this one or root, or has a mode that gives others any access; root may let a group read it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # without waiting for the end of a FIFO
        try:
            problem = _problem(os.fstat(descriptor))
            data = b"" if problem else os.read(descriptor, MAX_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigurationError(f"{what} can't be read: {error}.") from error
    if len(data) > MAX_BYTES:
        problem = f"has more than {MAX_BYTES} bytes"
    if problem:
        raise ConfigurationError(f"{what} {problem}.")
    return data


def create_private(path: Path, data: bytes) -> None:
    """Create a file with mode 0600, whatever the umask.

    Raises:
        FileExistsError: There is a file or a link of this name, which was left as it is.
        OSError: The file can't be written. It was removed.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            path.chmod(0o600)  # an umask may have taken the owner's rights away
            file.write(data)
            file.flush()
            os.fsync(descriptor)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def replace_private(path: Path, data: bytes) -> None:
    """Write a file as `create_private` does, in place of one that may be there; it is never half written.

    Raises:
        OSError: The file can't be written.
    """
    half = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # containers share process ids
    create_private(half, data)
    try:
        os.replace(half, path)
    except BaseException:
        half.unlink(missing_ok=True)
        raise


def make_private_folder(path: Path) -> None:
    """Create a folder, and those above it that are missing, with mode 0700. Existing ones stay as they are.

    Raises:
        OSError: It can't be created, or there is a file of this name.
    """
    for missing in reversed([parent for parent in path.parents if not parent.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


def _problem(status: os.stat_result) -> str:
    """Return why a file is not private, or ""."""
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if sys.platform == "win32":  # has other permissions than the mode
        return ""
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user (number {status.st_uid}), who can read it. Run chown on it, or copy it"
    if status.st_uid == 0 != os.geteuid() and status.st_mode & 0o077 == stat.S_IRGRP:
        return ""  # as Kubernetes gives a secret to a pod, by its group
    if status.st_mode & 0o077:
        return f"can be read or changed by others (mode {stat.S_IMODE(status.st_mode):o}). Run chmod 600 on it"
    return ""
