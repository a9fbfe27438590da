"""Packed tokens that lie in several arrays, in memory or in files, read as if they were one.

Several sources with weights: which of them the sequence at a position of the stream is from.

Every sequence has as many tokens, so weights count tokens, whatever the lengths of documents. Of any `CYCLE` positions
in a row that begin at a multiple of it, each source has its share, as exactly as `CYCLE` parts allow; which of them are
whose is shuffled anew in each cycle, so that no replica meets a pattern. A source goes on with its own next epoch, in
another order, when all its windows have been drawn, whatever the others do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from diloco.data.permutation import permute
from diloco.errors import ConfigurationError, DataError

__all__ = [
    "CYCLE",
    "Mixture",
    "PackedTokens",
    "Part",
    "TokenArray",
    "Tokens",
    "num_windows",
    "shares_of",
    "tokens_digest",
]

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


def num_windows(tokens: Tokens, sequence_length: int) -> int:
    """Windows of ``sequence_length + 1`` tokens at stride ``sequence_length``."""
    return max(len(tokens) - 1, 0) // sequence_length


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


CYCLE = 10_000
"""Positions within which each source has its share."""


@dataclass(frozen=True, eq=False)
class Part:
    """One source of a mixture."""

    name: str
    tokens: Tokens
    weight: float
    """Its fraction of the tokens drawn is this over the sum of all weights."""


class Mixture:
    """Packed tokens of several sources, to be drawn from by weight.

    Args:
        parts: at least one.

    Attributes:
        tokens: of all parts, one after the other.
        shares: of each part, in positions of a cycle.

    Raises:
        ConfigurationError: a weight that is not positive, or too small beside the others.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self.shares = shares_of({part.name: part.weight for part in self.parts})
        pieces = [part.tokens.pieces if isinstance(part.tokens, PackedTokens) else (part.tokens[:],) for part in parts]
        dtype = max((part.tokens.dtype for part in self.parts), key=lambda each: each.itemsize)
        sizes = [part.tokens.vocab_size for part in self.parts if isinstance(part.tokens, PackedTokens)]
        self.tokens = PackedTokens(
            [piece.astype(dtype, copy=False) for each in pieces for piece in each],
            vocab_size=next((size for size in sizes if size is not None), None),  # all parts are of one tokenizer
        )
        self._offsets = [0, *accumulate(len(part.tokens) for part in self.parts)]
        self._cycles: dict[tuple[int, int], tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        self._bounds = np.array([0, *accumulate(self.shares)], dtype=np.int64)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.tokens.dtype

    @property
    def digest(self) -> str:
        """Equal for the same sources in the same shares."""
        told = [[part.name, tokens_digest(part.tokens), s] for part, s in zip(self.parts, self.shares, strict=True)]
        return xxhash.xxh3_64_hexdigest(repr(told).encode())

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, where: slice, /) -> TokenArray:
        return self.tokens[where]

    def check(self, sequence_length: int) -> None:
        """Raise `DataError` where a part has too few tokens for one window."""
        for part in self.parts:
            if num_windows(part.tokens, sequence_length) < 1:
                raise DataError(
                    f"The source {part.name!r} has {len(part.tokens)} training tokens; one sequence of "
                    f"{sequence_length} needs {sequence_length + 1}. More text or shorter sequences would work. "
                    "No sampler was made."
                )

    def begins_at(self, positions: NDArray[np.int64], sequence_length: int, seed: int) -> NDArray[np.int64]:
        """At which tokens the windows at some positions of the stream begin.

        Args:
            positions: (n,) int64, from 0 on.
            sequence_length: tokens per sequence (L).
            seed: of the run.

        Returns:
            (n,) int64; within an epoch of a part, distinct positions have distinct windows.
        """
        begins = np.empty_like(positions)
        sources, ordinals = self._ordinals(positions, seed)
        for number in np.unique(sources).tolist():
            chosen = sources == number
            size = num_windows(self.parts[number].tokens, sequence_length)
            epochs, places = np.divmod(ordinals[chosen], size)
            windows = np.empty_like(places)
            for epoch in np.unique(epochs).tolist():
                key = f"seed {seed}, source {self.parts[number].name}, epoch {epoch}"
                windows[epochs == epoch] = permute(places[epochs == epoch], size, key)
            begins[chosen] = self._offsets[number] + windows * sequence_length
        return begins

    def epochs(self, position: int, sequence_length: int) -> Mapping[str, float]:
        """Part -> how often all of it was drawn before a position."""
        return {
            part.name: position * share / CYCLE / num_windows(part.tokens, sequence_length)
            for part, share in zip(self.parts, self.shares, strict=True)
        }

    def _ordinals(self, positions: NDArray[np.int64], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of each position its part, and how many of this part's positions are counted before it."""
        cycles, places = np.divmod(positions, CYCLE)
        sources, within = np.empty_like(places), np.empty_like(places)
        for cycle in np.unique(cycles).tolist():
            chosen = cycles == cycle
            sources[chosen], within[chosen] = (each[places[chosen]] for each in self._cycle(cycle, seed))
        return sources, cycles * np.array(self.shares, dtype=np.int64)[sources] + within

    def _cycle(self, cycle: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of each position of a cycle its part, and how many of this part's positions of the cycle are before it."""
        key = cycle, seed
        if key not in self._cycles:
            slots = permute(np.arange(CYCLE), CYCLE, f"seed {seed}, mixture {cycle}")
            sources = np.searchsorted(self._bounds, slots, side="right") - 1
            within = np.empty_like(sources)
            for number, share in enumerate(self.shares):
                within[sources == number] = np.arange(share)
            while len(self._cycles) > 1:  # a batch may lie in two
                self._cycles.pop(next(iter(self._cycles)), None)
            self._cycles[key] = sources, within
        return self._cycles[key]


def shares_of(weights: Mapping[str, float]) -> tuple[int, ...]:
    """Positions of a cycle for each weight, `CYCLE` in all: rounded down, and up for those with the largest rest.

    Raises:
        ConfigurationError: a weight that is not positive, or so small that its share is none.

    >>> shares_of({"web": 2.0, "code": 1.0})
    (6667, 3333)
    """
    total = sum(weights.values())
    if not all(0 < weight < np.inf for weight in weights.values()):
        raise ConfigurationError(
            f"The weights {dict(weights)} were given; positive numbers would work. Nothing was started."
        )
    exact = [weight / total * CYCLE for weight in weights.values()]
    shares = [int(each) for each in exact]
    by_rest = sorted(range(len(exact)), key=lambda index: shares[index] - exact[index])
    for index in by_rest[: CYCLE - sum(shares)]:
        shares[index] += 1
    for name, share in zip(weights, shares, strict=True):
        if share == 0:
            raise ConfigurationError(
                f"The source {name!r} has the weight {weights[name]:g} of {total:g}; at least one part in {CYCLE:,} "
                "would work. Nothing was started."
            )
    return tuple(shares)
