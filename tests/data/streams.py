"""Batches of every kind over a few documents, and the documents drawn in them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha512
from typing import Any

import numpy as np

from diloco.data import (
    Batches,
    ByteTokenizer,
    DataSettings,
    DocumentStream,
    PackedTokens,
    Sampler,
    Source,
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


@dataclass
class Records:
    """A file whose records are in memory."""

    texts: Sequence[str]

    def rows(self) -> Iterator[tuple[str, str]]:
        yield from (("memory", text) for text in self.texts)


class InMemory(Source):
    def __init__(self, *files: Sequence[str]) -> None:
        self.settings, self.parts = DataSettings(streaming=True), list(map(Records, files))  # type: ignore[assignment]  # stand for files


def stream(files: Sequence[Sequence[str]], replica: int, replicas: int, *, ahead: int = 0) -> DocumentStream:
    return DocumentStream(
        InMemory(*files),
        TOKENIZER,
        data=str(len(files)),
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
_DATA: dict[str, Any] = {
    "array": _TOKENS,
    "pieces": PackedTokens(np.array_split(_TOKENS, 5)),
    "stream": [DOCUMENTS],
    "stream of files": [DOCUMENTS[:20], DOCUMENTS[20:33], DOCUMENTS[33:60], numbered(40, prefix="other")],
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
