"""Where the documents of each source come from, as the settings say it. No heavy imports here.

What can be set about the data. No torch here."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from diloco.errors import ConfigurationError, nearest

__all__ = [
    "HUB_PREFIX",
    "DataSettings",
    "HubName",
    "SourceSettings",
    "absolute_place",
    "absolute_sources",
    "parse_sources",
]

HUB_PREFIX = "hf:"
"""Begins what is read by the ``datasets`` library, or is a tokenizer of the Hugging Face hub."""

_OF_HUB = ("config", "split", "data_files")
_TEXTS = ("text_field", "document_separator", "config", "split", "data_files")


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """One source: what is read, and how much of it.

    Attributes:
        name: what it is called in reports; "" where it is the only one.
        data: files, folders and ``hf:`` names, one after the other; none: the standard library.
        weight: its fraction of the tokens drawn is this over the sum of all weights.
        text_field: the field of records that holds the text.
        document_separator: where a text file is cut into documents.
        config: of a data set of several, for ``hf:`` names.
        split: of a data set, such as "train" or "train[:10%]"; None: what follows the name, else "train".
        data_files: files of a data set, or patterns, for ``hf:`` names.
        streaming: read a data set record by record, without a copy of it on the disk.
    """

    name: str = ""
    data: tuple[str, ...] = ()
    weight: float = 1.0
    text_field: str = "text"
    document_separator: str | None = None
    config: str | None = None
    split: str | None = None
    data_files: tuple[str, ...] = ()
    streaming: bool = False


@dataclass(frozen=True)
class HubName:
    """What an ``hf:`` name means.

    Attributes:
        path: name on the hub, name of a loader of ``datasets`` (json, parquet, text, csv, arrow), or a local folder.
        config: of a data set of several, or None.
        split: or None.

    >>> HubName.parse("hf:allenai/c4/en:validation")
    HubName(path='allenai/c4', config='en', split='validation')
    >>> HubName.parse("hf:imdb:train[:10%]")
    HubName(path='imdb', config=None, split='train[:10%]')
    """

    path: str
    config: str | None
    split: str | None

    @classmethod
    def parse(cls, text: str) -> HubName:
        """From ``hf:NAME[/CONFIG][:SPLIT]``, where NAME is ORGANISATION/NAME, one word, or a path that exists.

        Raises:
            ConfigurationError: anything else.
        """
        place, _, split = text.removeprefix(HUB_PREFIX).partition(":")
        if place and Path(place).expanduser().exists():
            return cls(place, None, split or None)
        parts = place.split("/")
        if not all(parts) or len(parts) > 3 or parts[0] in (".", "..", "~"):
            raise ConfigurationError(
                f"{text!r} was given; hf:NAME[/CONFIG][:SPLIT] with the name of a data set on the hub, such as "
                "hf:allenai/c4/en:train, or with a folder that exists, would work. Nothing was started."
            )
        return cls("/".join(parts[:2]), parts[2] if len(parts) == 3 else None, split or None)


def parse_sources(
    paths: Sequence[Path],
    sources: Mapping[str, Any],
    *,
    text_field: str,
    document_separator: str | None,
    streaming: bool,
) -> tuple[SourceSettings, ...]:
    """The sources that ``data.paths`` or ``data.sources`` name.

    Raises:
        ConfigurationError: both were given, or a table is malformed.

    >>> tables = {"web": {"data": "web/", "weight": 2}, "code": {"data": ["a/", "b/"]}}
    >>> web, code = parse_sources((), tables, text_field="text", document_separator=None, streaming=False)
    >>> (web.data, web.weight), (code.data, code.weight)
    ((('web/',), 2.0), (('a/', 'b/'), 1.0))
    """
    common = SourceSettings(text_field=text_field, document_separator=document_separator, streaming=streaming)
    if not sources:
        return (dataclasses.replace(common, data=tuple(map(str, paths))),)
    if paths:
        raise ConfigurationError(
            f"data.paths={[str(path) for path in paths]} and data.sources were both given; all of it as data.sources, "
            "or data.paths alone, would work. Nothing was started."
        )
    return tuple(_parse(name, table, common) for name, table in sources.items())


def _parse(name: str, table: Any, common: SourceSettings) -> SourceSettings:
    where = f"data.sources.{name}"
    if not isinstance(table, Mapping):
        raise _wrong(where, table, 'a table such as { data = "folder/", weight = 0.5 }')
    known = {field.name for field in dataclasses.fields(SourceSettings)} - {"name"}
    values: dict[str, Any] = {"name": name}
    for key, value in table.items():
        if key not in known:
            raise ConfigurationError(f"{where} has the key {key!r}; {nearest(key, known)} Nothing was started.")
        values[key] = _checked(f"{where}.{key}", key, value)
    if not values.get("data"):
        raise _wrong(where, dict(table), 'data = "folder/", or a list of files, folders and hf: names,')
    of_hub = [key for key in _OF_HUB if key in values]
    if of_hub and not any(place.startswith(HUB_PREFIX) for place in values["data"]):
        raise ConfigurationError(
            f"{where} has {', '.join(of_hub)}, for what the datasets library reads, and its data are "
            f"{', '.join(values['data'])}; without, or with an hf: name, it would work. Nothing was started."
        )
    return dataclasses.replace(common, **values)


def _checked(where: str, key: str, value: Any) -> Any:
    if key in ("data", "data_files"):
        listed = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else ()
        if listed and all(isinstance(each, str) for each in listed):
            return listed
        raise _wrong(where, value, "text, or a list of it,")
    if key == "weight":
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max:
            return float(value)
        raise _wrong(where, value, "a positive number")
    if key == "streaming":
        if isinstance(value, bool):
            return value
        raise _wrong(where, value, "true or false")
    if isinstance(value, str) and key in _TEXTS and value:
        return value
    raise _wrong(where, value, "text")


def _wrong(where: str, value: Any, works: str) -> ConfigurationError:
    return ConfigurationError(f"{where} = {value!r} was given; {works} would work. Nothing was started.")


def absolute_place(text: str) -> str:
    """A file, folder or ``hf:`` name that means the same from another working directory."""
    if not text.startswith(HUB_PREFIX):
        return os.path.abspath(os.path.expanduser(text))
    place, colon, split = text.removeprefix(HUB_PREFIX).partition(":")
    if place and Path(place).expanduser().exists():
        return f"{HUB_PREFIX}{os.path.abspath(os.path.expanduser(place))}{colon}{split}"
    return text


def absolute_sources(sources: Mapping[str, Any]) -> dict[str, Any]:
    """``data.sources`` with every place absolute; malformed tables as they are, to be refused later."""
    result: dict[str, Any] = {}
    for name, table in sources.items():
        result[name] = table
        if not isinstance(table, Mapping):
            continue
        places = {}
        for key in ("data", "data_files"):
            value = table.get(key)
            if isinstance(value, str):
                places[key] = _absolute_file(value) if key == "data_files" else absolute_place(value)
            elif isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
                make = _absolute_file if key == "data_files" else absolute_place
                places[key] = tuple(map(make, value))  # type: ignore[assignment]  # text or a tuple of it
        result[name] = {**table, **places}
    return result


def _absolute_file(text: str) -> str:
    """A pattern of local files, absolute; one with a protocol, or of a data set on the hub, as it is."""
    folder = text.split("*", 1)[0].rpartition("/")[0]
    local = "://" not in text and (Path(text).exists() or (bool(folder) and Path(folder).is_dir()))
    return os.path.abspath(text) if local else text


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Where the text comes from and how it becomes tokens."""

    paths: Annotated[tuple[Path, ...], arg(aliases=["--data"])] = ()
    """Files or folders of text, .jsonl or .parquet; folders that `diloco tokenize` made; hf:NAME[/CONFIG][:SPLIT] for
    what the datasets library reads. Empty: the running Python's own standard library."""
    sources: Mapping[str, Any] = field(default_factory=dict)
    """Several sources by weight, in place of paths: a table NAME = { data = "...", weight = 1.0 } for each."""
    text_field: str = "text"
    """The field of .jsonl and .parquet records that holds the text."""
    document_separator: str | None = None
    """Where a text file is cut into documents, such as a blank line ("\\n\\n"). Default: a file is one document."""
    tokenizer: str = "bytes"
    """"bytes"; "bpe" to train a byte-level BPE on the training text; the path of a tokenizer.json; or hf:NAME."""
    bpe_vocab_size: int = 4096
    """Vocabulary of a trained BPE, the end-of-document token included."""
    bpe_documents: int | None = None
    """Train the BPE on so many training documents, the first ones. Default: all."""
    heldout_fraction: float = 0.02
    """Fraction of the documents kept for evaluation, chosen by a hash of their text."""
    sharding: Literal["shuffled", "contiguous"] = "shuffled"
    """shuffled: every replica draws from all documents (iid); contiguous: each has a stretch of its own (non-iid)."""
    max_documents: int | None = None
    """Use no more than this many documents, always the same ones, chosen by a hash of their text."""
    streaming: bool = False
    """Read, tokenise and pack documents while training, instead of all of them before it."""
    streaming_block: int = 64
    """streaming: documents that go to one replica at a time, and are shuffled among themselves."""
    streaming_heldout: int = 256
    """streaming: documents to evaluate on, the first ones that the hash holds out."""
    prefetch_batches: int | None = None
    """Batches made ahead of the training, in a thread. Default: 4 where files are read meanwhile, else 0."""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("bpe_documents", self.bpe_documents, 1),
            ("streaming_block", self.streaming_block, 1),
            ("streaming_heldout", self.streaming_heldout, 1),
            ("prefetch_batches", self.prefetch_batches, 0),
        ):
            if value is not None and value < least:
                raise ConfigurationError(
                    f"data.{name}={value} was given; at least {least} is needed. Nothing was started."
                )
        if self.streaming and self.max_documents is not None:
            raise ConfigurationError(
                f"data.max_documents={self.max_documents} was given with data.streaming, where nobody has seen all "
                "documents to choose from; one of the two would work. Nothing was started."
            )
        if self.streaming and self.sharding != "shuffled":
            raise ConfigurationError(
                f"data.sharding={self.sharding!r} was given with data.streaming, where replicas take blocks of "
                "documents in turns; one of the two would work. Nothing was started."
            )
        if self.document_separator == "":
            raise ConfigurationError(
                'data.document_separator="" was given; some text, or none at all, is needed. Nothing was started.'
            )
        if self.max_documents is not None and self.max_documents < 2:
            raise ConfigurationError(
                f"data.max_documents={self.max_documents} was given; at least 2 are needed, one to train on and one "
                "to hold out. Nothing was started."
            )
        if not 0 < self.heldout_fraction < 1:
            raise ConfigurationError(
                f"data.heldout_fraction={self.heldout_fraction} was given; "
                "something between 0 and 1 is needed. Nothing was started."
            )
        if self.bpe_vocab_size < 257:
            raise ConfigurationError(
                f"data.bpe_vocab_size={self.bpe_vocab_size} was given; 256 bytes and the end-of-document token "
                "need at least 257. Nothing was started."
            )
        self.parsed_sources()

    def parsed_sources(self) -> tuple[SourceSettings, ...]:
        """What is read, checked."""
        return parse_sources(
            self.paths,
            self.sources,
            text_field=self.text_field,
            document_separator=self.document_separator,
            streaming=self.streaming,
        )

    def absolute(self) -> DataSettings:
        """The same from another working directory."""
        tokenizer = self.tokenizer
        if tokenizer not in ("bytes", "bpe"):
            place = absolute_place(tokenizer)
            tokenizer = place if tokenizer.startswith("hf:") or Path(place).exists() else tokenizer
        paths = tuple(Path(absolute_place(str(path))) for path in self.paths)
        return replace(self, paths=paths, sources=absolute_sources(self.sources), tokenizer=tokenizer)
