"""The data settings. This module imports nothing heavy."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta
from tyro.conf import arg

from diloco.algorithm import check_ranges
from diloco.errors import ConfigurationError, nearest
from diloco.private_files import check_url
from diloco.traits import Trait

TOKENIZER_NAME = "tokenizer.json"
MAX_TOKENIZER_BYTES = 1 << 28
"""Of each file of a tokenizer. Those of a million tokens have 70 MB."""
HUB_PREFIX = "hf:"  # marks a data set of the ``datasets`` library, or a tokenizer of the Hugging Face hub


_TEMPLATES = Path(__file__).with_name("templates")
TEMPLATES = tuple(sorted(path.stem for path in _TEMPLATES.glob("*.jinja")))
"""The chat templates that come with the package."""


def template_file(format: str) -> Path | None:
    """Return the chat template that a format of conversations names; None: that of the tokenizer.

    Raises:
        ConfigurationError: there is no such format.
    """
    if format == "chat":
        return None
    if format in TEMPLATES:
        return _TEMPLATES / f"{format}.jinja"
    if format.endswith(".jinja"):
        return Path(format).expanduser()
    names = "chat", *TEMPLATES
    raise ConfigurationError(
        f"data.format={format!r} is none of text, {', '.join(names)}, nor a .jinja file; "
        f"{nearest(format, ('text', *names))}"
    )


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Where the text comes from and how it becomes tokens."""

    paths: Annotated[tuple[str, ...], arg(aliases=["--data"], metavar="PATH..."), Trait.CHANGEABLE] = ()
    """Text, .jsonl, .json or .parquet files, also compressed, their folders, patterns or URLs (s3://, ...), folders
    made by `diloco tokenize`, or hf:NAME[/CONFIG][:SPLIT]. Default: Python's standard library."""
    text_field: Annotated[str, Trait.NO_PLACE] = "text"
    """Field of records that holds the text."""
    format: Annotated[str, arg(metavar=f"{{text,chat,{','.join(TEMPLATES)},FILE.jinja}}")] = "text"
    """text: plain documents. chat: conversations, in which the loss counts only the answers: records with the field
    messages, or the fields prompt and completion. chatml, plain, or a Jinja file: the same, with this chat template
    instead of the tokenizer's own; plain works with every tokenizer."""
    packing: Literal["joined", "masked", "single"] | None = None
    """joined: documents follow each other in a sequence, and attention crosses their borders. masked: it does not.
    single: each sequence holds one conversation. Default: joined, or masked with format chat."""
    tokenizer: Annotated[str, arg(aliases=["--tokenizer"])] = "bytes"
    """bytes; bpe or bpe:SIZE, trained on the training text (4096 tokens); the path of a tokenizer.json; or hf:NAME.
    Default: that of the weights that the run begins from, else bytes."""
    heldout_fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.02
    """Fraction of the documents held out for evaluation, selected by a hash of their text."""
    streaming: bool = False
    """Read, tokenise and pack the documents during training instead of before it."""
    local: bool = False
    """Each replica trains and evaluates on data of its own, of which nothing but counts leaves the machine."""

    @property
    def chat(self) -> bool:
        """Whether documents are conversations."""
        return self.format != "text"

    @property
    def names_file(self) -> bool:
        """Whether the format is a file of the user's."""
        return self.format.endswith(".jinja")

    @property
    def document_masks(self) -> bool:
        """Whether attention between the documents of a sequence is masked."""
        return self.packing == "masked" and not self.chat

    @property
    def bpe_vocab_size(self) -> int | None:
        """The vocabulary of a BPE trained on the text, with the end-of-document token; None for other tokenizers."""
        kind, _, size = self.tokenizer.partition(":")
        if kind != "bpe":
            return None
        if not size:
            return 4096
        return int(size) if size.isdecimal() else -1  # which is refused

    def __post_init__(self) -> None:
        if self.format != "text":
            template_file(self.format)
        if self.bpe_vocab_size is not None and self.bpe_vocab_size < 257:  # 256 bytes and the end-of-document token
            raise ConfigurationError(f"data.tokenizer must be bpe or bpe:SIZE from 257, got {self.tokenizer!r}.")
        check_ranges(self, "data.")
        works = ("masked", "single") if self.chat else ("joined", "masked")
        if self.packing not in (None, *works):
            raise ConfigurationError(
                f"data.packing={self.packing!r} can't be used with data.format={self.format!r}. "
                f"Use {' or '.join(works)}."
            )
        if self.chat and self.streaming:
            raise ConfigurationError(
                f"data.streaming can't be combined with data.format={self.format!r}, which reads all conversations "
                "before training. Leave it out."
            )
        if self.chat and not self.paths:
            raise ConfigurationError(f"data.format={self.format!r} needs conversations: --data FILE.jsonl or hf:NAME.")
        for place in self.paths:
            check_url(place)

    def absolute(self) -> DataSettings:
        """Return these settings with absolute paths, so that they mean the same in another working directory."""
        named = self.tokenizer == "bytes" or self.bpe_vocab_size is not None
        return replace(
            self,
            paths=tuple(map(_absolute, self.paths)),
            tokenizer=self.tokenizer if named else _absolute(self.tokenizer),
            format=_absolute(self.format) if self.names_file else self.format,
        )


def _absolute(place: str) -> str:
    """Return a path that means the same in another working directory; URLs, and names on the hub, stay."""
    prefix = HUB_PREFIX if place.startswith(HUB_PREFIX) else ""
    path, colon, split = place.removeprefix(prefix).partition(":") if prefix else (place, "", "")
    path = os.path.expanduser(path)
    if "://" in place or (prefix and not os.path.exists(path)):
        return place
    return f"{prefix}{os.path.abspath(path)}{colon}{split}"
