"""Packed tokens: documents end to end, of one source or a weighted mixture, and where their sequences begin.

Window i of sequences of L tokens contains ``tokens[i * L : i * L + L + 1]``. Its inputs are all tokens but the last,
its targets all but the first. So every token is a target once, except the first one and fewer than L at the end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from diloco.data.order import permute, windows_at
from diloco.errors import ConfigurationError, DataError

__all__ = ["CYCLE", "Mixture", "PackedTokens", "TokenArray", "num_windows", "shares_of"]

TokenArray: TypeAlias = NDArray[np.integer[Any]]

CYCLE = 10_000  # number of positions of a mixture in which each source gets its share


def num_windows(tokens: PackedTokens, sequence_length: int) -> int:
    """Return the number of windows of ``sequence_length + 1`` tokens at stride ``sequence_length``."""
    return max(len(tokens) - 1, 0) // sequence_length


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

    marks_ends = False  # whether `mark` marks the ends of documents, because no token does

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
        self.shares: Mapping[str, float] = {}  # source -> its fraction of the sequences; empty for a single source
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

    def check(self, sequence_length: int, batch_size: int, num_replicas: int) -> None:
        """Raise `DataError` if there is less than one batch for each replica."""
        windows, needed = num_windows(self, sequence_length), num_replicas * batch_size
        if windows < needed:
            raise DataError(
                f"{len(self)} training tokens make {windows} sequences of {sequence_length}, but one batch of "
                f"{batch_size} for each of {num_replicas} replicas needs {needed}, that is "
                f"{needed * sequence_length + 1} tokens. "
                "Use more text, fewer replicas, smaller batches or shorter sequences."
            )

    def mark(self, begin: int, targets: NDArray[np.int64]) -> None:
        """Replace those of the targets, the tokens from ``begin`` on, that are not counted; there are none here."""

    def begins_at(
        self, positions: NDArray[np.int64], sequence_length: int, batch_size: int, seed: int
    ) -> NDArray[np.int64]:
        """Return the ``(n,)`` int64 tokens at which the windows at ``(n,)`` positions of the stream begin."""
        return windows_at(positions, num_windows(self, sequence_length), batch_size, seed) * sequence_length

    def epochs_at(self, position: int, sequence_length: int, batch_size: int) -> Mapping[str, float]:
        """Return source -> how often all of it was drawn before a position; a single source is called ``""``."""
        return {"": position / (num_windows(self, sequence_length) // batch_size * batch_size)}

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


class Mixture(PackedTokens):
    """Several sources, drawn from by weight.

    All sequences have the same length, so weights count tokens. In every `CYCLE` positions that begin at a multiple of
    it, each source has its share, rounded to whole positions, in a shuffled order. When all windows of a source have
    been drawn, it continues with its own next epoch in another order.
    """

    def __init__(self, sources: Mapping[str, PackedTokens], weights: Mapping[str, float]) -> None:
        counts = shares_of({name: weights[name] for name in sources})
        dtype = max((tokens.dtype for tokens in sources.values()), key=lambda each: each.itemsize)
        super().__init__(
            [piece.astype(dtype, copy=False) for tokens in sources.values() for piece in tokens.pieces],
            vocab_size=next((t.vocab_size for t in sources.values() if t.vocab_size is not None), None),
            documents=sum(tokens.documents for tokens in sources.values()),
            num_bytes=sum(tokens.num_bytes for tokens in sources.values()),
        )
        self.shares = {name: count / CYCLE for name, count in zip(sources, counts, strict=True)}
        self._sources = sources
        self._counts = np.array(counts, dtype=np.int64)  # positions of each source in a cycle
        self._offsets = [0, *accumulate(map(len, sources.values()))]
        self._cycles: dict[tuple[int, int], tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    @property
    def digest(self) -> str:
        """A hash that is equal for the same sources in the same shares."""
        counts = zip(self._sources.items(), self._counts.tolist(), strict=True)
        return xxhash.xxh3_64_hexdigest(
            repr([[name, tokens.digest, count] for (name, tokens), count in counts]).encode()
        )

    def check(self, sequence_length: int, batch_size: int, num_replicas: int) -> None:
        """Raise `DataError` if a source has too few tokens for one window."""
        for name, tokens in self._sources.items():
            if num_windows(tokens, sequence_length) < 1:
                raise DataError(
                    f"The source {name!r} has {len(tokens)} training tokens, but one sequence of {sequence_length} "
                    f"needs {sequence_length + 1}. Use more text or shorter sequences."
                )

    def begins_at(
        self, positions: NDArray[np.int64], sequence_length: int, batch_size: int, seed: int
    ) -> NDArray[np.int64]:
        begins = np.empty_like(positions)
        numbers, ordinals = self._ordinals(positions, seed)
        for number, (name, tokens) in enumerate(self._sources.items()):
            chosen = numbers == number
            windows = windows_at(ordinals[chosen], num_windows(tokens, sequence_length), 1, seed, source=name)
            begins[chosen] = self._offsets[number] + windows * sequence_length
        return begins

    def epochs_at(self, position: int, sequence_length: int, batch_size: int) -> Mapping[str, float]:
        counts = zip(self._sources.items(), self._counts.tolist(), strict=True)
        return {n: position * count / CYCLE / num_windows(tokens, sequence_length) for (n, tokens), count in counts}

    def _ordinals(self, positions: NDArray[np.int64], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return, for each position, the number of its source and how many positions of that source come before it."""
        cycles, places = np.divmod(positions, CYCLE)
        numbers, within = np.empty_like(places), np.empty_like(places)
        for cycle in np.unique(cycles).tolist():
            chosen = cycles == cycle
            numbers[chosen], within[chosen] = (each[places[chosen]] for each in self._cycle(cycle, seed))
        return numbers, cycles * self._counts[numbers] + within

    def _cycle(self, cycle: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return what `_ordinals` does for all positions of one cycle, counted within the cycle."""
        key = cycle, seed
        if key not in self._cycles:
            slots = permute(np.arange(CYCLE), CYCLE, f"seed {seed}, mixture {cycle}")
            numbers = np.searchsorted(np.cumsum(self._counts), slots, side="right")
            within = np.empty_like(numbers)
            for number, count in enumerate(self._counts.tolist()):
                within[numbers == number] = np.arange(count)
            self._cycles = dict([*self._cycles.items()][-1:])  # a batch may span two cycles
            self._cycles[key] = numbers, within
        return self._cycles[key]


def shares_of(weights: Mapping[str, float]) -> tuple[int, ...]:
    """Return the positions of a cycle for each weight, `CYCLE` in total, by the largest-remainder method.

    >>> shares_of({"web": 2.0, "code": 1.0})
    (6667, 3333)
    """
    total = sum(weights.values())
    exact = [weight / total * CYCLE for weight in weights.values()]
    shares = [int(each) for each in exact]
    by_rest = sorted(range(len(exact)), key=lambda index: shares[index] - exact[index])
    for index in by_rest[: CYCLE - sum(shares)]:
        shares[index] += 1
    for name, share in zip(weights, shares, strict=True):
        if share == 0:
            raise ConfigurationError(
                f"The source {name!r} has the weight {weights[name]:g} out of {total:g}, but needs at least one part "
                f"in {CYCLE:,}. Give it a larger weight."
            )
    return tuple(shares)
