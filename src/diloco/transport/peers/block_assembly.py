"""A state that comes from several donors, block by block: who is asked for which block, and what has come. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from diloco.errors import TransportError
from diloco.transport.peers.state_wire import Description, block_bytes
from diloco.units import visible

__all__ = ["Assembly", "Block"]

_MOST_AHEAD_BYTES = 8 << 20
"""A donor is asked for at most so much at a time: about what is on its way on a long and wide link."""

_LEAST_AHEAD_BYTES = 2 << 20
"""What is on its way on a usual link; asked for less, a donor would be idle for a part of every round trip."""


@dataclass(eq=False)
class Block:
    """One block of a state."""

    index: int  # its place among the blocks
    start: int  # its bytes in the state
    end: int
    offset: int = 0  # bytes before this one have come
    senders: set[int] = field(default_factory=set)  # replicas that sent some of them
    checksum: Any = field(default_factory=xxhash.xxh3_64)

    def __post_init__(self) -> None:
        self.offset = self.start

    @property
    def missing_bytes(self) -> int:
        return self.end - self.offset

    def check(self, message: Mapping[str, Any], data: bytes) -> None:
        """Raise `TransportError` unless a chunk holds the next bytes of this block, as they were sent."""
        if message.get("offset") != self.offset or not 0 < len(data) <= self.missing_bytes:
            place = visible(str(message.get("offset")), 40)
            raise TransportError(f"{len(data)} bytes at {place} came where byte {self.offset} was next")
        if message.get("checksum") != xxhash.xxh3_64_hexdigest(data):
            raise TransportError(f"bytes {self.offset} to {self.offset + len(data)} were damaged on their way")

    def reset(self) -> None:
        """Forget what has come."""
        self.offset = self.start
        self.senders.clear()
        self.checksum.reset()


class Assembly:
    """Memory for a state, and its blocks that are still to come.

    Attributes:
        description: of the snapshot.
        state: filled as blocks come; valid once `complete`.
        waiting: blocks that no donor has been asked for.

    Raises:
        TransportError: if there is not enough memory.
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
        """Whether every block has come and matches its checksum."""
        return not self._missing

    def take(self, asked: Iterable[Block], num_donors: int) -> Block | None:
        """The next block to ask a donor for; None: it has enough to do.

        Args:
            asked: the blocks that it was asked for and has not sent.
            num_donors: that send. One is asked for a quarter of its share at a time, so that a quick donor still finds
                blocks later, but at least for what a usual link holds.
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
        """A donor does not send these after all; the bytes of them that have come stay."""
        self.waiting.extendleft(reversed(list(blocks)))

    def put(self, block: Block, data: bytes, sender: int) -> None:
        """Add the next bytes of a block.

        Raises:
            TransportError: if that completes the block and its checksum is wrong; it names all senders, and the block
                begins again.
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
                f"block {block.index} is not what its snapshot's digest {self.description.digest} names",
                replicas=senders,
            )
        self._missing -= 1
