"""Batches of every kind over a few documents, and the documents drawn in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha512
from typing import Any

import numpy as np

from diloco.data import (
    Batches,
    ByteTokenizer,
    DataSet,
    DocumentStream,
    Mixture,
    PackedTokens,
    Sampler,
    Source,
    SourceSettings,
    is_heldout,
    split_documents,
)

LENGTH, SIZE = 8, 2
"""Tokens per sequence, and sequences per batch."""

HELDOUT = 0.2
TOKENIZER = ByteTokenizer()


def numbered(count: int, *, prefix: str = "", longest: int = 30) -> list[str]:
    """Documents of many lengths, all different; some of them are held out."""
    return [f"{prefix}<{n}:{sha512(bytes([n % 256])).hexdigest() * 2:.{n * 7 % longest}}>" for n in range(count)]


class InMemory(Source):
    """A source whose records are in memory, as of a data set, but in one part."""

    def __init__(self, records: Sequence[str], name: str, weight: float) -> None:
        self.settings = SourceSettings(name=name, weight=weight)
        self.parts = [DataSet("memory", Rows(records))]


class Rows:
    """What is used of a ``datasets.IterableDataset``."""

    def __init__(self, records: Sequence[str]) -> None:
        self.records, self.place = records, 0

    def shard(self, num_shards: int, index: int) -> Rows:
        assert (num_shards, index) == (1, 0)
        return Rows(self.records)

    def iter(self, size: int) -> Iterator[dict[str, Sequence[str]]]:
        while self.place < len(self.records):
            first, self.place = self.place, self.place + size
            yield {"text": self.records[first : self.place]}

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def stream(
    sources: Sequence[Sequence[str]], replica: int, replicas: int, *, block: int = 3, ahead: int = 0
) -> DocumentStream:
    """Return a stream of sources whose weights are 2, 1, 1, ..."""
    return DocumentStream(
        [InMemory(each, str(number), 2.0 if number == 0 else 1.0) for number, each in enumerate(sources)],
        TOKENIZER,
        data="test",
        size=block,
        heldout_fraction=HELDOUT,
        sequence_length=LENGTH,
        batch_size=SIZE,
        replica=replica,
        num_replicas=replicas,
        seed=0,
        ahead=ahead,
    )


def packed(documents: Sequence[str]) -> np.ndarray:
    return TOKENIZER.encode_documents(documents)


def split(documents: Iterable[str], fraction: float) -> tuple[list[str], list[str]]:
    """Return the documents to train on and the ones held out."""
    sides: tuple[list[str], list[str]] = ([], [])
    for document, heldout in split_documents(documents, fraction):
        sides[heldout].append(document)
    return sides


def trained(records: Sequence[str]) -> list[str]:
    """Return the documents that are trained on."""
    return [record for record in records if record and not is_heldout(record, HELDOUT)]


DOCUMENTS = numbered(60)
_TOKENS = packed(DOCUMENTS)
_HALVES = [PackedTokens(np.array_split(_TOKENS, 5)), PackedTokens([packed(numbered(20, prefix="other"))])]
_DATA: dict[str, Any] = {
    "array": _TOKENS,
    "pieces": _HALVES[0],
    "mixture": Mixture(dict(zip("ab", _HALVES, strict=True)), {"a": 3.0, "b": 1.0}),
    "stream": [DOCUMENTS],
    "streams": [DOCUMENTS, numbered(40, prefix="other")],
}


def _maker(data: Any, ahead: int) -> Callable[[int, int], Batches]:
    def make(replica: int, replicas: int) -> Batches:
        if isinstance(data, list):
            return stream(data, replica, replicas, ahead=ahead)
        shape = {"sequence_length": LENGTH, "batch_size": SIZE, "seed": 0, "ahead": ahead}
        return Sampler(data, replica=replica, num_replicas=replicas, **shape)

    return make


KINDS = {
    f"{name}{also}": _maker(data, ahead)
    for also, ahead in (("", 0), (", made ahead", 3))
    for name, data in _DATA.items()
}


def lists(batch: Any) -> tuple[list[list[int]], list[list[int]]]:
    inputs, targets = batch
    return inputs.tolist(), targets.tolist()
