"""Which documents are trained on and which are held out: a function of their text."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import xxhash

from diloco.errors import DataError

__all__ = ["is_heldout", "sides", "split_documents"]


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
