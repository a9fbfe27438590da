"""Documents of a source, one after the other: files, folders, and whatever the ``datasets`` library reads.

Every source has its documents in one order, which is the same at every reading, so that a place in it is a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from diloco.data.settings import HUB_PREFIX, HubName, SourceSettings
from diloco.data.text import checked_text, missing_field, read_documents
from diloco.errors import ConfigurationError, DataError

__all__ = ["DocumentSource", "open_source", "read_source"]

_ROWS = 100
"""Rows of a data set that are read at a time."""


class DocumentSource(Protocol):
    """Records in a fixed order; one without text is an empty string, and no document."""

    @property
    def size(self) -> int | None:
        """Number of records where that is known without reading them."""

    def records(self, start: int = 0) -> Iterator[str]:
        """The records from number ``start`` on.

        Raises:
            DataError: they cannot be read.
        """


def open_source(settings: SourceSettings) -> DocumentSource:
    """What ``settings`` name; data sets are opened, and nothing is read yet.

    Raises:
        DataError: a data set that is not there, or lacks the field.
        ConfigurationError: ``datasets`` is not installed.
    """
    if not settings.data:
        return Files((), settings)
    parts: list[DocumentSource] = []
    files: list[Path] = []
    for place in settings.data:
        if place.startswith(HUB_PREFIX):
            if files:
                parts.append(Files(files, settings))
                files = []
            parts.append(_data_set(place, settings))
        else:
            files.append(Path(place))
    if files:
        parts.append(Files(files, settings))
    return parts[0] if len(parts) == 1 else Chain(parts)


def read_source(source: SourceSettings) -> Iterable[str]:
    """Its documents."""
    return (record for record in open_source(source).records() if record)


class Files:
    """Files and folders, as `read_documents` reads them.

    Args:
        paths: none: the standard library.
        settings: how they are cut into documents.
    """

    size: int | None = None

    def __init__(self, paths: Sequence[Path], settings: SourceSettings) -> None:
        self._paths = tuple(paths)
        self._settings = settings

    def records(self, start: int = 0) -> Iterator[str]:
        documents = read_documents(
            self._paths,
            text_field=self._settings.text_field,
            document_separator=self._settings.document_separator,
        )
        return islice(documents, start, None)


class Chain:
    """Several sources, one after the other."""

    def __init__(self, parts: Sequence[DocumentSource]) -> None:
        self._parts = tuple(parts)

    @property
    def size(self) -> int | None:
        sizes = [part.size for part in self._parts]
        return sum(size for size in sizes if size is not None) if None not in sizes else None

    def records(self, start: int = 0) -> Iterator[str]:
        for part in self._parts:
            if part.size is not None and start >= part.size:
                start -= part.size
                continue
            if part.size is not None:
                yield from part.records(start)
                start = 0
                continue
            for record in part.records():
                if start:
                    start -= 1
                else:
                    yield record


class Rows:
    """A data set whose rows can be read in any order (Arrow files, memory-mapped)."""

    def __init__(self, rows: Any, settings: SourceSettings, place: str) -> None:
        self._rows = rows.select_columns([settings.text_field])
        self._field = settings.text_field
        self._place = place
        self.size: int | None = len(rows)

    def records(self, start: int = 0) -> Iterator[str]:
        for begin in range(start, len(self._rows), _ROWS):
            with _told(self._place):
                values = self._rows[begin : begin + _ROWS][self._field]
            for row, value in enumerate(values, begin):
                yield checked_text(value, f"{self._place}, row {row}", self._field)


class Stream:
    """A data set that is read from its beginning to its end, without a copy on the disk."""

    size: int | None = None

    def __init__(self, rows: Any, settings: SourceSettings, place: str) -> None:
        self._rows = rows
        self._field = settings.text_field
        self._place = place

    def records(self, start: int = 0) -> Iterator[str]:
        with _told(self._place):
            rows = iter(self._rows.skip(start) if start else self._rows)
        number = start
        while True:
            with _told(self._place):
                row = next(rows, None)
            if row is None:
                return
            if self._field not in row:
                raise missing_field(f"{self._place}, row {number}", self._field, row)
            yield checked_text(row[self._field], f"{self._place}, row {number}", self._field)
            number += 1


def _data_set(place: str, settings: SourceSettings) -> DocumentSource:
    try:
        import datasets
    except ImportError as error:
        raise ConfigurationError(
            f"{place} needs datasets, which is not installed: pip install 'diloco[hf]'. The text was not read."
        ) from error
    name = HubName.parse(place)
    for key, said, given in (("split", name.split, settings.split), ("config", name.config, settings.config)):
        if said and given and said != given:
            raise ConfigurationError(
                f"{place} was given with {key} = {given!r}; one of the two would work. The text was not read."
            )
    split, config = settings.split or name.split, settings.config or name.config
    folder = Path(name.path).expanduser()
    with _told(place):
        if _is_saved(folder):
            rows = _saved(datasets.load_from_disk(str(folder)), split, place)
        else:
            rows = datasets.load_dataset(
                str(folder) if folder.exists() else name.path,
                config,
                split=split or "train",
                data_files=list(settings.data_files) or None,
                streaming=settings.streaming,
            )
    columns = rows.column_names
    if columns is not None and settings.text_field not in columns:
        raise missing_field(place, settings.text_field, columns)
    opened: Callable[..., DocumentSource] = Rows if isinstance(rows, datasets.Dataset) else Stream
    return opened(rows, settings, place)


def _is_saved(folder: Path) -> bool:
    """Whether ``save_to_disk`` left it."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _saved(loaded: Any, split: str | None, place: str) -> Any:
    """The split of what was saved, or the part of it that is asked for; of a data set that was saved alone, all."""
    import datasets

    alone = not hasattr(loaded, "keys")
    if alone and split is None:
        return loaded
    parts = {str(loaded.split or "train"): loaded} if alone else loaded
    try:
        read = datasets.ReadInstruction.from_spec(split or "train")
        found = read.to_absolute({name: len(rows) for name, rows in parts.items()})
    except (ValueError, AssertionError) as error:
        raise DataError(
            f"{place} has no split {split or 'train'!r}; {', '.join(map(repr, parts))} would work, or a part of it "
            f"such as {next(iter(parts))}[:10%]. The text was not read."
        ) from error
    return datasets.concatenate_datasets([parts[each.splitname].select(range(each.from_, each.to)) for each in found])


@contextmanager
def _told(place: str) -> Iterator[None]:
    """Whatever the library raises, as a sentence that says what would work."""
    try:
        yield
    except (DataError, ConfigurationError):
        raise
    except ConnectionError as error:
        raise DataError(
            f"{place} is not on this machine, and the Hugging Face hub cannot be reached: {error}. A way to it, or a "
            "local copy such as hf:FOLDER with what save_to_disk or a download left, would work (HF_HUB_OFFLINE=1 "
            "forbids the way). The text was not read."
        ) from error
    except Exception as error:  # of many kinds, and of no common one
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(
            f"{place} cannot be read by datasets: {reason} Another name, config (hf:NAME/CONFIG) or split (:SPLIT) "
            "might work. The text was not read."
        ) from error
