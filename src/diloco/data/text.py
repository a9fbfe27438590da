"""Documents from files, folders, ``.jsonl``, ``.parquet`` and the running Python's own standard library.

A document is a non-empty ``str`` that can be encoded as UTF-8. Documents come in an order that depends on names and
contents only: paths as given, the files of a folder sorted by their path within it, records as they stand in the file.
Nothing is unpickled and nothing is executed.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from diloco.errors import DataError, NoDataError, from_extra, nearest

__all__ = [
    "FOLDER_SUFFIXES",
    "checked_text",
    "missing_field",
    "read_documents",
    "read_records",
    "read_standard_library",
]

# fmt: off
FOLDER_SUFFIXES = frozenset({
    ".txt", ".text", ".md", ".rst", ".tex",
    ".py", ".c", ".h", ".cpp", ".hpp", ".rs", ".go", ".java", ".js", ".ts",
    ".jsonl", ".parquet",
})
"""Which files of a folder count. A file that is named itself counts whatever its suffix."""

_CHUNK_BYTES = 1 << 20
_RECORDS = (".jsonl", ".parquet")

STANDARD_LIBRARY_LEFT_OUT = frozenset({
    "site-packages", "dist-packages",  # installed, no part of it
    "test", "tests", "idlelib", "turtledemo", "tkinter", "lib2to3", "distutils", "ensurepip",  # often shipped apart
    "encodings", "pydoc_data",  # tables of characters, one long string
    "__pycache__",
})
# fmt: on
"""Folders of the standard library that are no part of the built-in data set."""


def read_documents(
    paths: Sequence[Path], *, text_field: str = "text", document_separator: str | None = None
) -> Iterator[str]:
    """Every document of ``paths``, one after the other; of the standard library when there are none.

    Args:
        paths: files and folders. Folders are searched to the bottom for files with `FOLDER_SUFFIXES`; files and folders
            whose name begins with a dot are skipped, links to folders not followed. ``.jsonl`` and ``.parquet`` hold
            one document a record, every other file is UTF-8 text.
        text_field: the field of ``.jsonl`` and ``.parquet`` records that holds the text.
        document_separator: cuts text files into documents and is dropped; None: a file is one document.

    Raises:
        DataError: a path that is missing or holds no text, text that is not UTF-8, a record that is not JSON or lacks
            the field; the message names the file and the byte or line.
        ConfigurationError: ``.parquet`` without pyarrow.
    """
    if not paths:
        yield from read_standard_library()
        return
    for path in paths:
        found = False
        for file in _files(path.expanduser()):
            for document in _read_file(file, text_field, document_separator):
                if document:
                    found = True
                    yield document
        if not found:
            raise NoDataError(
                f"{path} holds no text. Give a file with text in it, or a folder with files that end in "
                f"{' '.join(sorted(FOLDER_SUFFIXES))}."
            )


def read_standard_library(root: Path | None = None) -> Iterator[str]:
    """The source of the running Python's standard library: about 390 files, 8 MB, with Python 3.11.

    Its ``.py`` files in the order of their paths, without `STANDARD_LIBRARY_LEFT_OUT`, without what describes the
    machine (``_sysconfigdata*``, ``sitecustomize``, ``config-*``), and without those that are empty or not UTF-8. The
    same version of Python gives the same documents wherever its distributor left the files as they were.

    Args:
        root: where to look instead of the running Python's own folder.

    Raises:
        DataError: this Python carries no readable standard library (some come as one zip file).
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    found = False
    for file in _walk(folder, leave_out=STANDARD_LIBRARY_LEFT_OUT) if folder.is_dir() else ():
        top = file.relative_to(folder).parts[0]
        if file.suffix != ".py" or top.startswith(("_sysconfigdata", "sitecustomize", "usercustomize", "config-")):
            continue
        try:
            document = _read_bytes(file).decode("utf-8")
        except UnicodeDecodeError:
            continue
        if document:
            found = True
            yield document
    if not found:
        raise DataError(
            f"No standard library was found as .py files in {folder}. Give text of your own: data.paths (--data PATH)."
        )


def _files(path: Path) -> Iterable[Path]:
    if path.is_dir():
        return [file for file in _walk(path) if file.suffix.lower() in FOLDER_SUFFIXES]
    if not path.exists():
        raise NoDataError(f"{path} does not exist.")
    return [path]


def _walk(folder: Path, leave_out: frozenset[str] = frozenset()) -> list[Path]:
    """Every file below ``folder`` that is neither hidden nor in a folder to leave out, sorted by its path within it."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}.") from error

    files: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in leave_out]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(files, key=lambda file: file.relative_to(folder).as_posix())


def _read_file(path: Path, text_field: str, document_separator: str | None) -> Iterable[str]:
    match path.suffix.lower():
        case ".jsonl":
            return _read_jsonl(path, text_field)
        case ".parquet":
            return _read_parquet(path, text_field)
    if document_separator is None:
        return [_decode(_read_bytes(path), path, 0)]
    return _read_pieces(path, document_separator)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error


def _read_pieces(path: Path, separator: str) -> Iterator[str]:
    """A text file cut at ``separator``, without holding all of it."""
    offset = 0
    for piece in _pieces(path, separator.encode()):
        yield _decode(piece, path, offset)
        offset += len(piece) + len(separator.encode())


def _pieces(path: Path, separator: bytes) -> Iterator[bytes]:
    """The content of a file between separators."""
    held = bytearray()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                # The separator may lie across two chunks.
                searched = max(0, len(held) - len(separator) + 1)
                held += chunk
                begin = 0
                while (end := held.find(separator, max(begin, searched))) >= 0:
                    yield bytes(held[begin:end])
                    begin = end + len(separator)
                del held[:begin]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    yield bytes(held)


def _decode(content: bytes, path: Path, offset: int) -> str:
    """``content``, which begins at byte ``offset`` of ``path``, as text."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8: byte {offset + error.start} is 0x{content[error.start]:02x} ({error.reason}). "
            "Convert it to UTF-8."
        ) from error


def _read_jsonl(path: Path, text_field: str) -> Iterator[str]:
    for place, record in _json_lines(path, f"the field {text_field!r}"):
        if text_field not in record:
            raise missing_field(place, text_field, record)
        yield checked_text(record[text_field], place, text_field)


def _json_lines(path: Path, needed: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each record of a ``.jsonl`` file, with its place in words; it needs what is ``needed``."""
    offset = 0
    # Cut at line feeds only: splitlines would also cut at a carriage return, which JSON allows between its tokens.
    for number, line in enumerate(_pieces(path, b"\n"), start=1):
        text = _decode(line, path, offset)
        offset += len(line) + 1
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number} is not JSON: {error}.") from error
        if not isinstance(record, dict):
            raise DataError(f"{path}:{number} must be a JSON object with {needed}, not a {type(record).__name__}.")
        yield f"{path}:{number}", record


def read_records(paths: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every record of the ``.jsonl`` and ``.parquet`` files of ``paths``, all of its fields, with its place in words.

    Raises:
        DataError: as `read_documents`; and for a file of another kind.
        ConfigurationError: ``.parquet`` without pyarrow.
    """
    for path in paths:
        files = [file for file in _files(path.expanduser()) if file == path or file.suffix.lower() in _RECORDS]
        for file in files:
            if file.suffix.lower() not in _RECORDS:
                raise DataError(f"{file} holds no records. Give files that end in .jsonl or .parquet. It was not read.")
            yield from (
                _json_lines(file, "the fields of a conversation")
                if file.suffix.lower() == ".jsonl"
                else _parquet_rows(file, None)
            )
        if not files:
            raise NoDataError(f"{path} holds no .jsonl or .parquet files.")


def _read_parquet(path: Path, text_field: str) -> Iterator[str]:
    for place, row in _parquet_rows(path, text_field):
        yield checked_text(row[text_field], place, text_field)


def _parquet_rows(path: Path, text_field: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row of a ``.parquet`` file, with its place in words: one field of it, or with None all."""
    with from_extra("parquet", f"{path} needs pyarrow"):
        import pyarrow
        import pyarrow.parquet
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if text_field is not None and text_field not in file.schema_arrow.names:
                raise missing_field(str(path), text_field, file.schema_arrow.names)
            row = 0
            for batch in file.iter_batches(batch_size=1024, columns=None if text_field is None else [text_field]):
                for values in batch.to_pylist():
                    yield f"{path}, row {row}", values
                    row += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}.") from error


def missing_field(place: str, text_field: str, known: Iterable[str]) -> DataError:
    """The error for a record or file without the field that is to hold the text."""
    hint = nearest(text_field, known)
    return DataError(f"{place} has no field {text_field!r} (data.text_field); {hint} The text was not read.")


def checked_text(value: Any, place: str, text_field: str) -> str:
    """``value`` if it can be a document: text, and text that UTF-8 can encode."""
    if not isinstance(value, str):
        raise DataError(f"{place}: the field {text_field!r} holds {type(value).__name__}, not text.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise DataError(
            f"{place}: the field {text_field!r} holds U+{ord(value[error.start]):04X}, half of a surrogate pair, which "
            "is no text."
        ) from error
    return value
