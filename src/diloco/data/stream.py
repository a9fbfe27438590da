"""Batches of documents that are read, tokenised and packed during training.

`BLOCK` consecutive records of a source are a block. Block g belongs to replica ``g % M``: a replica reads the source
from beginning to end again and again, skips the blocks of the others, and packs the documents of its own end to end,
each followed by the end-of-document token. So every token is a target once. With several sources, the next sequence
comes from the one that has drawn the fewest tokens relative to its weight.

Another number of replicas continues after the furthest block that any replica has begun: no token is read a second
time, and what others had not read by then waits for the next epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from diloco.data.loader import Batch, Batches, Cursor, Drawing, State
from diloco.data.order import read_message
from diloco.data.source import BEGINNING, Place, Source, is_heldout
from diloco.data.tokenizer import Tokenizer
from diloco.errors import DataError

__all__ = ["BLOCK", "DocumentStream"]

BLOCK = 64  # records that one replica is assigned at a time


class _Position(msgspec.Struct, kw_only=True):
    """Where a replica is in a source; part of its cursor."""

    place: dict[str, Any]  # where block ``at`` begins
    at: int = 0
    block: int  # the block to draw from
    offset: int = 0  # the tokens of it that have been drawn
    last: int  # the token before the next one to draw
    tokens: int = 0  # tokens drawn from this source so far
    blocks: int | None = None  # blocks per epoch, once the end was reached


class _Reader:
    """The tokens of a source that one replica draws."""

    def __init__(
        self, source: Source, tokenizer: Tokenizer, *, size: int, heldout_fraction: float, drawing: Drawing
    ) -> None:
        self.name, self.weight = source.settings.name, source.settings.weight
        self._source, self._tokenizer = source, tokenizer
        self._size, self._heldout_fraction = size, heldout_fraction
        self._replica, self._stride = drawing["replica"], drawing["num_replicas"] or 1
        self.go_on(_Position(place=dict(BEGINNING), block=self._replica, last=tokenizer.eos_id))

    def go_on(self, position: _Position) -> None:
        """Continue from a position that was saved."""
        self.position = position
        self._blocks = self._source.blocks(self._size, position.place)
        self._after: Place = position.place
        self._next = position.at  # the number of the block that is read next
        self._tokens: NDArray[Any] | None = None  # of the block, once it has been read

    def resume_after(self, positions: Sequence[_Position]) -> None:
        """Continue after the furthest block that any of several replicas has begun."""
        begun = [each.block if each.offset else each.block - len(positions) for each in positions]
        block, last = max(begun) + 1 + self._replica, self._tokenizer.eos_id
        furthest, tokens = positions[begun.index(max(begun))], sum(each.tokens for each in positions) // self._stride
        self.go_on(msgspec.structs.replace(furthest, block=block, offset=0, last=last, tokens=tokens))

    def draw(self, length: int) -> NDArray[np.int64]:
        """Return the token before the next ones to draw, and those: ``(1 + length,)`` int64."""
        position, tokens, empty = self.position, [self.position.last], 0
        while len(tokens) <= length:
            if self._tokens is None:
                self._tokens = self._read()
            if position.offset > len(self._tokens):
                raise DataError(f"The source {self.name!r} has changed: there is no document at the saved position.")
            more = self._tokens[position.offset : position.offset + length + 1 - len(tokens)].tolist()
            tokens += more
            position.offset += len(more)
            if position.offset == len(self._tokens):
                empty = 0 if more else empty + 1
                position.block, position.offset, self._tokens = position.block + self._stride, 0, None
            if position.blocks is not None and empty > 2 * position.blocks + 1:
                raise DataError(
                    f"The source {self.name!r} has no documents to train on: all are empty or held out. Give more "
                    "text or a smaller data.heldout_fraction."
                )
        position.tokens, position.last = position.tokens + length, tokens[-1]
        return np.array(tokens, dtype=np.int64)

    def _read(self) -> NDArray[Any]:
        """Return the tokens of the block to draw from."""
        position, ends = self.position, 0
        records: list[str] = []
        while self._next <= position.block:
            place = self._after
            records, self._after = next(self._blocks)
            self._next += bool(records)
            ends = 0 if records else ends + 1
            if not records:
                position.blocks = position.blocks or self._next
            if ends > 1:
                raise DataError(f"The source {self.name!r} has no documents.")
        position.place, position.at = dict(place), position.block
        drawn = [text for text in records if text and not is_heldout(text, self._heldout_fraction)]
        return self._tokenizer.encode_documents(drawn)


class DocumentStream(Batches):
    """The `Batches` of one replica out of a fixed number.

    Args:
        sources: what to read, which may be shared by several streams.
        data: identifies sources, tokenizer and settings.
        size: records per block.
    """

    moves = ("drawn", "sources")

    def __init__(
        self,
        sources: Sequence[Source],
        tokenizer: Tokenizer,
        *,
        data: str,
        heldout_fraction: float,
        size: int = BLOCK,
        **drawing: Unpack[Drawing],
    ) -> None:
        super().__init__({"stream": data}, drawing)
        shared: Any = {"size": size, "heldout_fraction": heldout_fraction, "drawing": drawing}
        self._readers = [_Reader(source, tokenizer, **shared) for source in sources]
        self._drawn = 0

    def skip_batch(self) -> None:
        """Draw a batch and discard it."""
        self.next_batch()

    def resume_from(self, cursor_of: Callable[[int], Cursor], before: int) -> None:
        states = [cursor_of(replica) for replica in range(before)]
        for state in states:
            self._check(state, before)
        self._settle()
        self._drawn = states[0]["drawn"]
        for reader, *positions in zip(self._readers, *(state["sources"] for state in states), strict=True):
            reader.resume_after(read_message(positions, list[_Position]))

    def close(self) -> None:
        super().close()
        self._readers.clear()  # iterators of `datasets` that end with the interpreter print errors

    def _state(self) -> State:
        """Return cursor and epochs, which are 0 for a source until its end is first reached."""
        positions = {reader.name: reader.position for reader in self._readers}
        sources = [msgspec.structs.asdict(position) for position in positions.values()]
        cursor = {**self._origin, "drawn": self._drawn, "sources": sources}
        return cursor, {name: at.block / at.blocks if at.blocks else 0.0 for name, at in positions.items()}

    def _restore(self, state: Cursor) -> None:
        self._drawn = state["drawn"]
        for reader, position in zip(self._readers, read_message(state["sources"], list[_Position]), strict=True):
            reader.go_on(position)

    def _draw(self) -> Batch:
        before, _ = self._state()
        try:
            rows = []
            for _ in range(self._batch_size):  # each from the source that is furthest behind its weight
                reader = min(self._readers, key=lambda reader: reader.position.tokens / reader.weight)
                rows.append(reader.draw(self._length))
        except BaseException:
            self._restore(before)
            raise
        self._drawn += 1
        tokens = torch.from_numpy(np.stack(rows))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
