"""The messages of one round between this rank and its peers: pieces of stretches of values, and their tags."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from diloco.algorithm.averaging import RoundId
from diloco.algorithm.codec import Codec
from diloco.errors import TransportError
from diloco.transport.connections.reliable_link import ReliableLink

__all__ = ["RoundMessages"]

_LEAST_PIECES, _LEAST_PIECE_BYTES = 16, 1 << 18
"""A payload is cut into so many pieces at least, so that summing begins early, unless they would be so small that what
each costs counts: a message, its acknowledgement, and a look at it. Links cut pieces into parts as they need them."""


@dataclass(eq=False)
class RoundMessages:
    """Sends and receives pieces of one round."""

    round_id: RoundId
    loop: asyncio.AbstractEventLoop  # in whose thread links are used
    piece_bytes: int  # about how large a piece is at most
    links: Mapping[int, ReliableLink] = field(default_factory=dict)  # replica -> the way to it
    _sends: list[Future[None]] = field(default_factory=list)

    def pieces(self, start: int, stop: int, codec: Codec) -> Iterator[tuple[int, int]]:
        """Stretches of values whose payloads are pieces, cut at blocks.

        The same on every replica, however many connections it has to each of the others.
        """
        even = math.ceil(codec.payload_bytes(stop - start) / _LEAST_PIECES)
        size = min(self.piece_bytes, max(_LEAST_PIECE_BYTES, even))
        step = max(1, size // codec.payload_bytes(codec.block_size)) * codec.block_size
        return ((low, min(low + step, stop)) for low in range(start, stop, step))

    def send(self, members: Iterable[int], payload: Tensor, piece: int, *, second: bool = False) -> None:
        """Start sending a contiguous CPU tensor, which must stay as it is until `finish`, to each of ``members``.

        Args:
            second: whether it belongs to the second half of a reduce-scatter.

        Raises:
            TransportError: if the transport was closed.
        """
        self._sends += self._begin(ReliableLink.send, members, payload, piece, second)

    def receive(self, member: int, room: Tensor, piece: int, *, second: bool = False) -> Future[None]:
        """Start receiving into ``room`` what ``member`` sends as this piece; else as `send`."""
        return self._begin(ReliableLink.receive, (member,), room, piece, second)[0]

    def _begin(
        self,
        act: Callable[[ReliableLink, int, memoryview, Future[None]], None],
        members: Iterable[int],
        values: Tensor,
        piece: int,
        second: bool,
    ) -> list[Future[None]]:
        """Have the links of ``members`` send or receive, in the loop's thread: now, where this is it.

        Tags have 31 bits: fragment 11, outer step 2 (no two rounds of a fragment are further apart), half 1, piece 17.
        Two messages of one tag would still arrive in the order sent.
        """
        round_tag = ((self.round_id.fragment + 1) % 2048) * 4 + self.round_id.outer_step % 4
        tag = (round_tag << 18) | (int(second) << 17) | piece
        data = values.detach().view(-1).numpy().data.cast("B") if values.numel() else memoryview(bytearray())
        works = {member: Future[None]() for member in members}

        def begin() -> None:
            for member, work in works.items():
                act(self.links[member], tag, data, work)

        if asyncio._get_running_loop() is self.loop:
            begin()
        else:
            try:
                self.loop.call_soon_threadsafe(begin)
            except RuntimeError as error:  # the loop is closed
                raise TransportError("a payload connection ended: the transport was closed") from error
        return list(works.values())

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
