"""A state on its way from several donors: who sends which block, and what has come. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import xxhash

from diloco.errors import TransportError
from diloco.transport.peers.state_wire import Description, block_bytes

__all__ = ["Stretch", "Transfer"]

_AHEAD_BYTES = 8 << 20
"""Asked of a donor before it comes, at most: about what is on its way on a long and wide link."""

_LEAST_AHEAD_BYTES = 2 << 20
"""What is on its way on a usual one; asked for less, a donor stands idle for a part of every round trip."""


@dataclass(eq=False)
class Stretch:
    """One block.

    Attributes:
        index: of the block.
        start, end: its bytes.
        offset: up to here they have come.
        senders: replicas that sent some of them.
    """

    index: int
    start: int
    end: int
    offset: int = 0
    senders: set[int] = field(default_factory=set)
    checksum: Any = field(default_factory=xxhash.xxh3_64)

    def __post_init__(self) -> None:
        self.offset = self.start

    @property
    def missing_bytes(self) -> int:
        return self.end - self.offset

    def begin_again(self) -> None:
        """Nothing of it has come."""
        self.offset = self.start
        self.senders.clear()
        self.checksum.reset()


class Transfer:
    """Room for a state, and the blocks that are still to come.

    Attributes:
        description: of the snapshot.
        state: filled as blocks come; to be used once `complete`.
        waiting: blocks that nobody has been asked for.

    Raises:
        TransportError: if there is not enough memory.
    """

    def __init__(self, description: Description) -> None:
        self.description = description
        self.state, self._values = description.allocate()
        size_bytes, step = description.size_bytes, block_bytes(description.size_bytes)
        starts = range(0, size_bytes, step)
        self.waiting = deque(Stretch(n, start, min(start + step, size_bytes)) for n, start in enumerate(starts))
        self._missing = len(self.waiting)

    @property
    def complete(self) -> bool:
        """Whether every block has come and is what the digest names."""
        return not self._missing

    def take(self, asked: Iterable[Stretch], sharers: int) -> Stretch | None:
        """The next block to ask a donor for, or None.

        Args:
            asked: what it is asked for and has not sent.
            sharers: donors that send; one is asked for a part of its share ahead, not for all of it.
        """
        if not self.waiting:
            return None
        ahead_bytes = sum(each.missing_bytes for each in asked)
        share_bytes = sum(each.missing_bytes for each in self.waiting) // sharers
        # A quarter of its share, so that who is quick finds something later, too; but what a long link holds, at least.
        allowed_bytes = min(_AHEAD_BYTES, max(_LEAST_AHEAD_BYTES, share_bytes // 4))
        if ahead_bytes and ahead_bytes + self.waiting[0].missing_bytes > allowed_bytes:
            return None
        return self.waiting.popleft()

    def give_back(self, stretches: Iterable[Stretch]) -> None:
        """Blocks that a donor does not send after all; what has come of them stays."""
        self.waiting.extendleft(reversed(list(stretches)))

    def put(self, stretch: Stretch, data: bytes, sender: int) -> None:
        """The next bytes of a block; its last ones end it.

        Raises:
            TransportError: if the block is another one than the digest names. It begins again, then.
        """
        self._values.write(stretch.offset, data)
        stretch.checksum.update(data)
        stretch.offset += len(data)
        stretch.senders.add(sender)
        if stretch.missing_bytes:
            return
        if stretch.checksum.hexdigest() != self.description.blocks[stretch.index]:
            senders = sorted(stretch.senders)
            stretch.begin_again()
            raise TransportError(
                f"block {stretch.index} is not what its snapshot's digest {self.description.digest} names",
                replicas=senders,
            )
        self._missing -= 1
