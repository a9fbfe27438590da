"""Assembling a state from blocks of several donors: which donor sends which block, and what has arrived. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import xxhash

from diloco.errors import TransportError
from diloco.transport.peers.state_wire import Description, block_bytes

__all__ = ["Assembly", "Block"]

_MOST_AHEAD_BYTES = 8 << 20
"""The most that is requested from one donor at a time: about what is in flight on a long link of high bandwidth."""

_LEAST_AHEAD_BYTES = 2 << 20
"""What is in flight on a typical link. With less requested, a donor would be idle during part of every round trip."""


@dataclass(eq=False)
class Block:
    """One block of a state, with its progress."""

    index: int  # position among the blocks
    start: int  # first byte in the state
    end: int  # one past the last byte
    offset: int = 0  # next byte to arrive
    senders: set[int] = field(default_factory=set)  # replicas that sent parts of it
    checksum: Any = field(default_factory=xxhash.xxh3_64)

    def __post_init__(self) -> None:
        self.offset = self.start

    @property
    def missing_bytes(self) -> int:
        return self.end - self.offset

    def check(self, offset: int, checksum: str, data: bytes) -> None:
        """Raise `TransportError` unless a chunk is undamaged and holds the next bytes of this block."""
        if offset != self.offset or not 0 < len(data) <= self.missing_bytes:
            raise TransportError(f"{len(data)} bytes at {offset} arrived where byte {self.offset} was next")
        if checksum != xxhash.xxh3_64_hexdigest(data):
            raise TransportError(f"bytes {self.offset} to {self.offset + len(data)} were damaged in transit")

    def reset(self) -> None:
        """Start over with an empty block."""
        self.offset = self.start
        self.senders.clear()
        self.checksum.reset()


class Assembly:
    """A state that is being received, and the blocks that are still missing.

    Attributes:
        description: The description of the snapshot.
        state: Filled as blocks arrive; valid once `complete`.
        waiting: Blocks that no donor has been asked for.

    Raises:
        TransportError: There is not enough memory.
    """

    def __init__(self, description: Description) -> None:
        self.description = description
        self.state, self._values = description.allocate()
        size_bytes, step = description.size_bytes, block_bytes(description.size_bytes)
        starts = range(0, size_bytes, step)
        self.waiting = deque(Block(n, start, min(start + step, size_bytes)) for n, start in enumerate(starts))
        self._missing = len(self.waiting)

    @property
    def complete(self) -> bool:
        """Whether every block has arrived and matches its checksum."""
        return not self._missing

    def take(self, asked: Iterable[Block], num_donors: int) -> Block | None:
        """Take the next block to request from a donor, or return None if the donor has enough to send.

        A donor is asked for a quarter of its share at a time, so that a fast donor still finds blocks later, but at
        least for as much as is in flight on a typical link.

        Args:
            asked: The blocks that were requested from the donor and have not arrived.
            num_donors: The number of donors that send.
        """
        if not self.waiting:
            return None
        ahead_bytes = sum(each.missing_bytes for each in asked)
        share_bytes = sum(each.missing_bytes for each in self.waiting) // num_donors
        allowed_bytes = min(_MOST_AHEAD_BYTES, max(_LEAST_AHEAD_BYTES, share_bytes // 4))
        if ahead_bytes and ahead_bytes + self.waiting[0].missing_bytes > allowed_bytes:
            return None
        return self.waiting.popleft()

    def give_back(self, blocks: Iterable[Block]) -> None:
        """Return blocks that a donor does not send after all. Bytes of them that have arrived are kept."""
        self.waiting.extendleft(reversed(list(blocks)))

    def put(self, block: Block, data: bytes, sender: int) -> None:
        """Add the next bytes of a block.

        Raises:
            TransportError: The block is complete and its checksum is wrong. The error names all its senders, and the
                block starts over.
        """
        self._values.write(block.offset, data)
        block.checksum.update(data)
        block.offset += len(data)
        block.senders.add(sender)
        if block.missing_bytes:
            return
        if block.checksum.hexdigest() != self.description.blocks[block.index]:
            senders = sorted(block.senders)
            block.reset()
            raise TransportError(
                f"block {block.index} does not match the digest {self.description.digest} of its snapshot",
                replicas=senders,
            )
        self._missing -= 1
