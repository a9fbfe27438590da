"""Read records and documents of files, at a path or any URL of fsspec, and of the running Python's standard library.

The suffix of a file says what it holds, behind one that says how it is compressed. The order of records depends only on
names and contents: the files of a folder sorted by their path, records in file order. Nothing is unpickled.
"""

from __future__ import annotations

import bz2
import functools
import glob
import gzip
import io
import json
import logging
import lzma
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import zstandard

from diloco.errors import ConfigurationError, DataError, NoDataError, from_extra

__all__ = [
    "File",
    "Row",
    "RowError",
    "StandardLibrary",
    "as_data_error",
    "checked_text",
    "files_of",
    "read_rows",
    "usable",
    "warn_once",
]

T = TypeVar("T")

LOGGER = logging.getLogger("diloco.data")
"""The logger of what is left out of the data. Its warnings go to stderr unless a program configures logging."""

RECORDS = {".jsonl": "lines", ".jsonlines": "lines", ".ndjson": "lines", ".json": "json", ".parquet": "parquet"}
"""Suffix -> how the records of a file are stored. Every other file is one document."""

# fmt: off
FOLDER_SUFFIXES = frozenset({
    ".txt", ".text", ".md", ".rst", ".tex",
    ".py", ".c", ".h", ".cpp", ".hpp", ".rs", ".go", ".java", ".js", ".ts",
    ".jsonl", ".jsonlines", ".ndjson", ".parquet",
})
"""The files that are read of a folder. ``.json`` is not among them, because it often describes a folder."""

STANDARD_LIBRARY_LEFT_OUT = frozenset({
    "site-packages", "dist-packages",  # installed packages
    "test", "tests", "idlelib", "turtledemo", "tkinter", "lib2to3", "distutils", "ensurepip",  # often split off
    "encodings", "pydoc_data",  # character tables, and one long string
    "__pycache__",
})
"""Folders of the standard library that do not belong to the built-in data set."""
# fmt: on


class RowError(DataError):
    """One record or document can't be used. `usable` raises it, or leaves the row out."""


Row = tuple[str, Any]
"""The location of a record or document as text, and its content, or the `RowError` that says why it has none."""


def usable(rows: Iterable[Row], use: Callable[[str, Any], T], instead: T, *, skip_bad: bool) -> Iterator[T]:
    """Yield ``use(place, content)`` of each row; raise `RowError` for one that can't be used.

    With ``skip_bad``, yield ``instead`` for such a row, and log how many and which ones when reading ends.
    """
    bad: list[str] = []
    count = 0
    try:
        for place, content in rows:
            count += 1
            try:
                if isinstance(content, RowError):
                    raise content
                value = use(place, content)
            except (RowError, RecursionError) as error:
                why = str(error) if isinstance(error, RowError) else f"{place} is nested too deeply."
                if not skip_bad:
                    way = "Mend it, or leave such rows out of training with --data.skip-bad."
                    raise RowError(f"{why} {way}") from error
                bad.append(why if len(bad) < 5 else "")
                value = instead
            yield value
    finally:  # also where the reader needs no more
        if bad:
            words = f"{len(bad):,} of {count:,} rows can't be used and are left out"
            warn_once(f"data.skip_bad: {words}: {_listed(bad)}.")


def checked_text(value: Any, place: str, field: str) -> str:
    """Return ``value`` if it can be a document; raise `RowError` if it is not text or UTF-8 can't encode it."""
    try:
        value.encode("utf-8")
    except (AttributeError, UnicodeEncodeError) as error:  # JSON can contain half of a surrogate pair
        what = "half of a surrogate pair" if isinstance(value, str) else type(value).__name__
        raise RowError(f"{place}: the field {field!r} holds {what}, not text.") from error
    return str(value)


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning, unless this process has logged the same one: data may be read several times."""
    LOGGER.warning(message)


def _listed(names: Sequence[str]) -> str:
    more = f"; and {len(names) - 5:,} more" if len(names) > 5 else ""
    return "; ".join(name.rstrip(".") for name in names[:5]) + more


@contextmanager
def as_data_error(what: str, advice: str = "") -> Iterator[None]:
    """Turn any error of a library, of which there are many types, into a `DataError`."""
    try:
        yield
    except (DataError, ConfigurationError):
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if "trust_remote_code" in reason:
            raise DataError(f"{what} is code of its own, which is not run. Use another.") from error
        raise DataError(f"{what} cannot be read: {reason}.{advice and f' {advice}'}") from error


def files_of(place: str, suffixes: Iterable[str] = FOLDER_SUFFIXES) -> list[File]:
    """Return the files at a path or URL: itself, what it matches as a pattern, or what a folder holds, sorted by path.

    Raises:
        DataError: the place does not exist, can't be listed or holds no such files.
        ConfigurationError: a package for this kind of URL is not installed.
    """
    with as_data_error(place), from_extra("cloud", f"{place} needs a package"):
        import fsspec

        system, path = fsspec.url_to_fs(place)
        if system.isdir(path):
            names = _data_of_folder(system, path, suffixes)
        elif system.exists(path):
            names = [path]
        else:
            names = sorted(system.glob(path)) if glob.has_magic(path) else []
            if not names:
                raise NoDataError(f"{place} does not exist.")
        remote = "://" in place
        return [File(system, name, system.unstrip_protocol(name) if remote else name) for name in names]


def _data_of_folder(system: Any, folder: str, suffixes: Iterable[str]) -> list[str]:
    """Return the files of a folder that hold data. What is left out is named."""
    data: list[str] = []
    others: list[str] = []
    for name, about in sorted(system.find(folder, detail=True).items()):
        below = name.removeprefix(folder).lstrip("/")
        hidden = any(part.startswith(".") for part in below.split("/"))
        plain = about["type"] == "file" or (about.get("islink") and not os.path.isdir(name))
        (data if plain and not hidden and _suffix(name) in suffixes else others).append(below if plain else f"{below}/")
    if others:
        why = "hidden, links to folders or files of another type"
        warn_once(f"{folder}: not read, because they are {why}: {_listed(others)}.")
    if not data:
        raise NoDataError(f"{folder} holds no files to read, which end in {' '.join(sorted(suffixes))}.")
    return [f"{folder.rstrip('/')}/{below}" for below in data]


def read_rows(places: Iterable[str]) -> Iterator[Row]:
    """Yield every record of the files at these places; raise `DataError` for a file of another type."""
    for place in places:
        for file in files_of(place, FOLDER_SUFFIXES & RECORDS.keys()):
            if _suffix(file.path) not in RECORDS:
                raise DataError(f"{file.name} holds no records. Give files that end in {' '.join(RECORDS)}.")
            yield from file.rows()


@dataclass(frozen=True)
class File:
    """A file of records, or of one document."""

    system: Any  # the file system of fsspec
    path: str
    name: str  # the path or URL, for messages

    def rows(self) -> Iterator[Row]:
        """Yield its records, or its document; an empty text is no document."""
        kind, name = RECORDS.get(_suffix(self.path)), self.name
        with as_data_error(name):
            if self.system.info(self.path)["type"] == "other" and not os.path.isfile(self.path):
                raise DataError(f"{name} is a pipe, socket or device, but data may be read several times.")
            with self.system.open(self.path, "rb") as packed, _unpacked(packed, self.path) as file:
                if kind == "parquet":
                    yield from _parquet_rows(file, name)
                elif kind == "lines":
                    yield from _json_lines(file, name)
                elif kind == "json":
                    yield from _json_rows(file.read(), name)
                elif b"\0" in (content := file.read())[:512]:
                    raise DataError(
                        f"{name} is no text, since it holds zero bytes. Unpack an archive (zip, tar), convert UTF-16 "
                        "to UTF-8, and give a table the suffix .parquet."
                    )
                else:
                    yield _decoded(content, name)


class StandardLibrary:
    """The source files of the standard library of the running Python: about 390 files, 8 MB, with Python 3.11.

    Left out are `STANDARD_LIBRARY_LEFT_OUT`, files that describe the machine (``_sysconfigdata*``, ``sitecustomize``,
    ``config-*``), and files that are empty or not UTF-8. The same version of Python gives the same documents unless its
    distributor changed the files.
    """

    def rows(self) -> Iterator[Row]:
        """Yield every file as a document."""
        root, files = Path(sysconfig.get_path("stdlib")), []
        machine = ("_sysconfigdata", "sitecustomize", "usercustomize", "config-")
        for parent, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name[0] != "." and name not in STANDARD_LIBRARY_LEFT_OUT]
            files += [Path(parent, name).relative_to(root) for name in names if name[0] != "." and name[-3:] == ".py"]
        for file in sorted(files, key=Path.as_posix):
            if not file.parts[0].startswith(machine):
                with suppress(UnicodeDecodeError):
                    yield str(file), (root / file).read_bytes().decode("utf-8")


def _suffix(path: str) -> str:
    """Return the suffix that says what a file holds, in lower case and without that of its compression."""
    suffixes = [suffix.lower() for suffix in Path(_without_query(path)).suffixes[-2:]]
    return "".join(suffixes[-2:-1] if suffixes and suffixes[-1] in _UNPACK else suffixes[-1:])


def _without_query(path: str) -> str:
    """Return a path; if it is an address of the web, without what follows a question mark."""
    return path.partition("?")[0] if path.startswith(("http://", "https://")) else path


def _unpacked(file: Any, path: str) -> Any:
    """Return the file that reads what a file holds, decompressed."""
    unpack = _UNPACK.get(Path(_without_query(path)).suffix.lower())
    return unpack(file) if unpack else file


def _json_lines(lines: Iterable[bytes], name: str) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        place, text = _decoded(line, f"{name}:{number}")
        if isinstance(text, RowError):
            yield place, text
        elif text := text.strip().removeprefix("\ufeff"):  # files that were joined have a mark in the middle
            try:
                yield _record(place, json.loads(text))
            except (ValueError, RecursionError) as error:
                yield place, RowError(f"{place} is not JSON: {error}.")


def _json_rows(content: bytes, name: str) -> Iterator[Row]:
    """Yield the records of an array, a record alone, or lines."""
    try:
        records = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        yield from _json_lines(io.BytesIO(content), name)
        return
    for number, record in enumerate(records if isinstance(records, list) else [records]):
        yield _record(f"{name}, record {number}", record)


def _parquet_rows(file: Any, name: str) -> Iterator[Row]:
    with from_extra("hf", f"{name} needs datasets"):
        import datasets  # noqa: F401  # the extra installs pyarrow with it
        from pyarrow.parquet import ParquetFile
    rows = (row for batch in ParquetFile(file).iter_batches(1024) for row in batch.to_pylist())
    yield from ((f"{name}, row {number}", row) for number, row in enumerate(rows))


def _record(place: str, value: Any) -> Row:
    wrong = f"{place} must be a JSON object with the fields of a record, got a {type(value).__name__}."
    return place, value if isinstance(value, dict) else RowError(wrong)


def _decoded(content: bytes, place: str) -> Row:
    """Return a text without a byte order mark."""
    try:
        return place, content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        wrong = f"byte {error.start} is 0x{content[error.start]:02x} ({error.reason})"
        return place, RowError(f"{place} is not UTF-8: {wrong}. Convert it to UTF-8.")


class _Zstandard(io.RawIOBase):
    """Reads zstandard frames. Unlike the library's reader, this notices a frame that is cut off."""

    def __init__(self, file: Any) -> None:
        self._file, self._frame, self._packed, self._content = file, None, b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            self._packed = self._packed or self._file.read(1 << 20)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
                return 0
            frame: Any = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._content = frame.decompress(self._packed)
            self._packed, self._frame = frame.unused_data, None if frame.eof else frame
        count = min(len(buffer), len(self._content))
        buffer[:count], self._content = self._content[:count], self._content[count:]
        return count


_UNPACK: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys((".gz", ".gzip"), lambda file: gzip.GzipFile(fileobj=file)),
    **dict.fromkeys((".bz2", ".bz"), bz2.BZ2File),
    ".xz": lzma.LZMAFile,
    **dict.fromkeys((".zst", ".zstd"), lambda file: io.BufferedReader(_Zstandard(file), 1 << 20)),
}
"""The suffix of a compressed file -> what decompresses it."""
