"""Read a source in blocks of documents, the unit that is assigned to a replica of a streaming run.

The records of a source are numbered from 0 in its own order, and `BlockReader.size` consecutive records are a block.
Epochs follow each other without a gap: if an epoch has n blocks, block g is block ``g % n`` of epoch ``g // n``. The
number of blocks becomes known when the end is first reached. Within a block, the records are shuffled anew in each
epoch. Blocks follow the order of the source.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from diloco.data.heldout import is_heldout
from diloco.data.order import permute
from diloco.data.packed import TokenArray
from diloco.data.sources import DocumentSource
from diloco.data.tokenizer import Tokenizer
from diloco.errors import DataError

__all__ = ["BlockReader"]


class BlockReader:
    """Reads blocks of a source and tokenises their training documents.

    Args:
        name: the name of the source, for messages and as part of the key of the shuffle.
        size: records per block.
        heldout_fraction: the fraction of the documents that is held out of training.
    """

    def __init__(
        self, source: DocumentSource, *, name: str, size: int, tokenizer: Tokenizer, heldout_fraction: float, seed: int
    ) -> None:
        self.name = name
        self.size = size
        self._blocks_at_once = None if source.size is None else -(-source.size // size)
        self.blocks = self._blocks_at_once  # per epoch, once known
        self._source = source
        self._tokenizer = tokenizer
        self._heldout_fraction = heldout_fraction
        self._seed = seed
        self._records: Iterator[str] | None = None
        self._next = 0
        self._check_blocks(source.size)

    def restore_blocks(self, blocks: int | None) -> None:
        """Restore the number of blocks per epoch of a cursor; None: only what the source itself reports is known."""
        self.blocks = self._blocks_at_once if blocks is None else blocks

    def read(self, block: int) -> list[TokenArray]:
        """Return the tokens of each record of a block, with the end-of-document token, in the order in which they are
        drawn.

        Records that are empty or held out have no tokens.

        Raises:
            DataError: the source cannot be read, or has no records.
        """
        records = self._records_of(block)
        order = permute(np.arange(len(records)), len(records), f"seed {self._seed}, {self.name}, block {block}")
        texts = [records[place] for place in order.tolist()]
        wanted = [bool(text) and not is_heldout(text, self._heldout_fraction) for text in texts]
        packed = self._tokenizer.encode_documents([text for text, use in zip(texts, wanted, strict=True) if use])
        ends = (np.flatnonzero(packed == self._tokenizer.eos_id) + 1).tolist()
        documents = iter(np.split(packed, ends[:-1]))
        nothing = packed[:0]
        return [next(documents) if use else nothing for use in wanted]

    def _records_of(self, block: int) -> list[str]:
        for _ in range(2):
            in_epoch = block % self.blocks if self.blocks else block
            records = self._take(in_epoch * self.size)
            if records:
                return records
            # The end was reached for the first time, so the number of blocks is known now.
        raise DataError(f"{self._called()} had {self.blocks} blocks and now ends before them: its text has changed.")

    def _take(self, first: int) -> list[str]:
        """Return the records of a block from number ``first`` on; none if the source ends before it."""
        anywhere = self._source.size is not None
        if self._records is None or self._next > first or (anywhere and self._next != first):
            self._next = first if anywhere else 0
            self._records = self._source.records(self._next)
        try:
            for _ in islice(self._records, first - self._next):
                self._next += 1
            records = list(islice(self._records, self.size)) if self._next == first else []
        except BaseException:  # the iterator ended, but not because the source did
            self._records = None
            raise
        self._next += len(records)
        if len(records) < self.size:
            self._records = None
            if self.blocks is None:
                self.blocks = -(-self._next // self.size)
                self._check_blocks(self._next)
        return records

    def _check_blocks(self, records: int | None) -> None:
        if records == 0:
            raise DataError(f"{self._called()} has no documents.")

    def _called(self) -> str:
        return f"The source {self.name!r}" if self.name else "The source"
