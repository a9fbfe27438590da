"""Read documents from files, folders, ``.jsonl``, ``.parquet`` and the standard library of the running Python.

A document is a non-empty ``str`` that UTF-8 can encode. The order of the documents depends only on names and contents:
paths in the order given, the files of a folder sorted by their path in it, records in file order. Nothing is unpickled
and nothing is executed.
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
"""The files of a folder that are read. A file that is named explicitly is read whatever its suffix."""

_CHUNK_BYTES = 1 << 20
_RECORDS = (".jsonl", ".parquet")

STANDARD_LIBRARY_LEFT_OUT = frozenset({
    "site-packages", "dist-packages",  # installed packages
    "test", "tests", "idlelib", "turtledemo", "tkinter", "lib2to3", "distutils", "ensurepip",  # often split off
    "encodings", "pydoc_data",  # character tables, and one long string
    "__pycache__",
})
# fmt: on
"""Folders of the standard library that do not belong to the built-in data set."""


def read_documents(
    paths: Sequence[Path], *, text_field: str = "text", document_separator: str | None = None
) -> Iterator[str]:
    """Yield every document of ``paths`` in order, or those of the standard library if there are no paths.

    Args:
        paths: files and folders. Folders are searched recursively for files with `FOLDER_SUFFIXES`. Files and folders
            whose name begins with a dot are skipped, and links to folders are not followed. ``.jsonl`` and ``.parquet``
            files hold one document per record; every other file is UTF-8 text.
        text_field: the field of ``.jsonl`` and ``.parquet`` records that holds the text.
        document_separator: splits text files into documents and is dropped; None: a file is one document.

    Raises:
        DataError: a path is missing or holds no text, text is not UTF-8, or a record is not JSON or lacks the field.
            The message names the file and the byte or line.
        ConfigurationError: a ``.parquet`` file needs pyarrow, which is not installed.
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
                f"{path} holds no text. Give a file that contains text, or a folder with files that end in "
                f"{' '.join(sorted(FOLDER_SUFFIXES))}."
            )


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
            f"No standard library was found as .py files in {folder}. Give your own text: data.paths (--data PATH)."
        )


def _files(path: Path) -> Iterable[Path]:
    if path.is_dir():
        return [file for file in _walk(path) if file.suffix.lower() in FOLDER_SUFFIXES]
    if not path.exists():
        raise NoDataError(f"{path} does not exist.")
    return [path]


def _walk(folder: Path, leave_out: frozenset[str] = frozenset()) -> list[Path]:
    """Return every file below ``folder`` that is neither hidden nor in a folder to leave out, sorted by path."""

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
    """Yield the text of a file between separators, without reading all of it at once."""
    offset = 0
    for piece in _pieces(path, separator.encode()):
        yield _decode(piece, path, offset)
        offset += len(piece) + len(separator.encode())


def _pieces(path: Path, separator: bytes) -> Iterator[bytes]:
    """Yield the content of a file between separators."""
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
    """Decode ``content``, which begins at byte ``offset`` of ``path``."""
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
    """Yield each record of a ``.jsonl`` file with its location as text.

    ``needed`` is what a record needs, for error messages.
    """
    offset = 0
    # Split at line feeds only: splitlines would also split at a carriage return, which JSON allows between its tokens.
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
            raise DataError(f"{path}:{number} must be a JSON object with {needed}, got a {type(record).__name__}.")
        yield f"{path}:{number}", record


def read_records(paths: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every record of the ``.jsonl`` and ``.parquet`` files of ``paths``, with its location as text.

    Raises:
        DataError: as `read_documents`, or a file is of another type.
        ConfigurationError: a ``.parquet`` file needs pyarrow, which is not installed.
    """
    for path in paths:
        files = [file for file in _files(path.expanduser()) if file == path or file.suffix.lower() in _RECORDS]
        for file in files:
            if file.suffix.lower() not in _RECORDS:
                raise DataError(f"{file} can't be read as records. Give files that end in .jsonl or .parquet.")
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
    """Yield each row of a ``.parquet`` file with its location as text: one field of it, or with None all fields."""
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
    """Return the error for a record or file without the field that should hold the text."""
    hint = nearest(text_field, known)
    return DataError(f"{place} has no field {text_field!r} (data.text_field); {hint}")


def checked_text(value: Any, place: str, text_field: str) -> str:
    """Return ``value`` if it can be a document; raise `DataError` if it is not text or UTF-8 can't encode it."""
    if not isinstance(value, str):
        raise DataError(f"{place}: the field {text_field!r} holds {type(value).__name__}, not text.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can contain half of a surrogate pair
        raise DataError(
            f"{place}: the field {text_field!r} holds U+{ord(value[error.start]):04X}, half of a surrogate pair, which "
            "is not valid text."
        ) from error
    return value
