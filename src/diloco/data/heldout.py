"""Which documents are trained on and which are held out: a function of their text."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import xxhash

from diloco.data.packed import PackedTokens, TokenArray, Tokens
from diloco.data.settings import DataSettings, SourceSettings
from diloco.data.sources import DocumentSource, open_source, read_source
from diloco.data.token_folder import token_folders
from diloco.data.tokenizer import Tokenizer
from diloco.errors import DataError

__all__ = [
    "first_heldout",
    "heldout_tokens",
    "is_heldout",
    "read_texts",
    "sides",
    "some_documents",
    "split_documents",
]


class _Document(NamedTuple):
    text: str
    heldout_key: float
    """In [0, 1), from one half of the hash: held out when below the fraction."""
    sample_key: int
    """From the other half, so that a sample is as likely to be held out as the rest."""


def split_documents(
    texts: Iterable[str], heldout_fraction: float, max_documents: int | None = None
) -> tuple[list[str], list[str]]:
    """Training and held-out documents, each in the order given.

    Which side a document falls on is a function of its text and the fraction alone: more documents move none to the
    other side, and copies of one stand together. ``max_documents`` keeps those whose texts hash lowest, so that a
    small sample is spread over all of them.

    Raises:
        DataError: one of the sides would be empty; the message says which fractions would work.

    >>> split_documents(["one", "four", "five", "eight"], heldout_fraction=0.3)
    (['four', 'five', 'eight'], ['one'])
    """
    train: list[str] = []
    heldout: list[str] = []
    for text, held_out in sides(texts, heldout_fraction, max_documents):
        (heldout if held_out else train).append(text)
    return train, heldout


def sides(
    texts: Iterable[str], heldout_fraction: float, max_documents: int | None = None
) -> Iterator[tuple[str, bool]]:
    """As `split_documents`, one document after the other, with whether it is held out.

    Only ``max_documents`` are held in memory at a time, where they are given, else none.

    Raises:
        DataError: as `split_documents`, after the last document.
    """
    documents: Iterable[tuple[int, _Document]] = enumerate(map(_hashed, texts))
    if max_documents is not None:
        kept = heapq.nsmallest(max_documents, documents, key=lambda pair: (pair[1].sample_key, pair[0]))
        documents = sorted(kept, key=lambda pair: pair[0])
    train, heldout = 0, 0
    lowest, highest = 1.0, 0.0
    for _, document in documents:
        held_out = document.heldout_key < heldout_fraction
        heldout += held_out
        train += not held_out
        lowest = min(lowest, document.heldout_key)
        highest = max(highest, document.heldout_key)
        yield document.text, held_out
    if train and heldout:
        return
    if lowest >= highest:
        raise DataError(
            f"{train + heldout} documents with no two different ones were given; one to train on and one to "
            "hold out are needed. More files, a .jsonl with one document a line, or data.document_separator to cut "
            "long files into documents would work. The corpus was not built."
        )
    raise DataError(
        f"data.heldout_fraction={heldout_fraction:g} holds out {heldout} of {train + heldout} documents "
        f"and leaves {train} to train on; at least one of each is needed. A fraction between {lowest:.6g} and "
        f"{highest:.6g}, or more documents, would work. The corpus was not built."
    )


def is_heldout(text: str, heldout_fraction: float) -> bool:
    """The side that `split_documents` puts a document on."""
    return _hashed(text).heldout_key < heldout_fraction


def _hashed(text: str) -> _Document:
    number = xxhash.xxh3_128_intdigest(text.encode("utf-8"))
    # 53 bits are what a float holds exactly.
    return _Document(text, (number >> 75) / (1 << 53), number & ((1 << 64) - 1))


def heldout_tokens(settings: DataSettings, tokenizer: Tokenizer) -> Tokens:
    """The held-out tokens of the corpus of ``settings``, made by the tokenizer that a run has left.

    Raises:
        DataError, ConfigurationError: as `build_corpus` and `open_stream`.
    """
    sources = settings.parsed_sources()
    if settings.streaming:
        return tokenizer.encode_documents(first_heldout([open_source(source) for source in sources], settings))
    pieces = [piece for source in sources for piece in _of_source(source, settings, tokenizer)]
    return PackedTokens(pieces, vocab_size=tokenizer.vocab_size)


def first_heldout(sources: Sequence[DocumentSource], settings: DataSettings) -> list[str]:
    """The first documents that are held out, as many of each source.

    Raises:
        DataError: there are none.
    """
    share = -(-settings.streaming_heldout // len(sources))
    heldout = [text for source in sources for text in islice(some_documents(source, settings, heldout=True), share)]
    if not heldout:
        raise DataError(
            f"data.heldout_fraction={settings.heldout_fraction:g} holds out none of the documents; a larger fraction, "
            "or more documents, would work. Nothing was trained."
        )
    return heldout


def some_documents(source: DocumentSource, settings: DataSettings, *, heldout: bool) -> Iterator[str]:
    for text in source.records():
        if text and is_heldout(text, settings.heldout_fraction) is heldout:
            yield text


def read_texts(settings: DataSettings, paths: Sequence[Path]) -> Iterable[str]:
    """All documents of ``paths`` (files, folders and ``hf:`` names), read as ``settings`` say."""
    (source,) = dataclasses.replace(settings, paths=tuple(paths), sources={}, streaming=False).parsed_sources()
    return read_source(source)


def _of_source(source: SourceSettings, settings: DataSettings, tokenizer: Tokenizer) -> Sequence[TokenArray]:
    if folders := token_folders(source):
        return [piece for folder in folders for piece in folder.tokens("heldout").pieces]
    _, heldout = split_documents(read_source(source), settings.heldout_fraction, settings.max_documents)
    return [tokenizer.encode_documents(heldout)]
