"""Find data files and open them: what they are packed in, how they encode text, and what they must not be.

Compression and encoding are read from a file's first bytes, so a wrong suffix does no harm. The suffix says what the
text is (`kind_of`). A folder's files that are not read are named once.
"""

from __future__ import annotations

import bz2
import codecs
import functools
import gzip
import io
import logging
import lzma
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from diloco.errors import DataError, NoDataError

__all__ = [
    "FOLDER_SUFFIXES",
    "RECORDS",
    "decode",
    "files_of",
    "kind_of",
    "listed",
    "opened",
    "pieces",
    "read_bytes",
    "walk",
    "warn_once",
]

LOGGER = logging.getLogger("diloco.data")
"""The logger of what is left out of the data. Its warnings go to stderr unless a program configures logging."""

# fmt: off
FOLDER_SUFFIXES = frozenset({
    ".txt", ".text", ".md", ".rst", ".tex",
    ".py", ".c", ".h", ".cpp", ".hpp", ".rs", ".go", ".java", ".js", ".ts",
    ".jsonl", ".jsonlines", ".ndjson", ".parquet",
})
"""The files of a folder that are read, also compressed. A file that is named explicitly is read whatever its suffix."""

# fmt: on
RECORDS = {".jsonl": "lines", ".jsonlines": "lines", ".ndjson": "lines", ".json": "json", ".parquet": "parquet"}
"""Suffix -> how the records of a file are stored. Every other file is text."""

_COMPRESSIONS = frozenset({".gz", ".gzip", ".bz2", ".bz", ".xz", ".zst", ".zstd"})
_CHUNK_BYTES = 1 << 20
_HEAD_BYTES = 512

_REFUSED = (
    (re.compile(rb"\xff\xfe|\xfe\xff|\0\0\xfe\xff"), "begins like UTF-16 or UTF-32 text. Convert it to UTF-8"),
    (re.compile(rb"PK\x03\x04"), "is a zip archive. Give the files in it"),
    (re.compile(rb".{257}ustar", re.DOTALL), "is a tar archive. Give the files in it"),
    (re.compile(rb"PAR1"), "is a Parquet file. Give it the suffix .parquet"),
)
"""How files begin that can't be read as text, and what to do."""


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning, unless this process has logged the same one: data may be read several times."""
    LOGGER.warning(message)


def listed(names: list[str], count: int) -> str:
    """Return the first of ``count`` names, and how many more there are.

    >>> listed(["a", "b", "c", "d", "e", "f"], 7)
    'a; b; c; d; e; and 2 more'
    """
    return "; ".join(name.rstrip(".") for name in names[:5]) + (f"; and {count - 5:,} more" if count > 5 else "")


def kind_of(path: Path) -> str:
    """Return "lines", "json" or "parquet" for files of records, else "text".

    >>> kind_of(Path("a.jsonl.gz")), kind_of(Path("A.JSON")), kind_of(Path("notes.md"))
    ('lines', 'json', 'text')
    """
    return RECORDS.get(_suffix(path), "text")


def files_of(path: Path, *, records_only: bool = False) -> list[Path]:
    """Return the files to read: ``path`` itself, or what a folder holds, sorted by path. What is left out is named.

    Args:
        records_only: leave a folder's text files out.

    Raises:
        DataError: the path does not exist, is not a regular file or a folder, or can't be read.
    """
    try:
        path = path.expanduser()
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        link = f" (a link to {os.readlink(path)})" if path.is_symlink() else ""
        raise NoDataError(f"{path}{link} does not exist.") from error
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {_reason(error)}.") from error
    if not stat.S_ISDIR(mode):
        _check_regular(path, mode)
        return [path]
    files, others = walk(path)
    suffixes = {each for each in FOLDER_SUFFIXES if each in RECORDS or not records_only}
    wanted = [file for file in files if _suffix(file) in suffixes and (file.is_file() or not file.exists())]
    others += [file.relative_to(path).as_posix() for file in sorted(set(files) - set(wanted))]
    if others:
        names = listed(others, len(others))
        warn_once(f"{path}: not read, because they are hidden, links to folders or files of another type: {names}.")
    return wanted


def walk(folder: Path, leave_out: frozenset[str] = frozenset()) -> tuple[list[Path], list[str]]:
    """Return every file below ``folder`` sorted by path, and the names of what is hidden or a link to a folder.

    Args:
        leave_out: names of folders to leave out.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}.") from error

    files: list[Path] = []
    others: list[str] = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        for name in sorted(folders):
            if name.startswith(".") or name in leave_out or os.path.islink(os.path.join(parent, name)):
                folders.remove(name)
                others.append(f"{Path(parent, name).relative_to(folder).as_posix()}/")
        files += [Path(parent, name) for name in names if not name.startswith(".")]
        others += [Path(parent, name).relative_to(folder).as_posix() for name in names if name.startswith(".")]
    return sorted(files, key=lambda file: file.relative_to(folder).as_posix()), sorted(others)


@contextmanager
def opened(path: Path, *, text: bool = True) -> Iterator[io.BufferedReader]:
    """Open a file for reading: decompressed, and with ``text`` after its byte order mark.

    Raises:
        DataError: the file can't be read (also later, inside the context), or is known not to be UTF-8 text.
    """
    try:
        _check_regular(path, path.stat().st_mode)
        with path.open("rb") as file, _decompressed(file) as content:
            if text:
                _check_text(path, content.peek(_HEAD_BYTES)[:_HEAD_BYTES])
                if content.peek(3).startswith(codecs.BOM_UTF8):
                    content.read(3)
            yield content
    except (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
        raise DataError(f"{path} cannot be read: {_reason(error)}.") from error


def read_bytes(path: Path, *, text: bool = True) -> tuple[bytes, int]:
    """Return what `opened` reads, and how many bytes precede it."""
    with opened(path, text=text) as file:
        offset = file.tell()
        return file.read(), offset


def pieces(file: io.BufferedReader, separator: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the rest of a file between separators, without reading all of it at once; each with its first byte's place.

    The last piece may be empty.
    """
    held, offset = bytearray(), file.tell()
    while chunk := file.read(_CHUNK_BYTES):
        # The separator may lie across two chunks.
        searched = max(0, len(held) - len(separator) + 1)
        held += chunk
        begin = 0
        while (end := held.find(separator, max(begin, searched))) >= 0:
            yield offset + begin, bytes(held[begin:end])
            begin = end + len(separator)
        del held[:begin]
        offset += begin
    yield offset, bytes(held)


def decode(content: bytes, path: Path, offset: int) -> str:
    """Decode ``content``, which begins at byte ``offset`` of ``path``; raise `DataError` if it is not UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8: byte {offset + error.start} is 0x{content[error.start]:02x} ({error.reason}). "
            "Convert it to UTF-8."
        ) from error


def _suffix(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    return "".join(suffixes[-2:-1] if suffixes and suffixes[-1] in _COMPRESSIONS else suffixes[-1:])


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise DataError(
            f"{path} is a pipe, socket or device, but data may be read several times. Write it to a file, and give "
            "that."
        )


def _check_text(path: Path, head: bytes) -> None:
    what = next((what for beginning, what in _REFUSED if beginning.match(head)), "")
    if max(head[0::2].count(0), head[1::2].count(0)) > len(head) // 4:
        what = what or "looks like UTF-16 text, in which every other byte is zero. Convert it to UTF-8"
    if what:
        raise DataError(f"{path} {what}.")


def _decompressed(file: io.BufferedReader) -> io.BufferedReader:
    head = file.peek(_HEAD_BYTES)
    unpack = next((unpack for beginning, unpack in _COMPRESSED if beginning.match(head)), None)
    return file if unpack is None else io.BufferedReader(unpack(file))


class _Zstandard(io.RawIOBase):
    """The content of zstandard frames. Unlike the library's reader it notices a frame that is cut off."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._packed, self._content = b"", memoryview(b"")
        self._place = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            self._packed = self._packed or self._file.read(_CHUNK_BYTES)
            if self._frame.eof:
                if not self._packed:
                    return 0
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            elif not self._packed:
                raise EOFError("Compressed file ended before the end-of-stream marker was reached")
            self._content = memoryview(self._frame.decompress(self._packed))
            self._packed = self._frame.unused_data
        size = min(len(buffer), len(self._content))
        buffer[:size], self._content = self._content[:size], self._content[size:]
        self._place += size
        return size


_COMPRESSED: tuple[tuple[re.Pattern[bytes], Callable[[BinaryIO], Any]], ...] = (
    (re.compile(rb"\x1f\x8b\x08"), lambda file: gzip.GzipFile(fileobj=file)),
    (re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"), bz2.BZ2File),
    (re.compile(rb"\xfd7zXZ\0"), lzma.LZMAFile),
    (re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"), _Zstandard),  # pzstd begins with a frame to skip
)
"""How compressed files begin, and what decompresses them."""


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
