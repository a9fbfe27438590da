"""The messages of one round between this rank and its peers: pieces of stretches of values, and their tags."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from diloco.algorithm.averaging import RoundId
from diloco.algorithm.codec import Codec
from diloco.errors import TransportError
from diloco.transport.peers.payload_links import SendQueue
from diloco.transport.peers.reliable_link import ReliableLink

__all__ = ["RoundMessages", "message_tag"]

_LEAST_PIECES, _LEAST_PIECE_BYTES = 16, 1 << 18
"""A payload is cut into so many pieces at least, so that summing begins early, unless they would be so small that what
each costs counts: a message, its acknowledgement, and a look at it. Links cut pieces into parts as they need them."""


@dataclass(eq=False)
class RoundMessages:
    """Sends and receives pieces of one round."""

    round_id: RoundId
    links: Mapping[int, ReliableLink]  # replica -> the way to it
    queue: SendQueue | None  # through which messages go where links are paced
    piece_bytes: int  # about how large a piece is at most
    _sends: list[Future[None]] = field(default_factory=list)

    def pieces(self, start: int, stop: int, codec: Codec) -> Iterator[tuple[int, int]]:
        """Stretches of values whose payloads are pieces, cut at blocks.

        The same on every replica, however many connections it has to each of the others.
        """
        even = math.ceil(codec.payload_bytes(stop - start) / _LEAST_PIECES)
        size = min(self.piece_bytes, max(_LEAST_PIECE_BYTES, even))
        step = max(1, size // codec.payload_bytes(codec.block_size)) * codec.block_size
        return ((low, min(low + step, stop)) for low in range(start, stop, step))

    def send(self, member: int, payload: Tensor, piece: int, *, second: bool = False) -> None:
        """Start sending a contiguous CPU tensor, which must stay as it is until `finish`.

        Args:
            second: whether it belongs to the second half of a reduce-scatter.

        Raises:
            TransportError: if the link has ended.
        """
        tag = message_tag(self.round_id, piece, second)
        link = self.links[member]
        self._sends.append(self.queue.send(link, payload, tag) if self.queue else link.send(payload, tag))

    def receive(self, member: int, room: Tensor, piece: int, *, second: bool = False) -> Future[None]:
        """Start receiving into ``room`` what ``member`` sends as this piece.

        Raises:
            TransportError: if the link has ended.
        """
        return self.links[member].receive(room, message_tag(self.round_id, piece, second))

    def wait(self, member: int, come: Future[None]) -> None:
        """Wait until a message of ``member`` has come.

        Raises:
            TransportError: if the link ended; it names the replica.
        """
        try:
            come.result()
        except TransportError as error:
            raise TransportError(f"the payloads of replica {member} stopped: {error}", replicas=[member]) from error

    def finish(self) -> None:
        """Wait until everything has been sent; its memory is free then.

        Raises:
            TransportError: if a link ended.
        """
        for sent in self._sends:
            sent.result()


def message_tag(round_id: RoundId, piece: int, second: bool) -> int:
    """31 bits: fragment 11, outer step 2 (no two rounds of a fragment are further apart), half 1, piece 17.

    Two messages of one tag would still arrive in the order sent.
    """
    return ((((round_id.fragment + 1) % 2048) * 4 + round_id.outer_step % 4) << 18) | (int(second) << 17) | piece
