"""Packed tokens that lie in several arrays, in memory or in files, read as if they were one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from diloco.errors import DataError

__all__ = ["PackedTokens", "TokenArray", "Tokens", "tokens_digest"]

TokenArray: TypeAlias = NDArray[np.integer[Any]]


class Tokens(Protocol):
    """What can be drawn from: an array ``(n,)`` of integers, or anything that is read like one, a slice at a time."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the tokens."""

    def __len__(self) -> int:
        """Number of tokens."""

    def __getitem__(self, where: slice, /) -> TokenArray:
        """The tokens from ``where.start`` to before ``where.stop``."""


class PackedTokens:
    """Several arrays of tokens, end to end. Nothing of them is read before it is asked for.

    Args:
        pieces: ``(n,)`` arrays of one integer type, such as memory-mapped files.
        digest: of all of them (see `tokens_digest`), where it is known already; else it is computed when asked for.
        vocab_size: ids are below it; looked at where they are read, since files may be damaged. None: not looked at.

    Raises:
        DataError: from a slice that holds another id.

    >>> tokens = PackedTokens([np.arange(4), np.arange(4, 6)])
    >>> len(tokens), tokens[2:5].tolist(), tokens[0:3].tolist()
    (6, [2, 3, 4], [0, 1, 2])
    """

    def __init__(
        self, pieces: Sequence[TokenArray], digest: str | None = None, *, vocab_size: int | None = None
    ) -> None:
        # A plain view: slices of np.memmap are memory maps again, ten times as slow to make.
        self.pieces = tuple(piece.view(np.ndarray) for piece in pieces)
        self._ends = list(accumulate(len(piece) for piece in self.pieces))
        self._digest = digest
        self.vocab_size = vocab_size

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.pieces[0].dtype if self.pieces else np.dtype(np.uint16)

    @property
    def digest(self) -> str:
        """As `tokens_digest`."""
        if self._digest is None:
            self._digest = _digest_of(self.pieces)
        return self._digest

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, where: slice, /) -> TokenArray:
        tokens = self._slice(*where.indices(len(self))[:2])
        if self.vocab_size is not None and len(tokens) and (highest := int(tokens.max())) >= self.vocab_size:
            raise DataError(
                f"The tokens hold the id {highest}, and their vocabulary ends at {self.vocab_size - 1}: a file of them "
                "is damaged. A whole copy of the folder, or `diloco tokenize` of the source, would work. They were "
                "not used."
            )
        return tokens

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


def tokens_digest(tokens: Tokens) -> str:
    """A hash that tells data sets apart: of the tokens' bytes, however many arrays they lie in.

    >>> tokens_digest(np.arange(6)) == tokens_digest(PackedTokens([np.arange(4), np.arange(4, 6)]))
    True
    """
    return tokens.digest if isinstance(tokens, PackedTokens) else _digest_of([tokens[:]])


def _digest_of(pieces: Sequence[TokenArray]) -> str:
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(np.ascontiguousarray(piece).data)
    return digest.hexdigest()
