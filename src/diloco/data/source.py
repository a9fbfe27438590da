"""A source of documents: files and data sets of the ``datasets`` library, one after the other, from any place on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import xxhash

from diloco.data.files import File, Row, RowError, StandardLibrary, as_data_error, checked_text, files_of, usable
from diloco.data.settings import HUB_PREFIX, SourceSettings
from diloco.errors import ConfigurationError, DataError, NoDataError, from_extra, nearest
from diloco.waiting import fetching

__all__ = ["BEGINNING", "DataSet", "Place", "Source", "is_heldout", "split_documents"]

Place: TypeAlias = Mapping[str, Any]  # a part of a source, the next row of it, and the state of its data set
BEGINNING: Place = MappingProxyType({"part": 0, "row": 0, "state": None})


class Source:
    """The records of a source: its files and data sets one after the other, in the same order at every reading.

    What there is to read is listed here, but nothing is read yet. A record without text is an empty string and no
    document.

    Raises:
        DataError: something does not exist, or can't be read.
        ConfigurationError: a package is not installed.
    """

    def __init__(self, settings: SourceSettings) -> None:
        self.settings = settings
        self.parts: list[File | StandardLibrary | DataSet] = [] if settings.data else [StandardLibrary()]
        for place in settings.data:
            self.parts += [_data_set(place, settings)] if place.startswith(HUB_PREFIX) else files_of(place)

    def documents(self) -> Iterator[str]:
        """Yield every document; raise `DataError` if one can't be read, or if there is none."""
        empty = True
        for block, _ in self.blocks(100):
            if not block:
                break
            empty = empty and not any(block)
            yield from filter(None, block)
        if empty:
            raise NoDataError(f"{', '.join(self.settings.data) or 'the standard library'} holds no text.")

    def blocks(self, size: int, place: Place = BEGINNING) -> Iterator[tuple[list[str], Place]]:
        """Yield the next records from a place on, fewer at the end of a part, and the place after them.

        None at the end, after which they begin again. A place is JSON; it can be continued from in blocks of one size.
        """
        use, skip_bad = _text_of(self.settings.text_field), self.settings.skip_bad
        while True:
            while place["part"] < len(self.parts):
                rows, state = self._opened(place, size)
                texts = usable(rows, use, "", skip_bad=skip_bad)
                while block := list(islice(texts, size)):
                    place = {**place, "row": place["row"] + len(block), "state": state()}
                    yield block, place
                place = {**BEGINNING, "part": place["part"] + 1}
            place = BEGINNING
            yield [], place

    def _opened(self, place: Place, size: int) -> tuple[Iterator[Row], Callable[[], Any]]:
        """Return the rows of a part from a place on, and what returns the state of its data set."""
        part = self.parts[place["part"]]
        if not isinstance(part, DataSet):
            return islice(part.rows(), place["row"], None), lambda: None
        rows = part.rows.shard(num_shards=1, index=0)  # the whole, with a state of its own
        if place["state"] is not None:
            rows.load_state_dict(place["state"])
        return part.records(rows, place["row"], size), rows.state_dict


@dataclass(frozen=True)
class DataSet:
    """A ``datasets.IterableDataset``."""

    name: str
    rows: Any

    def records(self, rows: Any, first: int, size: int) -> Iterator[Row]:
        """Yield the records of ``rows``, from number ``first`` on. Its state is exact after each ``size``."""
        with _reading(self.name):
            batches = rows.iter(size)
            for batch in batches:
                for number, values in enumerate(zip(*batch.values(), strict=True), start=first):
                    yield f"{self.name}, row {number}", dict(zip(batch, values, strict=True))
                    first += 1


def _data_set(place: str, settings: SourceSettings) -> DataSet:
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
                raise DataError(f"{place} has no field {column!r} (data.sources); {nearest(column, known)}")
            rows = rows.select_columns([column])
        return DataSet(place, rows.to_iterable_dataset() if isinstance(rows, datasets.Dataset) else rows)


def _reading(place: str) -> Any:
    advice = "Check the name, config (hf:NAME/CONFIG) and split (:SPLIT), and the connection to the hub"
    return as_data_error(place, f"{advice} (HF_HUB_OFFLINE=1 disables it).")


def _text_of(field: str) -> Callable[[str, Any], str]:
    """Return the function of `usable` that returns the text of a document, or of a record with this field."""

    def text(place: str, content: Any) -> str:
        if isinstance(content, str):
            return content
        if field not in content:
            raise RowError(f"{place} has no field {field!r} (data.sources); {nearest(field, content)}")
        return checked_text(content[field], place, field)

    return text


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
