"""Read the documents of a source: files, folders, and data sets of the ``datasets`` library.

The documents of a source have one order, the same at every reading, so a position in it is a number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Protocol

from diloco.data.settings import HUB_PREFIX, DataSettings, SourceSettings
from diloco.data.text import Row, checked_text, missing_field, read_documents, usable
from diloco.errors import ConfigurationError, DataError, from_extra
from diloco.waiting import fetching

__all__ = ["DocumentSource", "open_source", "parse_hub_name", "read_source", "read_texts"]

_ROWS = 100  # rows of a data set read at a time


class DocumentSource(Protocol):
    """Records in a fixed order. A record without text is an empty string and not a document."""

    @property
    def size(self) -> int | None:
        """The number of records, or None if it is not known without reading them."""

    def records(self, start: int = 0) -> Iterator[str]:
        """Yield the records from number ``start`` on.

        Raises:
            DataError: the records cannot be read.
        """


def open_source(settings: SourceSettings) -> DocumentSource:
    """Open the source that ``settings`` describe. Data sets are opened, but nothing is read yet.

    Raises:
        DataError: a data set does not exist or lacks the field.
        ConfigurationError: ``datasets`` is not installed.
    """
    parts: list[DocumentSource] = []
    for of_hub, places in groupby(settings.data, lambda place: place.startswith(HUB_PREFIX)):
        if of_hub:
            parts += [_open_data_set(place, settings) for place in places]
        else:
            parts.append(_Files([Path(place) for place in places], settings))
    if not parts:
        return _Files((), settings)
    return parts[0] if len(parts) == 1 else _Chain(parts)


def read_source(settings: SourceSettings) -> Iterable[str]:
    """Return the documents of a source, an iterable."""
    return (record for record in open_source(settings).records() if record)


def read_texts(settings: DataSettings, paths: Sequence[Path]) -> Iterable[str]:
    """Return all documents of ``paths`` (files, folders and ``hf:`` names), read with the other ``settings``."""
    (source,) = dataclasses.replace(settings, paths=tuple(paths), sources={}, streaming=False).parsed_sources()
    return read_source(source)


class _Files:
    """Files and folders, read by `read_documents`; without paths, the standard library."""

    size: int | None = None

    def __init__(self, paths: Sequence[Path], settings: SourceSettings) -> None:
        self._paths = paths
        self._settings = settings

    def records(self, start: int = 0) -> Iterator[str]:
        documents = read_documents(
            self._paths,
            text_field=self._settings.text_field,
            document_separator=self._settings.document_separator,
            skip_bad=self._settings.skip_bad,
        )
        return islice(documents, start, None)


class _DataSet:
    """Rows of ``datasets``: a memory-mapped table, or a stream that is read sequentially."""

    def __init__(self, rows: Any, place: str, settings: SourceSettings) -> None:
        self.size: int | None = len(rows) if hasattr(rows, "__len__") else None
        self._rows = rows
        self._field = settings.text_field
        self._place = place
        self._skip_bad = settings.skip_bad

    def records(self, start: int = 0) -> Iterator[str]:
        def text_of(place: str, value: Any) -> str:
            return checked_text(value, place, self._field)

        return usable(self._values(start), text_of, "", skip_bad=self._skip_bad)

    def _values(self, start: int) -> Iterator[Row]:
        if self.size is not None and start >= self.size:
            return
        with _as_data_error(self._place):
            batches = (self._rows.skip(start) if start else self._rows).iter(_ROWS)
        row = start
        while True:
            with _as_data_error(self._place):
                batch = next(batches, None)
            if batch is None:
                return
            if self._field not in batch:
                raise missing_field(f"{self._place}, row {row}", self._field, batch)
            for value in batch[self._field]:
                yield f"{self._place}, row {row}", value
                row += 1


class _Chain:
    """Several sources, one after the other."""

    def __init__(self, parts: Sequence[DocumentSource]) -> None:
        self._parts = parts

    @property
    def size(self) -> int | None:
        sizes = [part.size for part in self._parts]
        return sum(size for size in sizes if size is not None) if None not in sizes else None

    def records(self, start: int = 0) -> Iterator[str]:
        for part in self._parts:
            if part.size is not None:
                yield from part.records(start)
                start = max(start - part.size, 0)
                continue
            for record in part.records():
                if start:
                    start -= 1
                else:
                    yield record


def parse_hub_name(text: str) -> tuple[str, str | None, str | None]:
    """Return path, config and split of ``hf:NAME[/CONFIG][:SPLIT]``; a missing config or split is None.

    NAME is ORGANISATION/NAME, one word such as a loader of ``datasets`` (json, parquet, text, csv, arrow), or an
    existing path.

    Raises:
        ConfigurationError: the text has another form.

    >>> parse_hub_name("hf:allenai/c4/en:validation"), parse_hub_name("hf:imdb:train[:10%]")
    (('allenai/c4', 'en', 'validation'), ('imdb', None, 'train[:10%]'))
    """
    place, _, split = text.removeprefix(HUB_PREFIX).partition(":")
    if place and Path(place).expanduser().exists():
        return place, None, split or None
    parts = place.split("/")
    if not all(parts) or len(parts) > 3 or parts[0] in (".", "..", "~"):
        raise ConfigurationError(
            f"{text!r} is neither the name of a data set, hf:NAME[/CONFIG][:SPLIT] as in hf:allenai/c4/en:train, nor "
            "an existing folder."
        )
    return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None, split or None


def _open_data_set(place: str, settings: SourceSettings) -> DocumentSource:
    with from_extra("hf", f"{place} needs datasets"):
        import datasets
    path, config, split = parse_hub_name(place)
    for key, named, given in (("split", split, settings.split), ("config", config, settings.config)):
        if named and given and named != given:
            raise ConfigurationError(f"{place} names another {key} than {key} = {given!r}. Give only one of them.")
    split, config = settings.split or split, settings.config or config
    folder = Path(path).expanduser()
    if path == "pandas":
        raise ConfigurationError(f"{place} reads pickles, which could run any code. Convert them to Parquet.")
    with _as_data_error(place):
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():  # written by save_to_disk
            rows = _select_split(datasets.load_from_disk(str(folder)), split, place)
        else:
            with fetching(path, "datasets") if "/" in path else nullcontext():  # otherwise a loader of local files
                rows = datasets.load_dataset(
                    str(folder) if folder.exists() else path,
                    config,
                    split=split or "train",
                    data_files=list(settings.data_files) or None,
                    streaming=settings.streaming,
                    trust_remote_code=False,
                )
    columns = rows.column_names
    if columns is not None and settings.text_field not in columns:
        raise missing_field(place, settings.text_field, columns)
    if isinstance(rows, datasets.Dataset):
        rows = rows.select_columns([settings.text_field])
    return _DataSet(rows, place, settings)


def _select_split(loaded: Any, split: str | None, place: str) -> Any:
    """Return the split, or the part of it, of what ``save_to_disk`` wrote; the whole of a data set without splits."""
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
            f"{place} has no split {split or 'train'!r}. It has {', '.join(map(repr, parts))}, and parts of them such "
            f"as {next(iter(parts))}[:10%]."
        ) from error
    return datasets.concatenate_datasets([parts[each.splitname].select(range(each.from_, each.to)) for each in found])


@contextmanager
def _as_data_error(place: str) -> Iterator[None]:
    """Turn any error of the library into a `DataError` that says what to do."""
    try:
        yield
    except (DataError, ConfigurationError):
        raise
    except ConnectionError as error:
        raise DataError(
            f"{place} is not on this machine, and the Hugging Face hub can't be reached: {error}. Check the connection "
            "(HF_HUB_OFFLINE=1 disables it), or give a local copy as hf:FOLDER, written by save_to_disk or downloaded."
        ) from error
    except Exception as error:  # many types without a common base
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(
            f"{place} cannot be read by datasets: {reason} Check the name, config (hf:NAME/CONFIG) and split (:SPLIT)."
        ) from error
