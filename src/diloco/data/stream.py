"""Batches of documents that are read, tokenised and packed during training.

Each source is divided into blocks of documents (see `diloco.data.block_reader`), and block g belongs to replica ``g %
M``. A replica reads its blocks in order, packs their documents end to end, each followed by the end-of-document token,
and cuts the result into sequences, so every token is a target once. Replicas may be at different places.

With several sources, the next document comes from the source that has drawn the fewest tokens relative to its weight.
So weights count tokens, whatever the lengths of documents.

The rest of a source is described by a few numbers: the next block, blocks begun and returned, and documents begun. When
another number of replicas resumes the run, these are merged and redistributed: no token is read a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from diloco.data.block_reader import BlockReader
from diloco.data.loader import Batch, Cursor, check_cursor
from diloco.data.order import Assignment
from diloco.errors import CheckpointError, ConfigurationError, DataError

__all__ = ["DocumentStream"]


@dataclass
class _Place:
    """The position of a replica in one source."""

    next: int  # the block to begin after the returned ones
    stride: int  # the distance to the block after that
    returned: list[tuple[int, int]] = field(default_factory=list)
    """(block, record): blocks that were begun, with the record to continue from; they are read first."""
    tokens: int = 0  # tokens drawn from this source so far
    blocks: int | None = None  # blocks per epoch, once known

    def to_message(self) -> dict[str, Any]:
        return {**vars(self), "returned": [list(each) for each in self.returned]}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> _Place:
        numbers = {name: message[name] for name in ("next", "stride", "tokens")}
        blocks, returned = message["blocks"], [(block, record) for block, record in message["returned"]]
        whole = [*numbers.values(), *(0 if blocks is None else blocks,), *(n for pair in returned for n in pair)]
        if not all(type(number) is int and number >= 0 for number in whole) or numbers["stride"] < 1:
            raise ValueError(f"{dict(message)!r:.200}")
        return cls(**numbers, returned=returned, blocks=blocks)


_Begun = tuple[int, int, int, int]
"""Source, block, record and token: a document whose tokens from this one on are still to be drawn."""


class DocumentStream:
    """The batches of one replica, as `Batches`.

    Args:
        data: identifies sources, tokenizer and settings; part of the cursor.
        eos_id: the token that ends a document, and also precedes the first one.
        sequence_length: tokens per sequence (L).
        batch_size: sequences per batch of this replica (B).
        num_replicas: M.
    """

    def __init__(
        self,
        readers: Sequence[BlockReader],
        weights: Sequence[float],
        *,
        data: str,
        eos_id: int,
        sequence_length: int,
        batch_size: int,
        replica: int,
        num_replicas: int,
    ) -> None:
        self._readers = tuple(readers)
        self._weights = tuple(weights)
        self._origin = {"stream": data, "sequence_length": sequence_length, "batch_size": batch_size}
        self._shape = batch_size, sequence_length
        self._eos_id = eos_id
        self._replica = replica
        self._num_replicas = num_replicas
        self._drawn = 0
        self._begun: list[_Begun] = []
        self._places = [_Place(next=replica, stride=num_replicas) for _ in self._readers]
        # (source, block) -> its documents: a cache
        self._read: dict[tuple[int, int], list[NDArray[Any]]] = {}

    @property
    def epochs(self) -> Mapping[str, float]:
        """Source -> how often all replicas together have read all of it; 0 until its end is first reached."""
        return {
            reader.name: place.next / reader.blocks if reader.blocks else 0.0
            for reader, place in zip(self._readers, self._places, strict=True)
        }

    @property
    def order(self) -> str:
        return ""

    def next_batch(self) -> Batch:
        """Return the next batch; if it cannot be read, the cursor does not move."""
        batch_size, length = self._shape
        before = list(self._begun), [replace(place, returned=list(place.returned)) for place in self._places]
        try:
            pieces, missing = [np.array([self._last_token()], dtype=np.int64)], batch_size * length
            while missing:
                tokens = self._draw(missing)
                pieces.append(tokens)
                missing -= len(tokens)
        except BaseException:
            self._begun, self._places = before
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
        raise ConfigurationError(
            "Replicas can't join or leave a run that streams its data, because only each replica itself knows what it "
            f"has read. Use tokens made by `diloco tokenize`. Nothing was assigned from step {assignment.from_step} on."
        )

    def join_at(self, step: int, order: str) -> None:
        """Raise `ConfigurationError`: only a replica's own checkpoint records what it has read."""
        raise ConfigurationError(
            f"Replica {self._replica} can't join a run that streams its data at step {step}, because the other "
            "replicas do not know what it has read. Resume all replicas from their checkpoints, or use tokens made by "
            "`diloco tokenize`."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor as JSON."""
        for place, reader in zip(self._places, self._readers, strict=True):
            place.blocks = reader.blocks
        return {
            **self._origin,
            "drawn": self._drawn,
            "begun": [list(each) for each in self._begun],
            "sources": [place.to_message() for place in self._places],
        }

    def load_state_dict(self, state: Cursor) -> None:
        """Continue after the batch after which ``state`` was saved, with the same number of replicas.

        Raises:
            CheckpointError: the cursor is malformed, or belongs to other data or another number of replicas. The cursor
                does not move.
        """
        drawn, begun, places = self._parsed(state)
        if any(place.stride != self._num_replicas for place in places):
            raise CheckpointError(
                f"The data cursor is of {places[0].stride} replicas, not of {self._num_replicas}. It was not loaded."
            )
        self._resume(drawn, begun, places)

    def resume_from(self, cursor_of: Callable[[int], Cursor], before: int) -> None:
        """Continue as `Batches.resume_from` describes; what all replicas left is redistributed by block or document."""
        parsed = [self._parsed(cursor_of(replica)) for replica in range(before)]
        drawn = [each[0] for each in parsed]
        if len(set(drawn)) > 1:
            raise CheckpointError(
                f"The cursors belong to different steps: the replicas had drawn {drawn} batches. None was loaded."
            )
        begun = sorted(document for _, documents, _ in parsed for document in documents)
        places = []
        for source in range(len(self._readers)):
            each = [place[source] for _, _, place in parsed]
            start = max(place.next for place in each)
            left = [entry for place in each for entry in place.returned]
            left += [(block, 0) for place in each for block in range(place.next, start, place.stride)]
            places.append(
                _Place(
                    next=start + self._replica,
                    stride=self._num_replicas,
                    returned=self._mine(sorted(left)),
                    tokens=sum(place.tokens for place in each) // self._num_replicas,
                    blocks=next((place.blocks for place in each if place.blocks is not None), None),
                )
            )
        self._resume(drawn[0], self._mine(begun), places)

    def close(self) -> None:
        """Do nothing: there is no background work."""

    def _mine(self, entries: list[Any]) -> list[Any]:
        return entries[self._replica :: self._num_replicas]

    def _resume(self, drawn: int, begun: list[_Begun], places: list[_Place]) -> None:
        self._drawn, self._begun, self._places = drawn, begun, places
        self._read.clear()
        for place, reader in zip(places, self._readers, strict=True):
            reader.restore_blocks(place.blocks)

    def _parsed(self, state: Cursor) -> tuple[int, list[_Begun], list[_Place]]:
        check_cursor(state, self._origin, ("drawn", "begun", "sources"))
        try:
            begun = [(source, block, record, token) for source, block, record, token in state["begun"]]
            places = [_Place.from_message(message) for message in state["sources"]]
            numbers = [state["drawn"], *(number for document in begun for number in document)]
            if len(places) != len(self._readers) or not all(type(n) is int and n >= 0 for n in numbers):
                raise ValueError(f"{numbers!r:.200}")
            if any(document[0] >= len(places) for document in begun):
                raise ValueError(f"{begun!r:.200}")
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"The data cursor is malformed: {error!r:.300}. It was not loaded.") from error
        return state["drawn"], begun, places

    def _last_token(self) -> int:
        """Return the token before the next one to draw."""
        if not self._begun or self._begun[0][3] == 0:
            return self._eos_id
        source, block, record, token = self._begun[0]
        return int(self._document(source, block, record)[token - 1])

    def _draw(self, most: int) -> NDArray[Any]:
        """Return up to ``most`` of the next tokens, all of one document."""
        if not self._begun:
            self._begun.append(self._next_document())
        source, block, record, token = self._begun[0]
        document = self._document(source, block, record)
        tokens = document[token : token + most]
        if token + len(tokens) < len(document):
            self._begun[0] = source, block, record, token + len(tokens)
        else:
            del self._begun[0]
        self._places[source].tokens += len(tokens)
        return tokens

    def _next_document(self) -> _Begun:
        """Begin a new document of the source that is furthest behind its weight."""
        drawn = [place.tokens / weight for place, weight in zip(self._places, self._weights, strict=True)]
        source = drawn.index(min(drawn))
        place, reader, passed = self._places[source], self._readers[source], 0
        while True:
            if not place.returned:
                place.returned.append((place.next, 0))
                place.next += place.stride
            block, first = place.returned[0]
            documents = self._block(source, block)
            for record in range(first, len(documents)):
                if len(documents[record]):
                    place.returned[0] = (block, record + 1)
                    return source, block, record, 0
            del place.returned[0]
            self._read.pop((source, block), None)
            passed += 1
            if reader.blocks is not None and passed > 2 * reader.blocks + 1:
                raise DataError(
                    f"The source {reader.name!r} has no documents to train on: all are empty or held out. Give more "
                    "text or a smaller data.heldout_fraction."
                )

    def _document(self, source: int, block: int, record: int) -> NDArray[Any]:
        documents = self._block(source, block)
        if record >= len(documents) or not len(documents[record]):
            raise DataError(
                f"The source {self._readers[source].name!r} has no document at the saved position (block {block}, "
                f"record {record}): its text has changed."
            )
        return documents[record]

    def _block(self, source: int, block: int) -> list[NDArray[Any]]:
        key = source, block
        if key not in self._read:
            needed = {(each[0], each[1]) for each in self._begun}
            needed |= {(s, place.returned[0][0]) for s, place in enumerate(self._places) if place.returned}
            for old in self._read.keys() - needed:
                del self._read[old]
            self._read[key] = self._readers[source].read(block)
        return self._read[key]
