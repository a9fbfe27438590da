"""Read documents and records: text files, JSON, Parquet, and the standard library of the running Python.

A document is a non-empty ``str`` that UTF-8 can encode. The order of the documents depends only on names and contents:
paths in the order given, the files of a folder sorted by their path in it, records in file order. Nothing is unpickled
and nothing is executed.
"""

from __future__ import annotations

import io
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from diloco.data.files import (
    FOLDER_SUFFIXES,
    RECORDS,
    decode,
    files_of,
    kind_of,
    listed,
    opened,
    pieces,
    read_bytes,
    walk,
    warn_once,
)
from diloco.errors import DataError, NoDataError, from_extra, nearest

__all__ = [
    "ArrowRow",
    "Row",
    "RowError",
    "checked_text",
    "missing_field",
    "read_documents",
    "read_records",
    "read_standard_library",
    "usable",
]

T = TypeVar("T")

# fmt: off
STANDARD_LIBRARY_LEFT_OUT = frozenset({
    "site-packages", "dist-packages",  # installed packages
    "test", "tests", "idlelib", "turtledemo", "tkinter", "lib2to3", "distutils", "ensurepip",  # often split off
    "encodings", "pydoc_data",  # character tables, and one long string
    "__pycache__",
})
# fmt: on
"""Folders of the standard library that do not belong to the built-in data set."""


class RowError(DataError):
    """One record or document can't be used. `usable` raises it, or leaves the row out."""


class ArrowRow(dict[str, Any]):
    """A row of a table. A null in its structs may stand for a field that only other rows have."""


Row = tuple[str, Any]
"""The location of a record or document as text, and its content, or the `RowError` that says why it has none."""


def usable(rows: Iterable[Row], use: Callable[[str, Any], T], instead: T, *, skip_bad: bool) -> Iterator[T]:
    """Yield ``use(place, content)`` of each row.

    Args:
        skip_bad: yield ``instead`` for a row that can't be used; how many and which ones is logged when reading ends.

    Raises:
        RowError: a row can't be used, and ``skip_bad`` is False.
    """
    bad: list[str] = []  # the first few
    count = bad_count = 0
    try:
        for place, content in rows:
            count += 1
            try:
                if isinstance(content, RowError):
                    raise content
                value = use(place, content)
            except RowError as error:
                if not skip_bad:
                    way = "Mend it, or leave such rows out of training with --data.skip-bad."
                    raise RowError(f"{error} {way}") from error
                bad_count += 1
                bad += [str(error)] if bad_count <= 5 else []
                value = instead
            yield value
    finally:  # also where the reader needs no more
        if bad:
            words = f"{bad_count:,} of {count:,} rows can't be used and are left out"
            warn_once(f"data.skip_bad: {words}: {listed(bad, bad_count)}.")


def read_documents(
    paths: Sequence[Path], *, text_field: str = "text", document_separator: str | None = None, skip_bad: bool = False
) -> Iterator[str]:
    """Yield every document of ``paths`` in order, or those of the standard library if there are no paths.

    Args:
        paths: files and folders. Folders are searched recursively for files with `FOLDER_SUFFIXES`. Files and folders
            whose name begins with a dot are skipped, and links to folders are not followed. ``.jsonl``, ``.json`` and
            ``.parquet`` files hold one document per record; every other file is UTF-8 text. Files may be compressed
            with gzip, bzip2, xz or zstandard.
        text_field: the field of records that holds the text.
        document_separator: splits text files into documents and is dropped; None: a file is one document.
        skip_bad: leave out records and documents that can't be used, as `usable` does.

    Raises:
        DataError: a path is missing or holds no text, text is not UTF-8, or a record is not JSON or lacks the field.
            The message names the file and the byte or line.
        ConfigurationError: a ``.parquet`` file needs pyarrow, which is not installed.
    """
    if not paths:
        yield from read_standard_library()
        return

    def text_of(place: str, content: Any) -> str:
        if isinstance(content, str):
            return content
        if text_field not in content:
            raise missing_field(place, text_field, content)
        return checked_text(content[text_field], place, text_field)

    for path in paths:
        rows = (row for file in files_of(path) for row in _rows(file, text_field, document_separator))
        yield from _some(
            filter(None, usable(rows, text_of, "", skip_bad=skip_bad)),
            f"{path} holds no text. Give a file that contains text, or a folder with files that end in "
            f"{' '.join(sorted(FOLDER_SUFFIXES))}.",
        )


def read_records(paths: Sequence[Path]) -> Iterator[Row]:
    """Yield every record of the files of ``paths``.

    Raises:
        DataError: a file can't be read or is of another type, or a path holds no records.
        ConfigurationError: a ``.parquet`` file needs pyarrow, which is not installed.
    """
    for path in paths:
        files = files_of(path, records_only=True)
        for file in files:
            if kind_of(file) == "text":
                raise DataError(f"{file} can't be read as records. Give files that end in {' '.join(RECORDS)}.")
        rows = (row for file in files for row in _rows(file, None, None))
        yield from _some(rows, f"{path} holds no records. Give files with records that end in {' '.join(RECORDS)}.")


def _some(values: Iterable[T], nothing: str) -> Iterator[T]:
    """Yield values; raise `NoDataError` with the message ``nothing`` if there are none."""
    nothing_yet = True
    for value in values:
        nothing_yet = False
        yield value
    if nothing_yet:
        raise NoDataError(nothing)


def read_standard_library(root: Path | None = None) -> Iterator[str]:
    """Yield the source files of the standard library of the running Python: about 390 files, 8 MB, with Python 3.11.

    These are its ``.py`` files in the order of their paths. Left out are `STANDARD_LIBRARY_LEFT_OUT`, files that
    describe the machine (``_sysconfigdata*``, ``sitecustomize``, ``config-*``), and files that are empty or not UTF-8.
    The same version of Python gives the same documents unless its distributor changed the files.

    Args:
        root: the folder to read instead of the running Python's own.

    Raises:
        DataError: this Python has no readable standard library (some ship it as one zip file).
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    found = False
    for file in walk(folder, leave_out=STANDARD_LIBRARY_LEFT_OUT)[0] if folder.is_dir() else ():
        top = file.relative_to(folder).parts[0]
        if file.suffix != ".py" or top.startswith(("_sysconfigdata", "sitecustomize", "usercustomize", "config-")):
            continue
        try:
            document = read_bytes(file, text=False)[0].decode("utf-8")
        except UnicodeDecodeError:
            continue
        if document:
            found = True
            yield document
    if not found:
        raise DataError(
            f"No standard library was found as .py files in {folder}. Give your own text: data.paths (--data PATH)."
        )


def _rows(path: Path, text_field: str | None, separator: str | None) -> Iterator[Row]:
    """Yield the records of a file, or the documents of a text file.

    Args:
        text_field: the only field that is needed of Parquet; None: all.
    """
    match kind_of(path):
        case "lines":
            yield from _json_lines(path)
        case "json":
            yield from _json_file(path)
        case "parquet":
            yield from _parquet_rows(path, text_field)
        case _ if separator is None:
            content, offset = read_bytes(path)
            if content[:1] == b"{" and isinstance(_record(path, str(path), content.partition(b"\n")[0]), dict):
                warn_once(f"{path} is read as one text, but looks like JSON Lines. Give such files the suffix .jsonl.")
            yield _text_row(path, offset, content)
        case _:
            with opened(path) as file:
                yield from (_text_row(path, *piece) for piece in pieces(file, separator.encode()))


def _text_row(path: Path, offset: int, content: bytes) -> Row:
    try:
        return str(path), decode(content, path, offset)
    except DataError as error:
        return str(path), RowError(str(error))


def _json_lines(path: Path) -> Iterator[Row]:
    with opened(path) as file:
        # Split at line feeds only: splitlines would also split at a carriage return, which JSON allows between its
        # tokens.
        for number, (offset, line) in enumerate(pieces(file, b"\n"), start=1):
            place, text = _text_row(path, offset, line)
            place = f"{place}:{number}"
            if isinstance(text, RowError):
                yield place, text
            elif text := text.strip().removeprefix("\ufeff"):  # files that were joined have a mark in the middle
                yield place, _record(path, place, text)


def _json_file(path: Path) -> Iterator[Row]:
    """Yield the records of a JSON file: of an array, a record alone, or JSON lines."""
    content, offset = read_bytes(path)
    first = list(islice((line for line in content.split(b"\n") if line.strip()), 2))
    in_lines = any(isinstance(_record(path, str(path), line), dict) for line in first)
    if len(first) > 1 and in_lines and not first[0].lstrip().startswith(b"["):
        yield from _json_lines(path)
        return
    text = decode(content, path, offset).strip()
    if text.startswith("["):
        try:
            records = _parsed(path, text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is not JSON: {error}.") from error
        for number, record in enumerate(records):
            place = f"{path}, record {number}"
            yield place, record if isinstance(record, dict) else _no_object(place, record)
    elif text:
        yield str(path), _record(path, str(path), text)


def _record(path: Path, place: str, text: str | bytes) -> Any:
    """Return the record that a text holds, or the `RowError` that says why it holds none."""
    try:
        record = _parsed(path, text)
    except (ValueError, RecursionError) as error:
        return RowError(f"{place} is not JSON: {error}.")
    return record if isinstance(record, dict) else _no_object(place, record)


def _parsed(path: Path, text: str | bytes) -> Any:
    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            names = [name for name, _ in pairs]
            for name in sorted({name for name in names if names.count(name) > 1}):
                warn_once(f"{path}: an object has the field {name!r} twice; the last one is used.")
        return fields

    return json.loads(text, object_pairs_hook=collect)


def _no_object(place: str, record: Any) -> RowError:
    return RowError(f"{place} must be a JSON object with the fields of a record, got a {type(record).__name__}.")


def _parquet_rows(path: Path, text_field: str | None) -> Iterator[Row]:
    """Yield each row of a ``.parquet`` file: one field of it, or with None all fields."""
    with from_extra("parquet", f"{path} needs pyarrow"):
        import pyarrow
        import pyarrow.parquet
    try:
        with opened(path, text=False) as content, pyarrow.parquet.ParquetFile(_seekable(content)) as file:
            if text_field is not None and text_field not in file.schema_arrow.names:
                raise missing_field(str(path), text_field, file.schema_arrow.names)
            row = 0
            for batch in file.iter_batches(batch_size=1024, columns=None if text_field is None else [text_field]):
                for values in batch.to_pylist():
                    yield f"{path}, row {row}", ArrowRow(values)
                    row += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}.") from error


def _seekable(file: io.BufferedReader) -> io.BufferedReader | io.BytesIO:
    return file if isinstance(file.raw, io.FileIO) else io.BytesIO(file.read())


def missing_field(place: str, text_field: str, known: Iterable[str]) -> RowError:
    """Return the error for a record or file without the field that should hold the text."""
    hint = nearest(text_field, known)
    return RowError(f"{place} has no field {text_field!r} (data.sources); {hint}")


def checked_text(value: Any, place: str, text_field: str) -> str:
    """Return ``value`` if it can be a document; raise `RowError` if it is not text or UTF-8 can't encode it."""
    if not isinstance(value, str):
        raise RowError(f"{place}: the field {text_field!r} holds {type(value).__name__}, not text.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can contain half of a surrogate pair
        raise RowError(
            f"{place}: the field {text_field!r} holds U+{ord(value[error.start]):04X}, half of a surrogate pair, which "
            "is not valid text."
        ) from error
    return value
