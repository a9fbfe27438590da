"""The data settings, and the sources of documents that they name. This module imports nothing heavy."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from tyro.conf import Suppress, arg

from diloco.errors import ConfigurationError, nearest

__all__ = ["HUB_PREFIX", "DataSettings", "SourceSettings"]

HUB_PREFIX = "hf:"  # marks a data set of the ``datasets`` library, or a tokenizer of the Hugging Face hub


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """One source of documents: what to read, and its share of the tokens."""

    name: str = ""  # the name in reports; "" if there is only one source
    data: tuple[str, ...] = ()  # files, folders and ``hf:`` names, read in this order; if empty, the standard library
    weight: float = 1.0  # its fraction of the tokens drawn is this divided by the sum of all weights
    text_field: str = "text"  # the field of records that holds the text
    document_separator: str | None = None  # splits a text file into documents; None: a file is one document
    config: str | None = None  # for ``hf:`` names: the configuration of the data set
    # for ``hf:`` names: a split, such as "train" or "train[:10%]"; None: the split in the name, else "train"
    split: str | None = None
    data_files: tuple[str, ...] = ()  # for ``hf:`` names: files of the data set, or patterns
    streaming: bool = False  # read a data set record by record, without a copy on disk
    skip_bad: bool = False  # leave out rows that can't be used

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ConfigurationError(f"weight must be a positive number, got {self.weight}")
        if self.document_separator == "":
            raise ConfigurationError("document_separator must not be empty")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Where the text comes from and how it becomes tokens."""

    paths: Annotated[tuple[Path, ...], arg(aliases=["--data"])] = ()
    """Text, .jsonl, .json or .parquet files, also compressed, folders of them, folders made by `diloco tokenize`, or
    hf:NAME[/CONFIG][:SPLIT]. Default: the standard library of the running Python."""
    sources: Mapping[str, Any] = field(default_factory=dict)
    """Several weighted sources, instead of paths: one table NAME = { data = "...", weight = 1.0 } for each source."""
    format: Annotated[str, arg(metavar="{text,chat,FILE.jinja}")] = "text"
    """text: plain documents. chat: conversations, in which the loss counts only the answers, from .jsonl, .json or
    .parquet records with the field messages, the fields prompt and completion, or the field text. A Jinja file: the
    same, with this chat template instead of the tokenizer's own."""
    packing: Literal["joined", "masked", "single"] | None = None
    """joined: documents follow each other in a sequence, and attention crosses their borders. masked: it does not.
    single: each sequence holds one conversation. Default: joined, or masked with format chat."""
    skip_bad: bool = False
    """Leave out rows that can't be used (null, malformed, not UTF-8), and print how many and which. Default: stop."""
    tokenizer: Annotated[str, arg(aliases=["--tokenizer"])] = "bytes"
    """bytes; bpe or bpe:SIZE, trained on the training text (4096 tokens); the path of a tokenizer.json; or hf:NAME."""
    heldout_fraction: float = 0.02
    """Fraction of the documents held out for evaluation, selected by a hash of their text."""
    streaming: bool = False
    """Read, tokenise and pack the documents during training instead of before it."""
    # the rest is for Python code alone: no TOML file and no flag sets it
    text_field: Suppress[str] = "text"  # the field of records that holds the text
    document_separator: Suppress[str | None] = None  # splits text files into documents; None: a file is one
    max_documents: Suppress[int | None] = None  # use as many documents, those with the lowest hashes
    bpe_documents: Suppress[int | None] = None  # train the BPE on the first ones; None: all, or 10,000 while streaming
    sharding: Suppress[Literal["shuffled", "contiguous"]] = "shuffled"  # contiguous: a slice per replica (non-iid)
    streaming_block: Suppress[int] = 64  # documents that one replica is assigned at a time
    streaming_heldout: Suppress[int] = 256  # documents to evaluate on, the first ones that the hash holds out
    prefetch_batches: Suppress[int | None] = None  # None: 4 if files are read during training, else 0

    @property
    def chat(self) -> bool:
        """Whether documents are conversations."""
        return self.format != "text"

    @property
    def chat_template(self) -> Path | None:
        """The Jinja file to use instead of the tokenizer's own template."""
        return Path(self.format) if self.format.endswith(".jinja") else None

    @property
    def document_masks(self) -> bool:
        """Whether attention between the documents of a sequence is masked."""
        return self.packing == "masked" and not self.chat

    @property
    def bpe_vocab_size(self) -> int | None:
        """The vocabulary of a BPE trained on the text, with the end-of-document token; None for other tokenizers."""
        kind, _, size = self.tokenizer.partition(":")
        return None if kind != "bpe" else int(size) if size.isdecimal() else -1 if size else 4096

    def __post_init__(self) -> None:
        if self.format not in ("text", "chat") and self.chat_template is None:
            hint = nearest(self.format, ("text", "chat"))
            raise ConfigurationError(f"data.format={self.format!r} is neither text, chat nor a .jinja file; {hint}")
        if self.bpe_vocab_size is not None and self.bpe_vocab_size < 257:  # 256 bytes and the end-of-document token
            raise ConfigurationError(f"data.tokenizer must be bpe or bpe:SIZE from 257, got {self.tokenizer!r}.")
        for name in ("bpe_documents", "max_documents", "streaming_block", "streaming_heldout"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigurationError(f"{name} must be at least 1, got {value}.")
        if self.streaming and (self.max_documents is not None or self.sharding != "shuffled"):
            raise ConfigurationError(
                "max_documents and sharding='contiguous' can't be combined with data.streaming, which never has all "
                "documents to select from."
            )
        self._check_chat()
        if not 0 < self.heldout_fraction < 1:
            raise ConfigurationError(f"data.heldout_fraction must be between 0 and 1, got {self.heldout_fraction}.")
        self.parsed_sources()

    def _check_chat(self) -> None:
        wrong = "joined" if self.chat else "single"
        if self.packing == wrong:
            raise ConfigurationError(
                f"data.packing={wrong!r} can't be used with data.format={self.format!r}. Use masked or "
                f"{'single' if self.chat else 'joined'}."
            )
        if not self.chat:
            return
        for name in ("sources", "streaming", "document_separator"):
            if getattr(self, name):
                raise ConfigurationError(
                    f"data.{name} can't be combined with data.format='chat', which reads all conversations of "
                    "data.paths before training. Leave it out."
                )
        if not self.paths or any(str(path).startswith(HUB_PREFIX) for path in self.paths):
            raise ConfigurationError(
                "data.format='chat' needs conversations in .jsonl, .json or .parquet files: --data FILE.jsonl. Save "
                "a data set of the datasets library with Dataset.to_parquet."
            )

    def parsed_sources(self) -> tuple[SourceSettings, ...]:
        """Return the sources that ``paths`` or ``sources`` name, validated.

        >>> tables = {"web": {"data": "web/", "weight": 2}, "code": {"data": ["a/", "b/"]}}
        >>> [(each.name, each.data, each.weight) for each in DataSettings(sources=tables).parsed_sources()]
        [('web', ('web/',), 2.0), ('code', ('a/', 'b/'), 1.0)]
        """
        common = SourceSettings(
            text_field=self.text_field,
            document_separator=self.document_separator,
            streaming=self.streaming,
            skip_bad=self.skip_bad,
        )
        if not self.sources:
            return (replace(common, data=tuple(map(str, self.paths))),)
        if self.paths:
            raise ConfigurationError("data.paths and data.sources were both given. List all data in one of them.")
        return tuple(_parse_source(name, table, common) for name, table in self.sources.items())

    def absolute(self) -> DataSettings:
        """Return these settings with absolute paths, so that they mean the same in another working directory."""
        tokenizer = self.tokenizer
        if tokenizer != "bytes" and self.bpe_vocab_size is None:
            place = _absolute(tokenizer)
            tokenizer = place if tokenizer.startswith(HUB_PREFIX) or Path(place).exists() else tokenizer
        paths = tuple(Path(_absolute(str(path))) for path in self.paths)
        form = self.format if self.chat_template is None else _absolute(self.format)
        sources = {name: _absolute_table(table) for name, table in self.sources.items()}
        return replace(self, paths=paths, sources=sources, tokenizer=tokenizer, format=form)


def _parse_source(name: str, table: Any, common: SourceSettings) -> SourceSettings:
    where = f"data.sources.{name}"
    if not isinstance(table, Mapping) or not table.get("data"):
        raise ConfigurationError(
            f'{where} must be a table such as {{ data = "folder/", weight = 0.5 }}, got {table!r}.'
        )
    known = {each.name for each in fields(SourceSettings)} - {"name"}
    for key in table.keys() - known:
        raise ConfigurationError(f"{where} has an unknown key {key!r}; {nearest(key, known)}")
    values = {key: [value] if key in _PLACES and isinstance(value, str) else value for key, value in table.items()}
    try:
        source = msgspec.convert(asdict(common) | values | {"name": name}, SourceSettings)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{where} can't be used: {error}.") from error
    of_hub = [key for key in ("config", "split", "data_files") if key in values]
    if of_hub and not any(place.startswith(HUB_PREFIX) for place in source.data):
        raise ConfigurationError(f"{where} sets {', '.join(of_hub)}, which only hf: names can have.")
    return source


_PLACES = ("data", "data_files")  # a text or a list of texts


def _absolute(text: str) -> str:
    """Return a file, folder or ``hf:`` name that means the same in another working directory."""
    prefix, place, split = "", text, ""
    if text.startswith(HUB_PREFIX):
        place, colon, rest = text.removeprefix(HUB_PREFIX).partition(":")
        prefix, split = HUB_PREFIX, colon + rest
        if not place or not Path(place).expanduser().exists():
            return text
    return f"{prefix}{os.path.abspath(os.path.expanduser(place))}{split}"


def _absolute_pattern(text: str) -> str:
    """Make a pattern of local files absolute; leave a pattern with a protocol, or of files on the hub, unchanged."""
    folder = text.split("*", 1)[0].rpartition("/")[0]
    local = "://" not in text and (Path(text).exists() or (bool(folder) and Path(folder).is_dir()))
    return os.path.abspath(text) if local else text


def _absolute_table(table: Any) -> Any:
    """Return a table of ``data.sources`` with absolute paths."""
    places = {}
    for key, absolute in zip(_PLACES, (_absolute, _absolute_pattern), strict=True):
        value = table.get(key)
        if value:
            places[key] = absolute(value) if isinstance(value, str) else tuple(map(absolute, value))
    return {**table, **places}
