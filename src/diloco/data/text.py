"""Read documents and records: text files, JSON, Parquet, and the standard library of the running Python.

A document is a non-empty ``str`` that UTF-8 can encode. The order of the documents depends only on names and contents:
paths in the order given, the files of a folder sorted by their path in it, records in file order. Compression and
encoding are read from a file's first bytes, so a wrong suffix does no harm; the suffix says what the text is. Nothing
is unpickled and nothing is executed.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import json
import logging
import lzma
import os
import re
import stat
import sysconfig
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import xxhash
import zstandard

from diloco.data.hub import parquet_rows
from diloco.data.settings import SourceSettings
from diloco.errors import DataError, NoDataError, nearest

__all__ = [
    "Row",
    "RowError",
    "checked_text",
    "is_heldout",
    "read_documents",
    "read_rows",
    "read_standard_library",
    "split_documents",
    "text_of",
    "usable",
    "warn_once",
]

T = TypeVar("T")

LOGGER = logging.getLogger("diloco.data")
"""The logger of what is left out of the data. Its warnings go to stderr unless a program configures logging."""

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

RECORDS = {".jsonl": "lines", ".jsonlines": "lines", ".ndjson": "lines", ".json": "json", ".parquet": "parquet"}
"""Suffix -> how the records of a file are stored. Every other file is text."""

_COMPRESSIONS = frozenset({".gz", ".gzip", ".bz2", ".bz", ".xz", ".zst", ".zstd"})
_CHUNK_BYTES = 1 << 20
_HEAD_BYTES = 512


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


def read_documents(paths: Sequence[Path], settings: SourceSettings) -> Iterator[str]:
    """Yield every document of ``paths`` in order, or those of the standard library if there are no paths.

    Args:
        paths: files, also compressed, and folders, which are searched for files with `FOLDER_SUFFIXES`. Files with a
            suffix in `RECORDS` hold one document per record; every other file is UTF-8 text.
        settings: the field of the text, the separator of text files, and whether bad rows are left out.

    Raises:
        DataError: a path is missing or holds no text, text is not UTF-8, or a record is not JSON or lacks the field.
            The message names the file and the byte or line.
        ConfigurationError: a ``.parquet`` file needs datasets, which is not installed.
    """
    if not paths:
        yield from read_standard_library()
    for path in paths:
        rows = (row for file in _files_of(path, FOLDER_SUFFIXES) for row in _rows(file, settings.document_separator))
        yield from _some(
            filter(None, usable(rows, text_of(settings.text_field), "", skip_bad=settings.skip_bad)),
            f"{path} holds no text. Give a file that contains text, or a folder with files that end in "
            f"{' '.join(sorted(FOLDER_SUFFIXES))}.",
        )


def read_rows(paths: Sequence[Path]) -> Iterator[Row]:
    """Yield every record of the files of ``paths``; raise `DataError` if a file has none, or is of another type."""
    for path in paths:
        files = _files_of(path, FOLDER_SUFFIXES & RECORDS.keys())
        rows = (row for file in files if _suffix(file) in RECORDS for row in _rows(file, None))
        yield from _some(rows, f"{path} holds no records. Give files with records that end in {' '.join(RECORDS)}.")


def read_standard_library(root: Path | None = None) -> Iterator[str]:
    """Yield the source files of the standard library of the running Python: about 390 files, 8 MB, with Python 3.11.

    Left out are `STANDARD_LIBRARY_LEFT_OUT`, files that describe the machine (``_sysconfigdata*``, ``sitecustomize``,
    ``config-*``), and files that are empty or not UTF-8. The same version of Python gives the same documents unless its
    distributor changed the files.

    Args:
        root: the folder to read instead of the running Python's own.
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    machine = ("_sysconfigdata", "sitecustomize", "usercustomize", "config-")

    def documents() -> Iterator[str]:
        for file in _walk(folder, STANDARD_LIBRARY_LEFT_OUT)[0] if folder.is_dir() else ():
            if file.suffix == ".py" and not file.relative_to(folder).parts[0].startswith(machine):
                with suppress(UnicodeDecodeError):
                    yield file.read_bytes().decode("utf-8")

    nothing = f"No standard library was found as .py files in {folder}. Give your own text: data.paths (--data PATH)."
    yield from _some(filter(None, documents()), nothing)


def text_of(field: str) -> Callable[[str, Any], str]:
    """Return the function of `usable` that returns the text of a document, or of a record with this field."""

    def text(place: str, content: Any) -> str:
        if isinstance(content, str):
            return content
        if field not in content:
            raise RowError(f"{place} has no field {field!r} (data.sources); {nearest(field, content)}")
        return checked_text(content[field], place, field)

    return text


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
    """Return the first names, and how many more there are."""
    more = f"; and {len(names) - 5:,} more" if len(names) > 5 else ""
    return "; ".join(name.rstrip(".") for name in names[:5]) + more


def _some(values: Iterable[T], nothing: str) -> Iterator[T]:
    """Yield values; raise `NoDataError` with the message ``nothing`` if there are none."""
    empty = True
    for value in values:
        empty = False
        yield value
    if empty:
        raise NoDataError(nothing)


def split_documents(texts: Iterable[str], heldout_fraction: float) -> Iterator[tuple[str, bool]]:
    """Yield documents, each with whether it is held out.

    That depends only on its text and the fraction: adding documents moves no other document, and copies of a document
    stay together.

    Raises:
        DataError: one of the splits is empty, after the last document; the message says which fractions would work.

    >>> list(split_documents(["one", "four"], heldout_fraction=0.3))
    [('one', True), ('four', False)]
    """
    counts, keys = [0, 0], [1.0, 0.0]  # of both splits; the lowest and the highest
    for text in texts:
        key = _key(text)
        heldout = key < heldout_fraction
        counts[heldout] += 1
        keys = [min(keys[0], key), max(keys[1], key)]
        yield text, heldout
    if not all(counts):
        advice = "Give more files, a .jsonl with one document per line, or a document_separator in data.sources"
        if keys[0] < keys[1]:
            advice = f"Use a fraction between {keys[0]:.6g} and {keys[1]:.6g}, or more documents"
        raise DataError(
            f"data.heldout_fraction={heldout_fraction:g} holds out {counts[1]} of {sum(counts)} documents and leaves "
            f"{counts[0]} to train on; at least one of each is needed. {advice}."
        )


def is_heldout(text: str, heldout_fraction: float) -> bool:
    """Return whether a document is held out."""
    return _key(text) < heldout_fraction


def _key(text: str) -> float:
    """Return a number in [0, 1) that only the text decides."""
    return (xxhash.xxh3_128_intdigest(text.encode("utf-8")) >> 75) / (1 << 53)  # a float holds 53 bits exactly


def _rows(path: Path, separator: str | None) -> Iterator[Row]:
    """Yield the records of a file, or the documents of a text file."""
    kind = RECORDS.get(_suffix(path))
    if kind == "parquet":
        yield from parquet_rows(path)
    elif kind == "json":  # an array, a record alone, or lines
        ((_, content),) = _pieces(path, None)
        try:
            records = json.loads(content.decode("utf-8-sig"))
        except (ValueError, RecursionError):
            yield from _json_lines(path)
        else:
            for number, record in enumerate(records if isinstance(records, list) else [records]):
                yield _record(f"{path}, record {number}", record)
    elif kind == "lines":
        yield from _json_lines(path)
    else:
        yield from (_text_row(path, *piece) for piece in _pieces(path, separator.encode() if separator else None))


def _text_row(path: Path, offset: int, content: bytes) -> Row:
    """Return a text that begins at byte ``offset`` of a file, without a byte order mark."""
    try:
        return str(path), content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        return str(path), RowError(
            f"{path} is not UTF-8: byte {offset + error.start} is 0x{content[error.start]:02x} ({error.reason}). "
            "Convert it to UTF-8."
        )


def _json_lines(path: Path) -> Iterator[Row]:
    # Split at line feeds only: splitlines would also split at a carriage return, which JSON allows between its tokens.
    for number, (offset, line) in enumerate(_pieces(path, b"\n"), start=1):
        place, text = f"{path}:{number}", _text_row(path, offset, line)[1]
        if isinstance(text, RowError):
            yield place, text
        elif text := text.strip().removeprefix("\ufeff"):  # files that were joined have a mark in the middle
            try:
                yield _record(place, json.loads(text))
            except (ValueError, RecursionError) as error:
                yield place, RowError(f"{place} is not JSON: {error}.")


def _record(place: str, value: Any) -> Row:
    wrong = f"{place} must be a JSON object with the fields of a record, got a {type(value).__name__}."
    return place, value if isinstance(value, dict) else RowError(wrong)


def _files_of(path: Path, suffixes: Iterable[str]) -> list[Path]:
    """Return the files to read: ``path`` itself, or what a folder holds, sorted by path. What is left out is named."""
    path = path.expanduser()
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        link = f" (a link to {os.readlink(path)})" if path.is_symlink() else ""
        raise NoDataError(f"{path}{link} does not exist.") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise DataError(f"{path} is a pipe, socket or device, but data may be read several times. Write it to a file.")
    if stat.S_ISREG(mode):
        return [path]
    files, others = _walk(path)
    data = [file for file in files if _suffix(file) in suffixes and (file.is_file() or not file.exists())]
    if others := [*others, *(file.relative_to(path).as_posix() for file in sorted({*files} - {*data}))]:
        why = "hidden, links to folders or files of another type"
        warn_once(f"{path}: not read, because they are {why}: {_listed(others)}.")
    return data


def _walk(folder: Path, leave_out: Collection[str] = ()) -> tuple[list[Path], list[str]]:
    """Return every file below ``folder`` sorted by path, and the names of what is hidden or a link to a folder."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}.") from error

    files: list[Path] = []
    others: list[str] = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        below = Path(parent).relative_to(folder)
        skipped = [
            name for name in folders if name[0] == "." or name in leave_out or (Path(parent) / name).is_symlink()
        ]
        folders[:] = [name for name in folders if name not in skipped]
        others += [f"{(below / name).as_posix()}/" for name in skipped]
        others += [(below / name).as_posix() for name in names if name[0] == "."]
        files += [Path(parent, name) for name in names if name[0] != "."]
    return sorted(files, key=lambda file: file.relative_to(folder).as_posix()), sorted(others)


def _suffix(path: Path) -> str:
    """Return the suffix that says what a file holds, in lower case and without that of its compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    return "".join(suffixes[-2:-1] if suffixes and suffixes[-1] in _COMPRESSIONS else suffixes[-1:])


def _pieces(path: Path, separator: bytes | None) -> Iterator[tuple[int, bytes]]:
    """Yield a file between separators, without reading all of it at once; each piece with its first byte's place."""
    rest, offset = bytearray(), 0
    for chunk in _chunks(path):
        searched = max(0, len(rest) - len(separator or b"") + 1)  # the separator may lie across two chunks
        rest += chunk
        begin = 0
        while separator and (end := rest.find(separator, max(begin, searched))) >= 0:
            yield offset + begin, bytes(rest[begin:end])
            begin = end + len(separator)
        del rest[:begin]
        offset += begin
    yield offset, bytes(rest)


def _chunks(path: Path) -> Iterator[bytes]:
    """Yield the content of a text file, decompressed."""
    try:
        with path.open("rb") as file:
            head = file.read(10)
            file.seek(0)
            unpack = next((unpack for beginning, unpack in _COMPRESSED if beginning.match(head)), _read)
            chunks = unpack(file)
            first = next(chunks, b"")
            if b"\0" in first[:_HEAD_BYTES]:
                raise DataError(
                    f"{path} is no text, since it holds zero bytes. Unpack an archive (zip, tar), convert UTF-16 to "
                    "UTF-8, and give a table the suffix .parquet."
                )
            yield first
            yield from chunks
    except (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error


def _read(file: Any) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk


def _unzstd(file: BinaryIO) -> Iterator[bytes]:
    """Yield the content of zstandard frames. Unlike the library's reader, this notices a frame that is cut off."""
    frame = None
    for packed in _read(file):
        while packed:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            if content := frame.decompress(packed):
                yield content
            packed, frame = frame.unused_data, None if frame.eof else frame
    if frame is not None:
        raise EOFError("Compressed file ended before the end-of-stream marker was reached")


_COMPRESSED: tuple[tuple[re.Pattern[bytes], Callable[[BinaryIO], Iterator[bytes]]], ...] = (
    (re.compile(rb"\x1f\x8b\x08"), lambda file: _read(gzip.GzipFile(fileobj=file))),
    (re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"), lambda file: _read(bz2.BZ2File(file))),
    (re.compile(rb"\xfd7zXZ\0"), lambda file: _read(lzma.LZMAFile(file))),  # noqa: SIM115  # `_chunks` closes the file below it
    (re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"), _unzstd),  # pzstd begins with a frame to skip
)
"""How compressed files begin, and what decompresses them."""
