"""Batches of every kind over a few documents, and the documents drawn in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import sha512
from typing import Any

import numpy as np

from diloco.data import (
    Batches,
    ByteTokenizer,
    DocumentStream,
    Mixture,
    PackedTokens,
    Prefetcher,
    Sampler,
    Source,
    SourceSettings,
    is_heldout,
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
        self.parts = [("memory", Rows(records))]


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
    sources: Sequence[Sequence[str]],
    replica: int,
    replicas: int,
    *,
    weights: Sequence[float] | None = None,
    block: int = 3,
    seed: int = 0,
) -> DocumentStream:
    return DocumentStream(
        [InMemory(each, str(number), (weights or [1.0] * 9)[number]) for number, each in enumerate(sources)],
        TOKENIZER,
        data="test",
        size=block,
        heldout_fraction=HELDOUT,
        sequence_length=LENGTH,
        batch_size=SIZE,
        replica=replica,
        num_replicas=replicas,
        seed=seed,
    )


def packed(documents: Sequence[str]) -> np.ndarray:
    return TOKENIZER.encode_documents(documents)


def trained(records: Sequence[str]) -> list[str]:
    """Return the documents that are trained on."""
    return [record for record in records if record and not is_heldout(record, HELDOUT)]


def _sampler(tokens: Any) -> Callable[[int, int], Batches]:
    return lambda replica, replicas: Sampler(
        tokens, sequence_length=LENGTH, batch_size=SIZE, replica=replica, num_replicas=replicas, seed=0
    )


DOCUMENTS = numbered(60)
_TOKENS = packed(DOCUMENTS)
_HALVES = [PackedTokens(np.array_split(_TOKENS, 5)), PackedTokens([packed(numbered(20, prefix="other"))])]

KINDS: dict[str, Callable[[int, int], Batches]] = {
    "array": _sampler(_TOKENS),
    "pieces": _sampler(_HALVES[0]),
    "mixture": _sampler(Mixture(dict(zip("ab", _HALVES, strict=True)), {"a": 3.0, "b": 1.0})),
    "stream": lambda replica, replicas: stream([DOCUMENTS], replica, replicas),
    "streams": lambda replica, replicas: stream(
        [DOCUMENTS, numbered(40, prefix="other")], replica, replicas, weights=[2.0, 1.0]
    ),
}
KINDS |= {
    f"{name}, made ahead": lambda replica, replicas, make=make: Prefetcher(make(replica, replicas), 3)  # type: ignore[misc]
    for name, make in list(KINDS.items())
}


def lists(batch: Any) -> tuple[list[list[int]], list[list[int]]]:
    inputs, targets = batch
    return inputs.tolist(), targets.tolist()
