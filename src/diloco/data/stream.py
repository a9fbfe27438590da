"""Batches of documents that are read, tokenised and packed during training.

The records of a source are numbered in its own order, and `streaming_block` consecutive ones are a block. Block g
belongs to replica ``g % M``, whatever the epoch: a replica reads the source from beginning to end, skips the blocks of
the others, shuffles each block of its own, and packs its documents end to end, each followed by the end-of-document
token. The result is cut into sequences, so every token is a target once. Replicas may be at different places.

With several sources, the next document comes from the source that has drawn the fewest tokens relative to its weight.
So weights count tokens, whatever the lengths of documents.

Another number of replicas continues after the furthest block that any replica has begun: no token is read a second
time, and what others had not read by then waits for the next epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from diloco.data.hub import open_data_set, rows_of
from diloco.data.loader import Batch, Cursor, Drawing, check_cursor
from diloco.data.order import Assignment, permute
from diloco.data.settings import HUB_PREFIX, SourceSettings
from diloco.data.text import checked_text, is_heldout, missing_field, read_documents, usable
from diloco.data.tokenizer import Tokenizer
from diloco.errors import ConfigurationError, DataError

__all__ = ["DocumentStream", "Records", "Source"]


class Source:
    """The records of a source: its files and data sets one after the other, in the same order at every reading.

    Data sets are opened here, but nothing is read yet. A record without text is an empty string and no document.
    """

    def __init__(self, settings: SourceSettings) -> None:
        self.settings = settings
        self.parts: list[Any] = []  # paths, or a data set with its name
        for of_hub, places in groupby(settings.data or ("",), lambda place: place.startswith(HUB_PREFIX)):
            if of_hub:
                self.parts += [(place, open_data_set(place, settings, settings.text_field)) for place in places]
            else:
                self.parts.append([Path(place) for place in places if place])

    def documents(self) -> Iterator[str]:
        """Yield every document; raise `DataError` if one can't be read."""
        records = Records(self)
        while block := records.read(100):
            yield from filter(None, block)


class Records:
    """Reads a source in blocks, from its beginning or any place on that was saved."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._records: Iterator[str] | None = None
        self._data_set: Any = None
        self._part = self._row = 0
        self._rows: Any = None  # the state of the data set after the last block

    def read(self, size: int) -> list[str]:
        """Return the next records, fewer at the end of a part; none at the end, after which they begin again."""
        while self._part < len(self._source.parts):
            self._records = self._records or self._open(size)
            try:
                block = list(islice(self._records, size))
            except BaseException:  # an iterator that has failed ends
                self._records = None
                raise
            if block:
                self._row += len(block)
                self._rows = self._data_set and self._data_set.state_dict()
                return block
            self.load_state_dict({"part": self._part + 1, "row": 0, "rows": None})
        self._part = 0
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the last block as JSON; it can be continued from in blocks of the same size."""
        return {"part": self._part, "row": self._row, "rows": self._rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._part, self._row, self._rows = state["part"], state["row"], state["rows"]
        self._records = self._data_set = None

    def _open(self, size: int) -> Iterator[str]:
        part, settings = self._source.parts[self._part], self._source.settings
        name = settings.text_field
        if isinstance(part, list):
            documents = read_documents(
                part, text_field=name, document_separator=settings.document_separator, skip_bad=settings.skip_bad
            )
            return islice(documents, self._row, None)

        def text_of(place: str, row: Mapping[str, Any]) -> str:
            if name not in row:
                raise missing_field(place, name, row)
            return checked_text(row[name], place, name)

        place, data_set = part
        self._data_set = data_set.shard(num_shards=1, index=0)  # the whole, with a state of its own
        if self._rows is not None:
            self._data_set.load_state_dict(self._rows)
        rows = rows_of(self._data_set, place, first=self._row, size=size)
        return usable(rows, text_of, "", skip_bad=settings.skip_bad)


class _Reader:
    """The documents of a source that one replica draws, and its position in them."""

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        *,
        size: int,
        heldout_fraction: float,
        seed: int,
        replica: int,
        num_replicas: int,
    ) -> None:
        self.name, self.weight = source.settings.name, source.settings.weight
        self.tokens = 0  # tokens drawn from this source so far
        self._records, self._next = Records(source), 0  # and the number of the block that is read next
        self._size, self._tokenizer = size, tokenizer
        self._heldout_fraction, self._seed = heldout_fraction, seed
        self._replica, self._stride = replica, num_replicas
        self._blocks: int | None = None  # blocks per epoch, once the end was reached
        self._block = replica  # the block to draw from
        self._record = 0  # the next record of it to draw, in its shuffled order
        self._place: dict[str, Any] = {}  # where it begins in the source
        self._documents: list[NDArray[Any]] | None = None  # its documents, once they have been read

    @property
    def epochs(self) -> float:
        return self._block / self._blocks if self._blocks else 0.0

    def document(self, token: int = 0) -> NDArray[Any]:
        """Return the tokens of the document to draw, with its end; ``token`` is the next one of it to draw."""
        passed = 0
        while True:
            if self._documents is None:
                self._documents = self._read()
            if token and token >= sum(map(len, self._documents[self._record :][:1])):
                raise DataError(
                    f"The source {self.name!r} has no document at the saved position: its text has changed."
                )
            for record in range(self._record, len(self._documents)):
                self._record = record
                if len(self._documents[record]):
                    return self._documents[record]
            self._block, self._record, self._documents = self._block + self._stride, 0, None
            passed += 1
            if self._blocks is not None and passed > 2 * self._blocks + 1:
                raise DataError(
                    f"The source {self.name!r} has no documents to train on: all are empty or held out. Give more "
                    "text or a smaller data.heldout_fraction."
                )

    def end_document(self) -> None:
        self._record += 1

    def state_dict(self) -> dict[str, Any]:
        begun = self._documents is not None
        return {
            "at": self._block if begun else self._next,  # the number of the block that begins at ``place``
            "place": self._place if begun else self._records.state_dict(),
            "block": self._block,
            "record": self._record,
            "tokens": self.tokens,
            "blocks": self._blocks,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next, self._block, self._record = state["at"], state["block"], state["record"]
        self.tokens, self._blocks = state["tokens"], state["blocks"]
        self._records.load_state_dict(state["place"])
        self._documents = None

    def resume_after(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue after the furthest block that any of several replicas has begun."""
        furthest = max(states, key=lambda state: int(state["block"]))
        tokens = sum(state["tokens"] for state in states) // self._stride
        block = furthest["block"] + 1 + self._replica
        self.load_state_dict({**furthest, "block": block, "record": 0, "tokens": tokens})

    def _read(self) -> list[NDArray[Any]]:
        """Return the tokens of each record of the block in its shuffled order; a record that is not drawn has none."""
        ends = 0
        while self._next <= self._block:
            place = self._records.state_dict()
            records = self._records.read(self._size)
            self._next += bool(records)
            ends = 0 if records else ends + 1
            if not records:
                self._blocks = self._blocks or self._next
            if ends > 1:
                raise DataError(f"The source {self.name!r} has no documents.")
        self._place = place
        order = permute(np.arange(len(records)), len(records), f"seed {self._seed}, {self.name}, block {self._block}")
        texts = [records[number] for number in order.tolist()]
        drawn = [bool(text) and not is_heldout(text, self._heldout_fraction) for text in texts]
        packed = self._tokenizer.encode_documents([text for text, use in zip(texts, drawn, strict=True) if use])
        ends_at = (np.flatnonzero(packed == self._tokenizer.eos_id) + 1).tolist()
        documents = iter(np.split(packed, ends_at[:-1]))
        return [next(documents) if use else packed[:0] for use in drawn]


class DocumentStream:
    """The `Batches` of one replica out of a fixed number.

    Args:
        sources: as `Source` opened them, which may be shared by several streams.
        data: identifies sources, tokenizer and settings; part of the cursor.
        size: records per block.
        heldout_fraction: the fraction of the documents that is held out of training.
        drawing: see `Drawing`.
    """

    order = ""

    def __init__(
        self,
        sources: Sequence[Source],
        tokenizer: Tokenizer,
        *,
        data: str,
        size: int,
        heldout_fraction: float,
        **drawing: Unpack[Drawing],
    ) -> None:
        self._replica, self._shape = drawing["replica"], (drawing["batch_size"], drawing["sequence_length"])
        self._origin = {name: value for name, value in drawing.items() if name not in ("replica", "sharding")}
        self._origin |= {"stream": data}
        self._eos = np.array([tokenizer.eos_id], dtype=np.int64)
        self._readers = [
            _Reader(
                source,
                tokenizer,
                size=size,
                heldout_fraction=heldout_fraction,
                seed=drawing["seed"],
                replica=self._replica,
                num_replicas=drawing["num_replicas"] or 1,
            )
            for source in sources
        ]
        self._drawn = 0
        self._source: int | None = None  # that of the document that has been begun
        self._token = 0  # the next one of it to draw

    @property
    def epochs(self) -> Mapping[str, float]:
        """Source -> how often all replicas together have read all of it; 0 until its end is first reached."""
        return {reader.name: reader.epochs for reader in self._readers}

    def next_batch(self) -> Batch:
        before = self.state_dict()
        try:
            pieces, missing = [self._last_token()], self._shape[0] * self._shape[1]
            while missing:
                pieces.append(self._draw(missing))
                missing -= len(pieces[-1])
        except BaseException:
            self.load_state_dict(before)
            raise
        stream = np.concatenate(pieces).astype(np.int64, copy=False)
        self._drawn += 1
        inputs, targets = stream[:-1].reshape(self._shape), stream[1:].reshape(self._shape)
        return torch.from_numpy(inputs.copy()), torch.from_numpy(targets.copy())

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

    def state_dict(self) -> dict[str, Any]:
        begun = {"drawn": self._drawn, "source": self._source, "token": self._token}
        return {**self._origin, **begun, "sources": [reader.state_dict() for reader in self._readers]}

    def load_state_dict(self, state: Cursor) -> None:
        check_cursor(state, self._origin, ("drawn", "source", "token", "sources"))
        self._drawn, self._source, self._token = state["drawn"], state["source"], state["token"]
        for reader, place in zip(self._readers, state["sources"], strict=True):
            reader.load_state_dict(place)

    def resume_from(self, cursor_of: Callable[[int], Cursor], before: int) -> None:
        states = [cursor_of(replica) for replica in range(before)]
        for state in states:
            check_cursor(state, {**self._origin, "num_replicas": before}, ("drawn", "source", "token", "sources"))
        self._drawn, self._source, self._token = states[0]["drawn"], None, 0
        for number, reader in enumerate(self._readers):
            reader.resume_after([state["sources"][number] for state in states])

    def close(self) -> None:
        self._readers.clear()  # iterators of `datasets` that end with the interpreter print errors

    def _last_token(self) -> NDArray[Any]:
        """Return the token before the next one to draw, ``(1,)``."""
        if self._source is None:
            return self._eos
        return self._readers[self._source].document(self._token)[self._token - 1 : self._token]

    def _draw(self, most: int) -> NDArray[Any]:
        """Return up to ``most`` of the next tokens, all of one document."""
        if self._source is None:  # the source that is furthest behind its weight
            drawn = [reader.tokens / reader.weight for reader in self._readers]
            self._source = drawn.index(min(drawn))
        reader = self._readers[self._source]
        document = reader.document(self._token)
        tokens = document[self._token : self._token + most]
        reader.tokens += len(tokens)
        self._token += len(tokens)
        if self._token == len(document):
            reader.end_document()
            self._source, self._token = None, 0
        return tokens
