"""Packed tokens: documents end to end, and the windows of them that are sequences.

Window i of sequences of L tokens contains ``tokens[i * L : i * L + L + 1]``. Its inputs are all tokens but the last,
its targets all but the first. So every token is a target once, except the first one and fewer than L at the end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from diloco.errors import DataError

__all__ = ["PackedTokens", "TokenArray"]

TokenArray: TypeAlias = NDArray[np.integer[Any]]


class PackedTokens:
    """Several arrays of tokens, end to end. They are read only when slices are requested.

    Args:
        pieces: ``(n,)`` arrays of one integer type, such as memory-mapped files.
        digest: a hash of all their bytes, if it is known already.
        vocab_size: reading an id that is not below it raises `DataError`, because files may be damaged. None: any.
        documents: the number of documents, each with its end.
        num_bytes: their UTF-8 bytes; the end-of-document tokens stand for none.

    >>> tokens = PackedTokens([np.arange(4), np.arange(4, 6)])
    >>> len(tokens), tokens[2:5].tolist(), tokens[0:3].tolist()
    (6, [2, 3, 4], [0, 1, 2])
    """

    marks_ends = False  # the tokens themselves show where a document ends

    def __init__(
        self,
        pieces: Sequence[TokenArray],
        digest: str | None = None,
        *,
        vocab_size: int | None = None,
        documents: int = 0,
        num_bytes: int = 0,
    ) -> None:
        # A plain view: slices of np.memmap are np.memmap objects, which take ten times as long to create.
        self.pieces = tuple(piece.view(np.ndarray) for piece in pieces)
        self.vocab_size, self.documents, self.num_bytes = vocab_size, documents, num_bytes
        self._ends = list(accumulate(len(piece) for piece in self.pieces))
        self._digest = digest

    @classmethod
    def joined(cls, parts: Sequence[PackedTokens]) -> PackedTokens:
        """Return the tokens of several, end to end."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            [piece for part in parts for piece in part.pieces],
            xxhash.xxh3_64_hexdigest(" ".join(part.digest for part in parts).encode()),
            vocab_size=parts[0].vocab_size,
            documents=sum(part.documents for part in parts),
            num_bytes=sum(part.num_bytes for part in parts),
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.pieces[0].dtype if self.pieces else np.dtype(np.uint16)

    @property
    def digest(self) -> str:
        """A hash of the tokens' bytes that tells data sets apart, however they are divided into arrays."""
        if self._digest is None:
            digest = xxhash.xxh3_64()
            for piece in self.pieces:
                digest.update(np.ascontiguousarray(piece).data)
            self._digest = digest.hexdigest()
        return self._digest

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, where: slice, /) -> TokenArray:
        tokens = self._slice(*where.indices(len(self))[:2])
        if self.vocab_size is not None and len(tokens) and (highest := int(tokens.max())) >= self.vocab_size:
            raise DataError(
                f"The tokens contain the id {highest}, but their vocabulary ends at {self.vocab_size - 1}: one of "
                "their files is damaged. Copy the folder again, or make it again with `diloco tokenize`."
            )
        return tokens

    def num_windows(self, length: int) -> int:
        """Return the number of windows of ``length + 1`` tokens at stride ``length``."""
        return max(len(self) - 1, 0) // length

    def read(self, window: int, inputs: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Fill ``inputs`` and ``targets``, each ``(length,)``, with those of a window."""
        begin, length = window * len(inputs), len(inputs)
        tokens = self[begin : begin + length + 1]
        inputs[:], targets[:] = tokens[:-1], tokens[1:]

    def _slice(self, begin: int, end: int) -> TokenArray:
        number = bisect_right(self._ends, begin)
        if begin >= end:
            return np.zeros(0, dtype=self.dtype)
        before = self._ends[number - 1] if number else 0
        if end <= self._ends[number]:
            return self.pieces[number][begin - before : end - before]
        parts = []
        while begin < end:
            parts.append(self.pieces[number][begin - before : end - before])
            begin = before = self._ends[number]
            number += 1
        return np.concatenate(parts)
