"""What can be set about the data, and where the documents of each source come from. No heavy imports here."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from diloco.errors import ConfigurationError, nearest

__all__ = ["HUB_PREFIX", "DataSettings", "SourceSettings"]

HUB_PREFIX = "hf:"  # begins what is read by the ``datasets`` library, or is a tokenizer of the Hugging Face hub

_OF_HUB = ("config", "split", "data_files")


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """One source: what is read, and how much of it."""

    name: str = ""  # what it is called in reports; "" where it is the only one
    data: tuple[str, ...] = ()  # files, folders and ``hf:`` names, one after the other; none: the standard library
    weight: float = 1.0  # its fraction of the tokens drawn is this over the sum of all weights
    text_field: str = "text"  # the field of records that holds the text
    document_separator: str | None = None  # where a text file is cut into documents
    config: str | None = None  # of a data set of several, for ``hf:`` names
    # of a data set, such as "train" or "train[:10%]"; None: what follows the name, else "train"
    split: str | None = None
    data_files: tuple[str, ...] = ()  # files of a data set, or patterns, for ``hf:`` names
    streaming: bool = False  # read a data set record by record, without a copy of it on the disk


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Where the text comes from and how it becomes tokens."""

    paths: Annotated[tuple[Path, ...], arg(aliases=["--data"])] = ()
    """Files or folders of text, .jsonl or .parquet; folders that `diloco tokenize` made; hf:NAME[/CONFIG][:SPLIT] for
    what the datasets library reads. Empty: the running Python's own standard library."""
    sources: Mapping[str, Any] = field(default_factory=dict)
    """Several sources by weight, in place of paths: a table NAME = { data = "...", weight = 1.0 } for each."""
    format: Literal["text", "chat"] = "text"
    """text: documents; chat: conversations, of whose tokens only the answers count: .jsonl or .parquet records with
    messages, with prompt and completion, or with text."""
    chat_template: Path | None = None
    """chat: a Jinja file in place of the tokenizer's own template."""
    packing: bool = True
    """chat: several conversations in a sequence, which don't see each other; else one."""
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
            ("bpe_vocab_size", self.bpe_vocab_size, 257),  # 256 bytes and the end-of-document token
            ("max_documents", self.max_documents, 2),  # one to train on and one to hold out
            ("streaming_block", self.streaming_block, 1),
            ("streaming_heldout", self.streaming_heldout, 1),
            ("prefetch_batches", self.prefetch_batches, 0),
        ):
            if value is not None and value < least:
                raise ConfigurationError(f"data.{name} must be at least {least}, not {value}.")
        if self.streaming and self.max_documents is not None:
            raise ConfigurationError(
                f"data.max_documents={self.max_documents} does not go with data.streaming, where nobody sees all "
                "documents to choose from; leave out one of them."
            )
        if self.streaming and self.sharding != "shuffled":
            raise ConfigurationError(
                f"data.sharding={self.sharding!r} does not go with data.streaming, where replicas take turns at blocks "
                "of documents; leave out one of them."
            )
        self._check_chat()
        if self.document_separator == "":
            raise ConfigurationError("data.document_separator must not be empty.")
        if not 0 < self.heldout_fraction < 1:
            raise ConfigurationError(f"data.heldout_fraction must be between 0 and 1, not {self.heldout_fraction}.")
        self.parsed_sources()

    def _check_chat(self) -> None:
        if self.format == "text":
            if self.chat_template is not None:
                raise ConfigurationError(f"data.chat_template={self.chat_template} needs data.format='chat'.")
            return
        for name in ("sources", "streaming", "document_separator"):
            if getattr(self, name):
                raise ConfigurationError(
                    f"data.{name} does not go with data.format='chat', which reads all conversations of data.paths "
                    "before training. Leave it out."
                )
        if not self.paths:
            raise ConfigurationError("data.format='chat' needs conversations: --data FILE.jsonl.")
        if of_hub := [str(path) for path in self.paths if str(path).startswith(HUB_PREFIX)]:
            raise ConfigurationError(
                f"data.paths={of_hub} is of the datasets library, and data.format='chat' reads .jsonl and .parquet "
                "files. Save it with Dataset.to_json."
            )

    def parsed_sources(self) -> tuple[SourceSettings, ...]:
        """The sources that ``paths`` or ``sources`` name, checked.

        Raises:
            ConfigurationError: both were given, or a table is malformed.

        >>> tables = {"web": {"data": "web/", "weight": 2}, "code": {"data": ["a/", "b/"]}}
        >>> [(each.name, each.data, each.weight) for each in DataSettings(sources=tables).parsed_sources()]
        [('web', ('web/',), 2.0), ('code', ('a/', 'b/'), 1.0)]
        """
        common = SourceSettings(
            text_field=self.text_field, document_separator=self.document_separator, streaming=self.streaming
        )
        if not self.sources:
            return (replace(common, data=tuple(map(str, self.paths))),)
        if self.paths:
            raise ConfigurationError(
                f"data.paths={[str(path) for path in self.paths]} and data.sources were both given; name everything in "
                "one of them."
            )
        return tuple(_parse_source(name, table, common) for name, table in self.sources.items())

    def absolute(self) -> DataSettings:
        """The same from another working directory."""
        tokenizer = self.tokenizer
        if tokenizer not in ("bytes", "bpe"):
            place = _absolute_place(tokenizer)
            tokenizer = place if tokenizer.startswith(HUB_PREFIX) or Path(place).exists() else tokenizer
        paths = tuple(Path(_absolute_place(str(path))) for path in self.paths)
        template = None if self.chat_template is None else Path(_absolute_place(str(self.chat_template)))
        sources = {name: _absolute_table(table) for name, table in self.sources.items()}
        return replace(self, paths=paths, sources=sources, tokenizer=tokenizer, chat_template=template)


def _parse_source(name: str, table: Any, common: SourceSettings) -> SourceSettings:
    where = f"data.sources.{name}"
    if not isinstance(table, Mapping):
        raise ConfigurationError(
            f'{where} must be a table such as {{ data = "folder/", weight = 0.5 }}, not {table!r}.'
        )
    known = {each.name for each in fields(SourceSettings)} - {"name"}
    for key in table:
        if key not in known:
            raise ConfigurationError(f"{where} has the key {key!r}; {nearest(key, known)}")
    values = {key: _checked(where, key, value) for key, value in table.items()}
    if not values.get("data"):
        raise ConfigurationError(f'{where} needs data = "folder/", or a list of files, folders and hf: names.')
    of_hub = [key for key in _OF_HUB if key in values]
    if of_hub and not any(place.startswith(HUB_PREFIX) for place in values["data"]):
        raise ConfigurationError(
            f"{where} has {', '.join(of_hub)}, which only hf: names can have, and its data are "
            f"{', '.join(values['data'])}."
        )
    return replace(common, name=name, **values)


def _checked(where: str, key: str, value: Any) -> Any:
    """The value of a key, of the type that `SourceSettings` has for it."""
    match key:
        case "data" | "data_files":
            listed = (value,) if isinstance(value, str) else value
            if _is_texts(listed):
                return tuple(listed)
            needed = "text, or a list of texts"
        case "weight":
            if type(value) in (int, float) and 0 < value <= sys.float_info.max:
                return float(value)
            needed = "a positive number"
        case "streaming":
            if isinstance(value, bool):
                return value
            needed = "true or false"
        case _:
            if isinstance(value, str) and value:
                return value
            needed = "text, and not empty"
    raise ConfigurationError(f"{where}.{key} must be {needed}, not {value!r}.")


def _is_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(each, str) for each in value)


def _absolute_place(text: str) -> str:
    """A file, folder or ``hf:`` name that means the same from another working directory."""
    if not text.startswith(HUB_PREFIX):
        return os.path.abspath(os.path.expanduser(text))
    place, colon, split = text.removeprefix(HUB_PREFIX).partition(":")
    if place and Path(place).expanduser().exists():
        return f"{HUB_PREFIX}{os.path.abspath(os.path.expanduser(place))}{colon}{split}"
    return text


def _absolute_file(text: str) -> str:
    """A pattern of local files, absolute; one with a protocol, or of a data set on the hub, as it is."""
    folder = text.split("*", 1)[0].rpartition("/")[0]
    local = "://" not in text and (Path(text).exists() or (bool(folder) and Path(folder).is_dir()))
    return os.path.abspath(text) if local else text


def _absolute_table(table: Any) -> Any:
    """A table of ``data.sources`` with absolute places; what is malformed stays, to be refused later."""
    if not isinstance(table, Mapping):
        return table
    places: dict[str, Any] = {}
    for key, absolute in (("data", _absolute_place), ("data_files", _absolute_file)):
        value: Any = table.get(key)
        if isinstance(value, str):
            places[key] = absolute(value)
        elif _is_texts(value):
            places[key] = tuple(map(absolute, value))
    return {**table, **places}
