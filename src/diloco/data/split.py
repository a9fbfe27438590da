"""Which text is held out: documents by a hash of their text, or the end of one where these would be too little.

Only the texts and the fraction decide, not their order. Copies of a document are held out together, or cut at the same
character, so that no text is trained on and evaluated.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import ArrayLike

MANY = 256
"""The hash decides alone if it gives so many documents to each side. While streaming, the first ones are held out."""


@dataclass(frozen=True)
class Split:
    """What of each document is held out; the rest is trained on.

    Documents whose `document_key` is below ``limit`` are held out. Of the one whose key is ``limit``, it is the end:
    this ``part`` of its characters.

    >>> Split(0.3).parts("one"), Split(0.3).parts("four"), Split(document_key("four"), 0.25).parts("four")
    (('', 'one'), ('four', ''), ('fou', 'r'))
    """

    limit: float
    part: float = 0.0

    def parts(self, text: str) -> tuple[str, str]:
        """Return the part of a document to train on and the one that is held out; either may be empty."""
        begin = len(text) - self.heldout_characters(document_key(text), len(text))
        return text[:begin], text[begin:]

    def heldout_characters(self, key: float, length: int) -> int:
        """Return how many characters are held out of a document of this key and length."""
        if key == self.limit:
            return round(length * self.part)
        return length if key < self.limit else 0

    def training(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield what to train on of each text."""
        return (train for train, _ in map(self.parts, texts) if train)

    def heldout(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield what is held out of each text."""
        return (heldout for _, heldout in map(self.parts, texts) if heldout)


@dataclass(frozen=True)
class Survey:
    """What a first look at the documents shows, which ends as soon as the hash has given `MANY` to each side."""

    split: Split
    heldout: Sequence[str] | None  # the first `MANY` documents that the hash holds out; None: it does not suffice
    trained: Sequence[int] | None  # the characters to train on of each document; None: not all were looked at


def survey(texts: Iterable[str], fraction: float) -> Survey:
    """Return how documents are split, by their UTF-8 bytes.

    The hash alone suffices if each side has `MANY` documents, or a tenth of its share of the bytes. Otherwise documents
    are held out in the order of their keys, and of the last one only the end.
    """
    keys, sizes, lengths = array("d"), array("q"), array("q")
    heldout: list[str] = []
    counts = [0, 0]  # of documents to train on and held out
    for text in texts:
        content = text.encode("utf-8")
        keys.append(_key(content))
        sizes.append(len(content))
        lengths.append(len(text))
        counts[keys[-1] < fraction] += 1
        if keys[-1] < fraction and len(heldout) < MANY:
            heldout.append(text)
        if min(counts) >= MANY:
            return Survey(Split(fraction), heldout, None)
    by_hash = suffices(keys, sizes, fraction)
    split = Split(fraction) if by_hash else _lowest_keys(keys, sizes, fraction)
    trained = [length - split.heldout_characters(key, length) for key, length in zip(keys, lengths, strict=True)]
    return Survey(split, heldout if by_hash else None, [length for length in trained if length])


def suffices(keys: ArrayLike, sizes: ArrayLike, fraction: float) -> bool:
    """Return whether the hash gives each side a tenth of its share, by the keys of documents and their sizes."""
    size = np.asarray(sizes, dtype=np.int64)
    heldout, total = int(size[np.asarray(keys) < fraction].sum()), int(size.sum())
    enough = heldout >= fraction * total / 10 and total - heldout >= (1 - fraction) * total / 10
    return 0 < heldout < total and enough


def whole_split(keys: ArrayLike, fraction: float) -> Split:
    """Return the split of documents that can't be cut, by their number: at least one on each side if two differ."""
    key = np.asarray(keys, dtype=np.float64)
    if suffices(key, np.ones(len(key)), fraction):
        return Split(fraction)
    distinct, copies = np.unique(key, return_counts=True)
    if len(distinct) < 2:
        return Split(0.0)
    held = int(np.searchsorted(copies.cumsum(), max(1, fraction * len(key)))) + 1
    return Split(float(distinct[min(held, len(distinct) - 1)]))


def _lowest_keys(keys: ArrayLike, sizes: ArrayLike, fraction: float) -> Split:
    distinct, numbers = np.unique(np.asarray(keys, dtype=np.float64), return_inverse=True)
    size_of = np.zeros(len(distinct), dtype=np.int64)
    np.add.at(size_of, numbers, np.asarray(sizes, dtype=np.int64))
    missing = int(fraction * int(size_of.sum()))
    for key, size in zip(distinct.tolist(), size_of.tolist(), strict=True):
        if size > missing:
            return Split(key, missing / size)
        missing -= size
    return Split(0.0)  # there is no document


def document_key(text: str) -> float:
    """Return a number from 0 to 1 that only the text decides; the hash holds out those below the fraction.

    >>> document_key("one") < 0.3 < document_key("four")
    True
    """
    return _key(text.encode("utf-8"))


def _key(content: bytes) -> float:
    return (xxhash.xxh3_128_intdigest(content) >> 75) / (1 << 53)  # a float holds 53 bits exactly
