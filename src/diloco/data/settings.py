"""What can be set about the data. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from diloco.data.source_settings import SourceSettings, absolute_place, absolute_sources, parse_sources
from diloco.errors import ConfigurationError

__all__ = ["DataSettings"]


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
