"""Batches of every kind over a few documents, and the documents drawn in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import sha512
from itertools import islice
from typing import Any

import numpy as np

from diloco.data import (
    Batches,
    BlockReader,
    ByteTokenizer,
    DocumentStream,
    Mixture,
    PackedTokens,
    Prefetcher,
    Sampler,
    is_heldout,
)

LENGTH, SIZE = 8, 2
"""Tokens per sequence, and sequences per batch."""

HELDOUT = 0.2
TOKENIZER = ByteTokenizer()


def numbered(count: int, *, prefix: str = "", longest: int = 30) -> list[str]:
    """Documents of many lengths, all different; some of them are held out."""
    return [f"{prefix}<{n}:{sha512(bytes([n % 256])).hexdigest() * 2:.{n * 7 % longest}}>" for n in range(count)]


class Records:
    """A source in memory whose size may be known or unknown."""

    def __init__(self, records: Sequence[str], *, sized: bool) -> None:
        self.size = len(records) if sized else None
        self._records = records

    def records(self, start: int = 0) -> Iterator[str]:
        return islice(iter(self._records), start, None)


def stream(
    sources: Sequence[Sequence[str]],
    replica: int,
    replicas: int,
    *,
    weights: Sequence[float] | None = None,
    sized: bool = False,
    block: int = 3,
    seed: int = 0,
) -> DocumentStream:
    readers = [
        BlockReader(
            Records(source, sized=sized),
            name=str(number),
            size=block,
            tokenizer=TOKENIZER,
            heldout_fraction=HELDOUT,
            seed=seed,
        )
        for number, source in enumerate(sources)
    ]
    return DocumentStream(
        readers,
        weights or [1.0] * len(readers),
        data="test",
        eos_id=TOKENIZER.eos_id,
        sequence_length=LENGTH,
        batch_size=SIZE,
        replica=replica,
        num_replicas=replicas,
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
        [DOCUMENTS, numbered(40, prefix="other")], replica, replicas, weights=[2.0, 1.0], sized=True
    ),
}
KINDS |= {
    f"{name}, made ahead": lambda replica, replicas, make=make: Prefetcher(make(replica, replicas), 3)  # type: ignore[misc]
    for name, make in list(KINDS.items())
}


def lists(batch: Any) -> tuple[list[list[int]], list[list[int]]]:
    inputs, targets = batch
    return inputs.tolist(), targets.tolist()
