"""Documents into two packed arrays of tokens: one to train on and one to hold out."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import xxhash
from numpy.typing import NDArray

from diloco.data.settings import DataSettings
from diloco.data.text import read_documents
from diloco.data.tokenizer import Tokenizer
from diloco.data.tokens import make_tokenizer
from diloco.errors import DataError

__all__ = ["Corpus", "build_corpus", "split_documents"]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training and held-out documents as tokens, each followed by the end-of-document token, without padding."""

    train: NDArray[Any]
    """(n,) uint16 where the vocabulary allows, else uint32."""
    heldout: NDArray[Any]
    """(n,) of the same type."""
    tokenizer: Tokenizer
    train_documents: int
    heldout_documents: int
    train_bytes: int
    """UTF-8 bytes of the training documents; the end-of-document tokens stand for none."""
    heldout_bytes: int
    fingerprint: str
    """Equal for equal tokens, split and vocabulary size; a hash for telling data sets apart, not for trusting them."""


class _Document(NamedTuple):
    text: str
    heldout_key: float
    """In [0, 1), from one half of the hash: held out when below the fraction."""
    sample_key: int
    """From the other half, so that a sample is as likely to be held out as the rest."""


def build_corpus(settings: DataSettings) -> Corpus:
    """Read, split and tokenise the text that ``settings`` name. All of it is held in memory while this runs.

    Raises:
        DataError: the text cannot be read, or does not suffice for both sides.
        ConfigurationError: something asked for is not installed or unknown.
    """
    texts = read_documents(
        settings.paths, text_field=settings.text_field, document_separator=settings.document_separator
    )
    train, heldout = split_documents(texts, settings.heldout_fraction, settings.max_documents)
    tokenizer = make_tokenizer(settings, train)
    train_tokens = tokenizer.encode_documents(train)
    heldout_tokens = tokenizer.encode_documents(heldout)
    fingerprint = xxhash.xxh3_128(f"{tokenizer.vocab_size} {train_tokens.dtype} {len(train_tokens)}".encode())
    fingerprint.update(train_tokens.data)
    fingerprint.update(heldout_tokens.data)
    return Corpus(
        train=train_tokens,
        heldout=heldout_tokens,
        tokenizer=tokenizer,
        train_documents=len(train),
        heldout_documents=len(heldout),
        train_bytes=tokenizer.num_bytes(train_tokens),
        heldout_bytes=tokenizer.num_bytes(heldout_tokens),
        fingerprint=fingerprint.hexdigest(),
    )


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
    documents: Iterable[tuple[int, _Document]] = enumerate(map(_hashed, texts))
    if max_documents is not None:
        kept = heapq.nsmallest(max_documents, documents, key=lambda pair: (pair[1].sample_key, pair[0]))
        documents = sorted(kept, key=lambda pair: pair[0])
    train: list[str] = []
    heldout: list[str] = []
    lowest, highest = 1.0, 0.0
    for _, document in documents:
        (heldout if document.heldout_key < heldout_fraction else train).append(document.text)
        lowest = min(lowest, document.heldout_key)
        highest = max(highest, document.heldout_key)
    if train and heldout:
        return train, heldout
    if lowest >= highest:
        raise DataError(
            f"{len(train) + len(heldout)} documents with no two different ones were given; one to train on and one to "
            "hold out are needed. More files, a .jsonl with one document a line, or data.document_separator to cut "
            "long files into documents would work. The corpus was not built."
        )
    raise DataError(
        f"data.heldout_fraction={heldout_fraction:g} holds out {len(heldout)} of {len(train) + len(heldout)} documents "
        f"and leaves {len(train)} to train on; at least one of each is needed. A fraction between {lowest:.6g} and "
        f"{highest:.6g}, or more documents, would work. The corpus was not built."
    )


def _hashed(text: str) -> _Document:
    number = xxhash.xxh3_128_intdigest(text.encode("utf-8"))
    # 53 bits are what a float holds exactly.
    return _Document(text, (number >> 75) / (1 << 53), number & ((1 << 64) - 1))
