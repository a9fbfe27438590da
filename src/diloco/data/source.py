"""The documents of a run: files at a path or any URL of fsspec, data sets, or the running Python's standard library.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import xxhash
import zstandard

from diloco.data.settings import HUB_PREFIX, DataSettings
from diloco.errors import ConfigurationError, DataError, NoDataError, from_extra, nearest
from diloco.private_files import open_store
from diloco.units import format_bytes
from diloco.waiting import fetching

FROM_HUB = "Check the name, and the connection to the hub (HF_HUB_OFFLINE=1 disables it)."
"""What to do if something of the Hugging Face hub can't be read."""

LOGGER = logging.getLogger("diloco.data")
"""The logger of what is not read. Its warnings go to stderr unless a program configures logging."""

Row: TypeAlias = tuple[str, Any]
"""Where a record or document is, in words, and its content: a dictionary or a text."""

# fmt: off
DOCUMENT_SUFFIXES = frozenset({
    ".txt", ".text", ".md", ".rst", ".tex",
    ".py", ".c", ".h", ".cpp", ".hpp", ".rs", ".go", ".java", ".js", ".ts",
})
"""The documents that are read of a folder."""

MAX_RECORD_BYTES = 256_000_000
"""The longest line of a file of records, and the longest text in a record."""
MAX_FILE_BYTES = 1_000_000_000
"""The largest file that is one document or one JSON value, unpacked."""

STANDARD_LIBRARY_LEFT_OUT = frozenset({
    "site-packages", "dist-packages",  # installed packages
    "test", "tests", "idlelib", "turtledemo", "tkinter", "lib2to3", "distutils", "ensurepip",  # often split off
    "encodings", "pydoc_data",  # character tables, and one long string
    "__pycache__",
})
"""Folders of the standard library that do not belong to the built-in data set."""
# fmt: on


class Source:
    """The records of ``data.paths``: files and data sets one after the other, in the same order at every reading.

    What there is to read is listed here, but nothing is read yet.

    Raises:
        DataError: something does not exist, or can't be read.
        ConfigurationError: a package is not installed.
    """

    def __init__(self, settings: DataSettings) -> None:
        self.settings, self._has_nulls = settings, False
        self.parts: list[File | StandardLibrary | DataSet] = [] if settings.paths else [StandardLibrary()]
        suffixes = RECORD_SUFFIXES if settings.chat else RECORD_SUFFIXES | DOCUMENT_SUFFIXES
        for path in settings.paths:
            self.parts += [_data_set(path, settings)] if path.startswith(HUB_PREFIX) else _files(path, suffixes)
        if settings.streaming and len(self.parts) > 1 and any(isinstance(part, DataSet) for part in self.parts):
            raise ConfigurationError(
                f"data.streaming reads files or one data set, got {', '.join(settings.paths)}. Give one of them, or "
                "make a folder of tokens of each (diloco tokenize)."
            )

    def identity(self) -> list[DataIdentity]:
        """Return what tells this data from other data, for each file or data set in the order of reading."""
        return [identity for part in self.parts for identity in part.identity()]

    def rows(self) -> Iterator[Row]:
        """Yield every record, and every file without records as one text."""
        for part in self.parts:
            yield from part.rows()

    def documents(self) -> Iterator[str]:
        """Yield every document.

        Raises:
            DataError: one can't be read, or there is none at all.
        """
        empty = True
        for text in (self.text(*row) for row in self.rows()):
            empty = empty and not text
            if text:
                yield text
        if empty:
            raise NoDataError(f"{', '.join(self.settings.paths) or 'the standard library'} holds no text.")

    def text(self, where: str, content: Any) -> str:
        """Return the text of a row; an empty one isn't a document."""
        field = self.settings.text_field
        if isinstance(content, str):
            return content
        if field not in content:
            if content.keys() & {"messages", "completion"}:
                raise DataError(
                    f"{where} is a conversation and has no field {field!r} (data.text_field). `diloco finetune` learns "
                    "conversations, and `diloco evaluate` measures its runs on them."
                )
            raise DataError(f"{where} has no field {field!r} (data.text_field); {nearest(field, content)}")
        if content[field] is None:
            if not self._has_nulls:
                self._has_nulls = True
                warn_once(f"{where}: the field {field!r} is null. Such records are left out, as empty ones are.")
            return ""
        return checked_text(content[field], where, field)

    def stream(self) -> Any:
        """Return a new ``datasets.IterableDataset`` of the records, which can be continued from a state."""
        with from_extra("hf", "Streaming needs datasets"):
            from datasets import IterableDataset
        first = self.parts[0]
        if isinstance(first, DataSet):
            from datasets.distributed import split_dataset_by_node

            return split_dataset_by_node(first.all_rows, 0, 1)  # a copy, as how far it has been read is a part of it
        return IterableDataset.from_generator(_texts, gen_kwargs={"source": self, "parts": self.parts})


@dataclass(frozen=True)
class DataIdentity:
    """What tells a file or data set from others: wherever it is and whenever it was written, its content alone."""

    name: str  # for messages
    content: str  # its size and a digest of it, or what its library says of it


def _texts(source: Source, parts: Sequence[File | StandardLibrary]) -> Iterator[dict[str, str]]:
    for part in parts:
        yield from ({source.settings.text_field: source.text(*row)} for row in part.rows())


def checked_text(value: Any, where: str, field: str) -> str:
    """Return ``value`` if it can be a document; raise `DataError` if it is not text, too long, or not valid UTF-8."""
    try:
        size = len(value.encode("utf-8"))
    except (AttributeError, UnicodeEncodeError) as error:  # JSON can contain half of a surrogate pair
        what = "null" if value is None else type(value).__name__
        if isinstance(value, str):
            what = "half of a surrogate pair"
        raise DataError(f"{where}: the field {field!r} holds {what}, not text.") from error
    if size > MAX_RECORD_BYTES:
        raise DataError(
            f"{where}: the field {field!r} holds {format_bytes(size)}, but a document of a record has at most "
            f"{format_bytes(MAX_RECORD_BYTES)}. Divide it into several."
        )
    return str(value)


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning, unless this process has logged the same one: data may be read several times."""
    LOGGER.warning(message)


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


@dataclass(frozen=True)
class DataSet:
    """A data set of the ``datasets`` library."""

    name: str
    all_rows: Any  # a ``Dataset``, or with ``data.streaming`` an ``IterableDataset``
    files: Sequence[str]  # the local files that it consists of, if it is known and there are any

    def identity(self) -> Iterator[DataIdentity]:
        """Yield what is known of the data set, and the identity of its local files."""
        rows = self.all_rows
        shards = None if self.files else getattr(rows, "num_shards", None)
        about = f"version {rows.info.version}, {rows.features}, {shards} shards"
        yield DataIdentity("the data set", xxhash.xxh3_64_hexdigest(about.encode()))
        for path in self.files:
            with open(path, "rb") as file:
                yield DataIdentity(Path(path).name, _digest(file, os.path.getsize(path)))

    def rows(self) -> Iterator[Row]:
        """Yield every record."""
        with as_data_error(self.name, FROM_HUB):
            yield from ((f"{self.name}, row {number}", row) for number, row in enumerate(self.all_rows))


def _data_set(name: str, settings: DataSettings) -> DataSet:
    """Open ``hf:NAME[/CONFIG][:SPLIT]``, of the hub or a local folder; nothing is read yet."""
    path, _, split = name.removeprefix(HUB_PREFIX).partition(":")
    folder, config = Path(path).expanduser(), None
    if not path or not folder.exists():
        parts = path.split("/")
        if not all(parts) or len(parts) > 3 or parts[0] in (".", "..", "~"):
            raise ConfigurationError(
                f"{name!r} is neither the name of a data set, hf:NAME[/CONFIG][:SPLIT] as in hf:allenai/c4/en:train, "
                "nor an existing folder."
            )
        path, config = "/".join(parts[:2]), parts[2] if len(parts) == 3 else None
    with from_extra("hf", f"{name} needs datasets"):
        import datasets
    with as_data_error(name, FROM_HUB):
        files: list[str] = []
        if (folder / "state.json").is_file():
            rows = datasets.load_from_disk(str(folder))
            files = [cache_file["filename"] for cache_file in rows.cache_files]
            if split not in ("", saved := str(rows.split or "train")):
                raise ConfigurationError(f"{folder} holds the split {saved} alone, not {split!r}. Leave out :{split}.")
        else:
            with fetching(path):
                rows = datasets.load_dataset(
                    str(folder) if folder.exists() else path,
                    config,
                    split=split or "train",
                    streaming=settings.streaming,
                    trust_remote_code=False,
                )
                if folder.exists():
                    builder = datasets.load_dataset_builder(str(folder), config)
                    for paths in (builder.config.data_files or {}).values():
                        files += filter(os.path.isfile, paths)
        if rows.column_names is not None and not settings.chat:  # unknown for some streams
            rows = rows.select_columns([settings.text_field])
        streams = settings.streaming and isinstance(rows, datasets.Dataset)
        return DataSet(name, rows.to_iterable_dataset() if streams else rows, files)


class StandardLibrary:
    """The source files of the standard library of the running Python: about 390 files, 8 MB, with Python 3.11.

    Left out are `STANDARD_LIBRARY_LEFT_OUT`, files that describe the machine (``_sysconfigdata*``, ``sitecustomize``,
    ``config-*``), and files that are empty or not UTF-8. The same version of Python gives the same documents unless its
    distributor changed the files.
    """

    def identity(self) -> Iterator[DataIdentity]:
        """Yield that of all files together."""
        digest = xxhash.xxh3_64()
        for _, text in self.rows():
            digest.update(text.encode())
        yield DataIdentity("Python's standard library", digest.hexdigest())

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


def _files(place: str, suffixes: Iterable[str]) -> list[File]:
    """Return the files at a path or URL: itself, what it matches as a pattern, or what a folder holds, sorted by path.

    Raises:
        DataError: the place does not exist, can't be listed or holds no such files.
        ConfigurationError: a package for this kind of URL is not installed.
    """
    with as_data_error(place), from_extra("cloud", f"{place} needs a package"):
        remote = "://" in place
        system, path = open_store(place)
        if system.isdir(path):
            if not remote:
                # fsspec is silent about folders that it can't list
                list(os.walk(path, onerror=lambda error: warn_once(f"{error.filename} is not read: {error.strerror}.")))
            names: list[Any] = _data_of_folder(system, path, suffixes)
        elif system.exists(path):
            names = [path]
        else:
            matches = system.glob(path, detail=True) if glob.has_magic(path) else {}
            names = [matches[name] | {"name": name} for name in sorted(matches)]
            if not names:
                raise NoDataError(f"{place} does not exist.")
        listed = [{**system.info(name), "name": name} if isinstance(name, str) else name for name in names]
        return [
            File(system, about["name"], system.unstrip_protocol(about["name"]) if remote else about["name"], about)
            for about in listed
        ]


def _data_of_folder(system: Any, folder: str, suffixes: Iterable[str]) -> list[dict[str, Any]]:
    """Return what is listed of the files of a folder that hold data. What is left out is named."""
    data: list[dict[str, Any]] = []
    others: list[str] = []
    for name, about in sorted(system.find(folder, detail=True).items()):
        below = name.removeprefix(folder).lstrip("/")
        hidden = any(part.startswith(".") for part in below.split("/"))
        plain = about["type"] == "file" or (about.get("islink") and not os.path.isdir(name))
        is_data = plain and not hidden and _suffixes(name)[0] in suffixes
        if is_data:
            data.append({**about, "name": f"{folder.rstrip('/')}/{below}"})
        else:
            others.append(below if plain else f"{below}/")
    if others:
        more = f"; and {len(others) - 5:,} more" if len(others) > 5 else ""
        why = "hidden, links to folders or files of another type"
        warn_once(f"{folder}: not read, because they are {why}: {'; '.join(others[:5])}{more}.")
    if not data:
        raise NoDataError(f"{folder} holds no files to read, which end in {' '.join(sorted(suffixes))}.")
    return data


@dataclass(frozen=True)
class File:
    """A file of records, or of one document."""

    system: Any  # the file system of fsspec
    path: str
    name: str  # the path or URL, for messages
    listed: Mapping[str, Any]  # what the file system says of it

    def identity(self) -> Iterator[DataIdentity]:
        """Yield its own; the digest is that of the store, if it has one."""
        tag = next((self.listed[name] for name in _DIGESTS if self.listed.get(name)), None)
        if tag is None:
            with as_data_error(self.name), self.system.open(self.path, "rb") as file:
                tag = _digest(file, self.system.info(self.path)["size"])
        name = Path(self.path).name
        yield DataIdentity(name, f"{'.'.join(_suffixes(name))} {str(tag).strip(chr(34))}")

    def rows(self) -> Iterator[Row]:
        """Yield its records, or its document."""
        suffix, packing = _suffixes(self.path)
        with as_data_error(self.name):
            if self.system.info(self.path)["type"] == "other" and not os.path.isfile(self.path):
                raise DataError(f"{self.name} is a pipe, socket or device, but data may be read several times.")
            with self.system.open(self.path, "rb") as packed, _UNPACK[packing](packed) as file:
                yield from _READ.get(suffix, _read_document)(file, self.name)


_DIGESTS = ("ETag", "md5Hash", "content_md5", "blob_id")
"""What stores list that changes with the content of a file: S3, Google, Azure, Hugging Face."""
_BLOCK_BYTES, _BLOCKS = 1 << 18, 16


def _digest(file: Any, size: int | None) -> str:
    """Return the size of a file, and a digest of its content or, if it is large, of blocks spread over it."""
    digest = xxhash.xxh3_64()
    if size is None:  # such as of a stream of the web
        return "of unknown size"
    if size <= _BLOCK_BYTES * _BLOCKS:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    else:
        for number in range(_BLOCKS):
            file.seek((size - _BLOCK_BYTES) * number // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))
    return f"{size} bytes, {digest.hexdigest()}"


def _suffixes(path: str) -> tuple[str, str]:
    """Return the suffix that says what a file holds, and the one that says how it is compressed, or ""."""
    if path.startswith(("http://", "https://")):
        path = path.partition("?")[0]
    *_, first, last = ["", "", *(suffix.lower() for suffix in Path(path).suffixes)]
    return (first, last) if last in _UNPACK else (last, "")


def _read_document(file: Any, name: str) -> Iterator[Row]:
    content = _read_whole(file, name)
    if b"\0" in content[:512]:
        raise DataError(
            f"{name} isn't text: it holds zero bytes. Unpack an archive (zip, tar), convert UTF-16 to UTF-8, and "
            "give a table the suffix .parquet."
        )
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(name, error) from error
    yield name, text


def _not_utf8(where: str, error: UnicodeDecodeError) -> DataError:
    return DataError(
        f"{where} cannot be read as UTF-8: {error}. Convert a text of another encoding (iconv -f latin1 -t utf-8); "
        "leave out what is not text."
    )


def _refuse_table(file: Any, name: str) -> Iterator[Row]:
    raise DataError(
        f"{name} is a table that is not read as a file. Give the folder of a .csv, .tsv or .arrow as --data hf:FOLDER, "
        "which datasets reads, and write others as .jsonl or .parquet."
    )


def _read_whole(file: Any, name: str) -> bytearray:
    """Return the content of a file that may unpack to any size, at most `MAX_FILE_BYTES`."""
    content = bytearray()
    while chunk := file.read(1 << 20):
        content += chunk
        if len(content) > MAX_FILE_BYTES:
            raise DataError(
                f"{name} holds more than {format_bytes(MAX_FILE_BYTES)}, which a file may have that is one document or "
                "one JSON value. Divide it, or write its records one per line (.jsonl)."
            )
    return content


def _lines(file: Any) -> Iterator[bytearray]:
    """Yield the lines of a file without their ends, and of one that is longer than `MAX_RECORD_BYTES` its beginning."""
    line = bytearray()
    while len(line) <= MAX_RECORD_BYTES and (chunk := file.read(1 << 20)):
        first, *others = chunk.split(b"\n")
        line += first
        for other in others:
            yield line
            line = bytearray(other)
    yield line


def _read_lines(file: Any, name: str) -> Iterator[Row]:
    for number, line in enumerate(_lines(file), start=1):
        if len(line) > MAX_RECORD_BYTES:
            raise DataError(
                f"{name}:{number} has more than {format_bytes(MAX_RECORD_BYTES)}, which a line may have. Divide its "
                "text into several records."
            )
        if line.strip():
            if b"\0" in line:
                raise DataError(f"{name}:{number} holds zero bytes, which are no JSON. Convert UTF-16 to UTF-8.")
            try:
                record = json.loads(line)  # a byte order mark may begin any line of files that were joined
            except UnicodeDecodeError as error:
                raise _not_utf8(f"{name}:{number}", error) from error
            except (ValueError, RecursionError) as error:
                raise DataError(f"{name}:{number} is not JSON: {error}.") from error
            yield _record(f"{name}:{number}", record)


def _read_json(file: Any, name: str) -> Iterator[Row]:
    """Yield the records of an array, a record alone, or lines."""
    content = _read_whole(file, name)
    try:
        records = json.loads(content)
    except (ValueError, RecursionError):
        yield from _read_lines(io.BytesIO(content), name)
        return
    for number, record in enumerate(records if isinstance(records, list) else [records]):
        yield _record(f"{name}, record {number}", record)


def _read_parquet(file: Any, name: str) -> Iterator[Row]:
    with from_extra("hf", f"{name} needs datasets"):
        import datasets  # noqa: F401  # the extra installs pyarrow with it
        from pyarrow.parquet import ParquetFile
    table = ParquetFile(file)
    groups = [table.metadata.row_group(number) for number in range(table.num_row_groups)]
    sizes = [group.column(number).total_uncompressed_size for group in groups for number in range(group.num_columns)]
    # a value that a dictionary holds once may be in every row
    at_once = 8 * MAX_RECORD_BYTES // max([1, *sizes])
    rows = (row for batch in table.iter_batches(min(1024, max(1, at_once))) for row in batch.to_pylist())
    yield from ((f"{name}, row {number}", row) for number, row in enumerate(rows))


def _record(where: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{where} must be a JSON object with the fields of a record, got a {type(value).__name__}.")
    return where, value


_READ: dict[str, Callable[[Any, str], Iterator[Row]]] = {
    **dict.fromkeys((".jsonl", ".jsonlines", ".ndjson"), _read_lines),
    ".json": _read_json,
    ".parquet": _read_parquet,
    **dict.fromkeys((".csv", ".tsv", ".arrow", ".feather", ".orc", ".xlsx"), _refuse_table),
}
"""Suffix -> what reads the records of a file. Every other file is one document."""

RECORD_SUFFIXES = frozenset(suffix for suffix, read in _READ.items() if read not in (_read_json, _refuse_table))
"""The files of records that are read of a folder. ``.json`` isn't among them, because it often describes a folder."""

_ZSTANDARD_BYTES = 1 << 11
"""How much is unpacked at once: at most 32,768 times this."""


class _ZstandardFile(io.RawIOBase):
    """What a file of zstandard frames unpacks to. Unlike the library's own reader it notices a file that was cut."""

    def __init__(self, file: Any) -> None:
        self._file, self._frame = file, zstandard.ZstdDecompressor().decompressobj()
        self._packed, self._unpacked, self._is_inside = b"", memoryview(b""), False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unpacked:
            packed = self._packed or self._file.read(_ZSTANDARD_BYTES)
            if not packed:
                if self._is_inside:
                    raise EOFError("Compressed file ended before the end of a frame was reached")
                return 0
            self._unpacked = memoryview(self._frame.decompress(packed))
            self._packed, self._is_inside = self._frame.unused_data, not self._frame.eof
            if self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
        count = min(len(buffer), len(self._unpacked))
        buffer[:count], self._unpacked = self._unpacked[:count], self._unpacked[count:]
        return count


_UNPACK: dict[str, Callable[[Any], Any]] = {
    "": lambda file: file,
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": lambda file: io.BufferedReader(_ZstandardFile(file)),
}
"""The suffix of a compressed file -> what decompresses it."""
