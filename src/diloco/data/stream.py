"""Batches of documents that are read, tokenised and packed during training.

`BLOCK` consecutive records of a source are a block. Block g belongs to replica ``g % M``, whatever the epoch: a replica
reads the source from beginning to end, skips the blocks of the others, shuffles each block of its own, and packs its
documents end to end, each followed by the end-of-document token. So every token is a target once. With several sources,
the next document comes from the one that has drawn the fewest tokens relative to its weight.

Another number of replicas continues after the furthest block that any replica has begun: no token is read a second
time, and what others had not read by then waits for the next epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, Unpack

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from diloco.data.hub import open_data_set, rows_of
from diloco.data.loader import Batch, Batches, Cursor, Drawing, State
from diloco.data.order import Assignment, permute, read_message
from diloco.data.settings import HUB_PREFIX, SourceSettings
from diloco.data.text import is_heldout, read_documents, text_of, usable
from diloco.data.tokenizer import Tokenizer
from diloco.errors import ConfigurationError, DataError

__all__ = ["BLOCK", "DocumentStream", "Source"]

BLOCK = 64  # documents that one replica is assigned at a time


Place: TypeAlias = Mapping[str, Any]  # a part of a source, the next row of it, and the state of its data set
BEGINNING: Place = MappingProxyType({"part": 0, "row": 0, "rows": None})


class Source:
    """The records of a source: its files and data sets one after the other, in the same order at every reading.

    Data sets are opened here, but nothing is read yet. A record without text is an empty string and no document.
    """

    def __init__(self, settings: SourceSettings) -> None:
        self.settings = settings
        self.parts: list[Any] = []  # paths, or a data set with its name
        for of_hub, places in groupby(settings.data or ("",), lambda place: place.startswith(HUB_PREFIX)):
            if of_hub:
                self.parts += [(place, open_data_set(place, settings)) for place in places]
            else:
                self.parts.append([Path(place) for place in places if place])

    def documents(self) -> Iterator[str]:
        """Yield every document; raise `DataError` if one can't be read."""
        for block, _ in self.blocks(100):
            if not block:
                return
            yield from filter(None, block)

    def blocks(self, size: int, place: Place = BEGINNING) -> Iterator[tuple[list[str], Place]]:
        """Yield the next records from a place on, fewer at the end of a part, and the place after them.

        None at the end, after which they begin again. A place is JSON; it can be continued from in blocks of one size.
        """
        while True:
            while place["part"] < len(self.parts):
                records, data_set = self._open(place, size)
                while block := list(islice(records, size)):
                    rows = data_set and data_set.state_dict()
                    place = {**place, "row": place["row"] + len(block), "rows": rows}
                    yield block, place
                place = {**BEGINNING, "part": place["part"] + 1}
            place = BEGINNING
            yield [], place

    def _open(self, place: Place, size: int) -> tuple[Iterator[str], Any]:
        part, settings = self.parts[place["part"]], self.settings
        if isinstance(part, list):
            return islice(read_documents(part, settings), place["row"], None), None
        name, whole = part
        data_set = whole.shard(num_shards=1, index=0)  # the whole, with a state of its own
        if place["rows"] is not None:
            data_set.load_state_dict(place["rows"])
        rows = rows_of(data_set, name, first=place["row"], size=size)
        return usable(rows, text_of(settings.text_field), "", skip_bad=settings.skip_bad), data_set


class _Position(msgspec.Struct, kw_only=True):
    """Where a replica is in a source; part of its cursor."""

    place: dict[str, Any]  # where block ``at`` begins
    at: int = 0
    block: int  # the block to draw from
    record: int = 0  # the next record of it to draw, in its shuffled order
    tokens: int = 0  # tokens drawn from this source so far
    blocks: int | None = None  # blocks per epoch, once the end was reached


class _Reader:
    """The documents of a source that one replica draws."""

    def __init__(
        self, source: Source, tokenizer: Tokenizer, *, size: int, heldout_fraction: float, drawing: Drawing
    ) -> None:
        self.name, self.weight = source.settings.name, source.settings.weight
        self._source, self._tokenizer = source, tokenizer
        self._size, self._heldout_fraction, self._seed = size, heldout_fraction, drawing["seed"]
        self._replica, self._stride = drawing["replica"], drawing["num_replicas"] or 1
        self.go_on(_Position(place=dict(BEGINNING), block=self._replica))

    def go_on(self, position: _Position) -> None:
        """Continue from a position that was saved."""
        self.position = position
        self._blocks = self._source.blocks(self._size, position.place)
        self._after: Place = position.place
        self._next = position.at  # the number of the block that is read next
        self._documents: list[NDArray[Any]] | None = None  # of the block, once they have been read

    def resume_after(self, positions: Sequence[_Position]) -> None:
        """Continue after the furthest block that any of several replicas has begun."""
        furthest = max(positions, key=lambda position: position.block)
        tokens = sum(position.tokens for position in positions) // self._stride
        block = furthest.block + 1 + self._replica
        self.go_on(msgspec.structs.replace(furthest, block=block, record=0, tokens=tokens))

    def document(self, token: int = 0) -> NDArray[Any]:
        """Return the tokens of the document to draw, with its end; ``token`` is the next one of it to draw."""
        position, passed = self.position, 0
        while True:
            if self._documents is None:
                self._documents = self._read()
            if token and token >= sum(map(len, self._documents[position.record :][:1])):
                raise DataError(f"The source {self.name!r} has changed: there is no document at the saved position.")
            for record in range(position.record, len(self._documents)):
                position.record = record
                if len(self._documents[record]):
                    return self._documents[record]
            position.block, position.record, self._documents = position.block + self._stride, 0, None
            passed += 1
            if position.blocks is not None and passed > 2 * position.blocks + 1:
                raise DataError(
                    f"The source {self.name!r} has no documents to train on: all are empty or held out. Give more "
                    "text or a smaller data.heldout_fraction."
                )

    def _read(self) -> list[NDArray[Any]]:
        """Return the tokens of each record of the block in its shuffled order; a record that is not drawn has none."""
        position, ends = self.position, 0
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
        key = f"seed {self._seed}, {self.name}, block {position.block}"
        texts = [records[number] for number in permute(np.arange(len(records)), len(records), key).tolist()]
        drawn = [bool(text) and not is_heldout(text, self._heldout_fraction) for text in texts]
        packed = self._tokenizer.encode_documents([text for text, use in zip(texts, drawn, strict=True) if use])
        ends_at = (np.flatnonzero(packed == self._tokenizer.eos_id) + 1).tolist()
        documents = iter(np.split(packed, ends_at[:-1]))
        return [next(documents) if use else packed[:0] for use in drawn]


class DocumentStream(Batches):
    """The `Batches` of one replica out of a fixed number.

    Args:
        sources: as `Source` opened them, which may be shared by several streams.
        data: identifies sources, tokenizer and settings; part of the cursor.
        size: records per block.
        heldout_fraction: the fraction of the documents that is held out of training.
        drawing: see `Drawing`.
    """

    moves = ("drawn", "source", "token", "sources")

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
        self._eos = np.array([tokenizer.eos_id], dtype=np.int64)
        shared: Any = {"size": size, "heldout_fraction": heldout_fraction, "drawing": drawing}
        self._readers = [_Reader(source, tokenizer, **shared) for source in sources]
        self._drawn = 0
        self._source: int | None = None  # that of the document that has been begun
        self._token = 0  # the next one of it to draw

    def skip_batch(self) -> None:
        """Draw a batch and discard it."""
        self.next_batch()

    def assign(self, assignment: Assignment) -> None:
        """Raise `ConfigurationError`: the members of a streaming run can't change."""
        self.join_at(assignment.from_step, "")

    def join_at(self, step: int, order: str) -> None:
        """Raise `ConfigurationError`: only a replica's own checkpoint records what it has read."""
        raise ConfigurationError(
            f"Replica {self._replica} can't join a run that streams its data, or see others join it, at step {step}: "
            "only each replica itself knows what it has read. Resume all replicas from their checkpoints, or use "
            "tokens made by `diloco tokenize`."
        )

    def resume_from(self, cursor_of: Callable[[int], Cursor], before: int) -> None:
        states = [cursor_of(replica) for replica in range(before)]
        for state in states:
            self._check(state, before)
        self._settle()
        self._drawn, self._source, self._token = states[0]["drawn"], None, 0
        for reader, *positions in zip(self._readers, *(state["sources"] for state in states), strict=True):
            reader.resume_after(read_message(positions, list[_Position]))

    def close(self) -> None:
        super().close()
        self._readers.clear()  # iterators of `datasets` that end with the interpreter print errors

    def _state(self) -> State:
        """Return cursor and epochs, which are 0 for a source until its end is first reached."""
        positions = {reader.name: reader.position for reader in self._readers}
        begun = {"drawn": self._drawn, "source": self._source, "token": self._token}
        cursor = {
            **self._origin,
            **begun,
            "sources": [msgspec.structs.asdict(position) for position in positions.values()],
        }
        return cursor, {name: at.block / at.blocks if at.blocks else 0.0 for name, at in positions.items()}

    def _restore(self, state: Cursor) -> None:
        self._drawn, self._source, self._token = state["drawn"], state["source"], state["token"]
        for reader, position in zip(self._readers, read_message(state["sources"], list[_Position]), strict=True):
            reader.go_on(position)

    def _draw(self) -> Batch:
        before, _ = self._state()
        try:
            pieces, missing = [self._last_token()], self._batch_size * self._length
            while missing:
                pieces.append(self._part_of_document(missing))
                missing -= len(pieces[-1])
        except BaseException:
            self._restore(before)
            raise
        stream = torch.from_numpy(np.concatenate(pieces).astype(np.int64, copy=False))
        self._drawn += 1
        inputs, targets = (part.reshape(self._batch_size, self._length).clone() for part in (stream[:-1], stream[1:]))
        return inputs, targets

    def _last_token(self) -> NDArray[Any]:
        """Return the token before the next one to draw, ``(1,)``."""
        if self._source is None:
            return self._eos
        return self._readers[self._source].document(self._token)[self._token - 1 : self._token]

    def _part_of_document(self, most: int) -> NDArray[Any]:
        """Return up to ``most`` of the next tokens, all of one document."""
        if self._source is None:  # the source that is furthest behind its weight
            drawn = [reader.position.tokens / reader.weight for reader in self._readers]
            self._source = drawn.index(min(drawn))
        reader = self._readers[self._source]
        document = reader.document(self._token)
        tokens = document[self._token : self._token + most]
        reader.position.tokens += len(tokens)
        self._token += len(tokens)
        if self._token == len(document):
            reader.position.record += 1
            self._source, self._token = None, 0
        return tokens
