"""Pack whole examples into rows of one length, with marks for the tokens that the loss counts and the ends of examples.

A row is a training sequence, so no example is split between sequences, as it would be in packed text. To a sampler, the
rows are the windows of packed tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from diloco.data.packed import PackedTokens
from diloco.errors import DataError
from diloco.model import ENDS, NOT_COUNTED

__all__ = ["Example", "PackedRows", "fitting", "pack_rows"]


@dataclass(frozen=True, eq=False)
class Example:
    """A conversation or document as tokens."""

    tokens: NDArray[Any]  # ``(n,)`` integers
    # ``(n,)`` bool: whether the loss counts a token; False for the first, which is not predicted
    counted: NDArray[np.bool_]


def fitting(examples: Iterable[Example], length: int) -> tuple[list[Example], int, int]:
    """Return the examples that can be learned from in rows of ``length`` tokens; longer ones are cut at the end.

    Returns:
        The examples, how many of them were cut, and how many were left out because no counted token remains.
    """
    kept: list[Example] = []
    cut = left_out = 0
    for example in examples:
        short = Example(example.tokens[:length], example.counted[:length])
        if not short.counted.any():
            left_out += 1
            continue
        cut += len(short.tokens) < len(example.tokens)
        kept.append(short)
    return kept, cut, left_out


def pack_rows(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Return which items of these sizes go into each row of ``length``: best fit, largest first.

    >>> pack_rows([3, 2, 6, 4, 1], length=6)
    [[2], [3, 1], [0, 4]]
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free space, row number), ascending
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        place = bisect_left(room, (sizes[number], -1))
        if place == len(room):
            rows.append([])
            free, row = length, len(rows) - 1
        else:
            free, row = room.pop(place)
        rows[row].append(number)
        if free > sizes[number]:
            insort(room, (free - sizes[number], row))
    return rows


class PackedRows(PackedTokens):
    """Rows of examples, as packed tokens whose windows of ``length`` are the rows.

    Args:
        examples: each of at most ``length`` tokens.
        length: tokens per row (L).
        together: pack as many examples into a row as fit, masked from each other; otherwise one per row.
        padding: the token that fills the rest of a row. It is never a target.
        dtype: the type of the tokens.

    Raises:
        DataError: there are no examples.

    >>> yes = np.array([False, True])
    >>> rows = PackedRows([Example(np.array([5, 6]), yes), Example(np.array([7, 8]), yes)], 4, padding=0)
    >>> targets = rows[1:5].astype(np.int64)
    >>> rows.mark(1, targets)
    >>> rows[0:4].tolist(), targets.tolist()
    ([5, 6, 7, 8], [6, -101, 8, -101])
    """

    def __init__(
        self,
        examples: Sequence[Example],
        length: int,
        *,
        padding: int,
        together: bool = True,
        dtype: np.dtype[Any] | None = None,
    ) -> None:
        if not examples:
            raise DataError("There are no examples to learn from.")
        sizes = [len(example.tokens) for example in examples]
        rows = pack_rows(sizes, length) if together else [[number] for number in range(len(sizes))]
        tokens = np.full(len(rows) * length + 1, padding, dtype=dtype or np.dtype(np.uint32))
        self._counted = np.zeros(len(tokens), dtype=np.bool_)
        self._last = np.zeros(len(tokens), dtype=np.bool_)
        for row, numbers in enumerate(rows):
            place = row * length
            for number in numbers:
                end = place + sizes[number]
                tokens[place:end] = examples[number].tokens
                self._counted[place + 1 : end] = examples[number].counted[1:]
                self._last[end - 1] = True
                place = end
        super().__init__([tokens], documents=len(examples))
        self.length = length
        self.marks_ends = together
        self.efficiency = sum(sizes) / (len(tokens) - 1)  # fraction of the tokens that are not padding
        self.counted_tokens = int(self._counted.sum())  # tokens that the loss counts

    @property
    def digest(self) -> str:
        """A hash of the tokens, of which of them count, and of the length of the rows."""
        marks = np.packbits(self._counted), np.packbits(self._last)
        digest = xxhash.xxh3_64(f"{super().digest} {self.length} {self.marks_ends}".encode())
        for each in marks:
            digest.update(each.data)
        return digest.hexdigest()

    def mark(self, begin: int, targets: NDArray[np.int64]) -> None:
        end = begin + len(targets)
        targets[~self._counted[begin:end]] = NOT_COUNTED
        targets[self._last[begin - 1 : end - 1]] = ENDS

    def check(self, sequence_length: int, batch_size: int, num_replicas: int) -> None:
        """Raise `DataError` if there is less than one batch for each replica."""
        rows, needed = (len(self) - 1) // self.length, num_replicas * batch_size
        if rows < needed:
            raise DataError(
                f"The examples make {rows} rows of {self.length} tokens, but one batch of {batch_size} for each of "
                f"{num_replicas} replicas needs {needed}. Use more examples, fewer replicas, smaller batches "
                "(--batch-size), shorter rows (--sequence-length) or --data.packing single."
            )
