"""The messages of one round between this rank and its peers: pieces of stretches of values, and their tags."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from torch import Tensor

from diloco.algorithm.averaging import RoundId
from diloco.algorithm.codec import Codec
from diloco.errors import TransportError
from diloco.transport.peers.data_link import DataLink, Work
from diloco.transport.peers.payload_links import SendQueue

__all__ = ["RoundMessages", "message_tag"]

_LEAST_PIECES, _LEAST_PIECE_BYTES = 16, 1 << 16
"""A payload is cut into so many pieces at least, so that summing begins early, unless they would be so small that what
each costs counts: a message, its acknowledgement, and a look at it. Links cut pieces into parts as they need them."""


class RoundMessages:
    """Sends and receives pieces of one round.

    Args:
        links: replica -> the way to it.
        queue: through which messages go where links are paced.
        piece_bytes: about how large a piece is at most.
    """

    def __init__(
        self, round_id: RoundId, links: Mapping[int, DataLink], queue: SendQueue | None, piece_bytes: int
    ) -> None:
        self.links = links
        self._round_id = round_id
        self._queue = queue
        self._piece_bytes = piece_bytes
        self._sends: list[Work] = []
        self._waited_for: set[int] = set()  # receives by `id`: gloo's can't be waited for twice

    def pieces(self, start: int, stop: int, codec: Codec) -> Iterator[tuple[int, int]]:
        """Stretches of values whose payloads are pieces, cut at blocks; the same on every replica."""
        size = _piece_size(codec.payload_bytes(stop - start), self._piece_bytes)
        step = max(1, size // codec.payload_bytes(codec.block_size)) * codec.block_size
        return ((low, min(low + step, stop)) for low in range(start, stop, step))

    def send(self, member: int, payload: Tensor, piece: int, *, second: bool = False) -> None:
        """Start sending a contiguous CPU tensor, which must stay as it is until `finish`.

        Args:
            second: whether it belongs to the second half of a reduce-scatter.

        Raises:
            TransportError: if the link has ended.
        """
        tag = message_tag(self._round_id, piece, second)
        link = self.links[member]
        self._sends.append(self._queue.send(link, payload, tag) if self._queue else link.send(payload, tag))

    def receive(self, member: int, room: Tensor, piece: int, *, second: bool = False) -> Work:
        """Start receiving into ``room`` what ``member`` sends as this piece.

        Raises:
            TransportError: if the link has ended.
        """
        return self.links[member].receive(room, message_tag(self._round_id, piece, second))

    def wait(self, member: int, work: Work) -> None:
        """Wait until a message of ``member`` has come, unless that was waited for before.

        Raises:
            TransportError: if the link ended; it names the replica.
        """
        if id(work) in self._waited_for:
            return
        self._waited_for.add(id(work))
        try:
            work.wait()
        except TransportError as error:
            raise TransportError(f"the payloads of replica {member} stopped: {error}", replicas=[member]) from error

    def finish(self) -> None:
        """Wait until everything has been sent; its memory is free then.

        Raises:
            TransportError: if a link ended.
        """
        for work in self._sends:
            work.wait()


def _piece_size(payload_bytes: int, piece_bytes: int) -> int:
    """The same on every replica, however many streams it has to each of the others.

    >>> _piece_size(50_000_000, 524_288), _piece_size(3_200_000, 524_288), _piece_size(50_000, 524_288)
    (524288, 200000, 65536)
    """
    return min(piece_bytes, max(_LEAST_PIECE_BYTES, math.ceil(payload_bytes / _LEAST_PIECES)))


def message_tag(round_id: RoundId, piece: int, second: bool) -> int:
    """31 bits: fragment 11, outer step 2 (no two rounds of a fragment are further apart), half 1, piece 17.

    Two messages of one tag would still arrive in the order sent.
    """
    return ((((round_id.fragment + 1) % 2048) * 4 + round_id.outer_step % 4) << 18) | (int(second) << 17) | piece
