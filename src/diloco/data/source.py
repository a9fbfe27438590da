"""A source of documents: files and data sets of the ``datasets`` library, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from diloco.data.files import File, Row, RowError, StandardLibrary, as_data_error, checked_text, files_of, usable
from diloco.data.settings import HUB_PREFIX, DataSettings
from diloco.errors import ConfigurationError, DataError, NoDataError, from_extra, nearest
from diloco.waiting import fetching

__all__ = ["Source", "is_heldout", "split_documents"]


class Source:
    """The records of ``data.paths``: files and data sets one after the other, in the same order at every reading.

    What there is to read is listed here, but nothing is read yet. A record without text is an empty string and no
    document.

    Raises:
        DataError: something does not exist, or can't be read.
        ConfigurationError: a package is not installed.
    """

    def __init__(self, settings: DataSettings) -> None:
        self.settings = settings
        self.parts: list[File | StandardLibrary | DataSet] = [] if settings.paths else [StandardLibrary()]
        for place in settings.paths:
            self.parts += [_data_set(place, settings)] if place.startswith(HUB_PREFIX) else files_of(place)
        sets = sum(isinstance(part, DataSet) for part in self.parts)
        if settings.streaming and sets and len(self.parts) > 1:
            raise ConfigurationError(
                f"data.streaming reads files or one data set, got {', '.join(settings.paths)}. Give one of them, or "
                "make a folder of tokens of each (diloco tokenize)."
            )

    def documents(self) -> Iterator[str]:
        """Yield every document; raise `DataError` if one can't be read, or if there is none."""
        empty = True
        for text in filter(None, self.texts(row for part in self.parts for row in part.rows())):
            empty = False
            yield text
        if empty:
            raise NoDataError(f"{', '.join(self.settings.paths) or 'the standard library'} holds no text.")

    def texts(self, rows: Iterable[Row]) -> Iterator[str]:
        """Yield the text of each row, "" for one without text and for one that is left out."""
        return usable(rows, self._text, "", skip_bad=self.settings.skip_bad)

    def stream(self) -> Any:
        """Return a ``datasets.IterableDataset`` of the records, which can be split and continued from a state."""
        with from_extra("hf", "Streaming needs datasets"):
            from datasets import IterableDataset
        first = self.parts[0]
        if isinstance(first, DataSet):
            return first.all_rows
        return IterableDataset.from_generator(_records, gen_kwargs={"source": self, "parts": self.parts})

    def _text(self, place: str, content: Any) -> str:
        field = self.settings.text_field
        if isinstance(content, str):
            return content
        if field not in content:
            raise RowError(f"{place} has no field {field!r} (data.text_field); {nearest(field, content)}")
        return checked_text(content[field], place, field)


def _records(source: Source, parts: Sequence[File | StandardLibrary]) -> Iterator[dict[str, str]]:
    for text in source.texts(row for part in parts for row in part.rows()):
        yield {source.settings.text_field: text}


@dataclass(frozen=True)
class DataSet:
    """A data set of the ``datasets`` library."""

    name: str
    all_rows: Any  # a ``Dataset``, or with ``data.streaming`` an ``IterableDataset``

    def rows(self) -> Iterator[Row]:
        """Yield every record."""
        with _reading(self.name):
            yield from ((f"{self.name}, row {number}", row) for number, row in enumerate(self.all_rows))


def _data_set(place: str, settings: DataSettings) -> DataSet:
    """Open the text of ``hf:NAME[/CONFIG][:SPLIT]``, of the hub or a local folder; nothing is read yet."""
    path, _, split = place.removeprefix(HUB_PREFIX).partition(":")
    folder, config = Path(path).expanduser(), None
    if not path or not folder.exists():
        parts = path.split("/")
        if not all(parts) or len(parts) > 3 or parts[0] in (".", "..", "~"):
            raise ConfigurationError(
                f"{place!r} is neither the name of a data set, hf:NAME[/CONFIG][:SPLIT] as in hf:allenai/c4/en:train, "
                "nor an existing folder."
            )
        path, config = "/".join(parts[:2]), parts[2] if len(parts) == 3 else None
    with from_extra("hf", f"{place} needs datasets"):
        import datasets
    with _reading(place):
        if (folder / "state.json").is_file():
            rows = datasets.load_from_disk(str(folder))
        else:
            with fetching(path) if "/" in path else nullcontext():
                rows = datasets.load_dataset(
                    str(folder) if folder.exists() else path,
                    config,
                    split=split or "train",
                    streaming=settings.streaming,
                    trust_remote_code=False,
                )
        known, column = rows.column_names, settings.text_field
        if known is not None:  # unknown for some streams
            if column not in known:
                raise DataError(f"{place} has no field {column!r} (data.text_field); {nearest(column, known)}")
            rows = rows.select_columns([column])
        streams = settings.streaming and isinstance(rows, datasets.Dataset)
        return DataSet(place, rows.to_iterable_dataset() if streams else rows)


def _reading(place: str) -> Any:
    advice = "Check the name, config (hf:NAME/CONFIG) and split (:SPLIT), and the connection to the hub"
    return as_data_error(place, f"{advice} (HF_HUB_OFFLINE=1 disables it).")


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
        advice = "Give more files, or a .jsonl with one document per line"
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
