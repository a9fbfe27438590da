"""What can be set about the data. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from diloco.errors import ConfigurationError

__all__ = ["DataSettings"]


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Where the text comes from and how it becomes tokens."""

    paths: Annotated[tuple[Path, ...], arg(aliases=["--data"])] = ()
    """Files or folders of text, .jsonl or .parquet. Empty: the running Python's own standard library."""
    text_field: str = "text"
    """The field of .jsonl and .parquet records that holds the text."""
    document_separator: str | None = None
    """Where a text file is cut into documents, such as a blank line ("\\n\\n"). Default: a file is one document."""
    tokenizer: str = "bytes"
    """"bytes"; "bpe" to train a byte-level BPE on the training text; or the path of a tokenizer.json."""
    bpe_vocab_size: int = 4096
    """Vocabulary of a trained BPE, the end-of-document token included."""
    heldout_fraction: float = 0.02
    """Fraction of the documents kept for evaluation, chosen by a hash of their text."""
    sharding: Literal["shuffled", "contiguous"] = "shuffled"
    """shuffled: every replica draws from all documents (iid); contiguous: each has a stretch of its own (non-iid)."""
    max_documents: int | None = None
    """Use no more than this many documents, always the same ones, chosen by a hash of their text."""

    def __post_init__(self) -> None:
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
