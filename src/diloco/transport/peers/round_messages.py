"""The messages of one round between this rank and its peers: how values are cut into pieces, and their tags."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from diloco.algorithm import Codec, RoundId
from diloco.errors import TransportError
from diloco.transport.connections.link import PeerLink, round_tag

__all__ = ["RoundMessages"]

_LEAST_PIECES, _LEAST_PIECE_BYTES = 16, 1 << 18
"""A payload is cut into at least this many pieces, so that summing starts early, unless they would be smaller than this
size. Each piece has a fixed cost: a message, an acknowledgement and a validation. Links cut pieces further into parts
as needed."""


@dataclass(eq=False)
class RoundMessages:
    """Sends and receives the pieces of one round."""

    view_id: int
    round_id: RoundId
    loop: asyncio.AbstractEventLoop  # links are used in its thread
    piece_bytes: int  # approximate upper limit on the size of a piece
    links: Mapping[int, PeerLink] = field(default_factory=dict)  # by replica
    _sends: list[Future[None]] = field(default_factory=list)

    def pieces(self, start: int, stop: int, codec: Codec) -> Iterator[tuple[int, int]]:
        """Cut a range of values into the ranges of its pieces, at block boundaries.

        The result is the same on every replica, regardless of its number of connections.
        """
        even = math.ceil(codec.payload_bytes(stop - start) / _LEAST_PIECES)
        size = min(self.piece_bytes, max(_LEAST_PIECE_BYTES, even))
        step = max(1, size // codec.payload_bytes(codec.block_size)) * codec.block_size
        return ((low, min(low + step, stop)) for low in range(start, stop, step))

    def send(self, members: Iterable[int], payload: Tensor, piece: int, *, second: bool = False) -> None:
        """Start sending a contiguous CPU tensor, which must not change until `finish`, to each of ``members``.

        Args:
            second: Whether the piece belongs to the second half of a reduce-scatter.

        Raises:
            TransportError: The transport was closed.
        """
        self._sends += self._begin(PeerLink.send, members, payload, piece, second)

    def receive(self, member: int, buffer: Tensor, piece: int, *, second: bool = False) -> Future[None]:
        """Start receiving a piece from ``member`` into ``buffer``. Otherwise as `send`."""
        return self._begin(PeerLink.receive, (member,), buffer, piece, second)[0]

    def _begin(
        self,
        act: Callable[[PeerLink, int, memoryview, Future[None]], None],
        members: Iterable[int],
        values: Tensor,
        piece: int,
        second: bool,
    ) -> list[Future[None]]:
        """Let the links of ``members`` send or receive, in the loop's thread: at once if this is that thread.

        A tag is that of the round, 1 bit for the half, and 16 bits for the piece.
        """
        tag = round_tag(self.view_id, self.round_id) << 17 | int(second) << 16 | piece
        data = values.detach().view(-1).numpy().data.cast("B") if values.numel() else memoryview(bytearray())
        works = {member: Future[None]() for member in members}

        def begin() -> None:
            for member, work in works.items():
                try:
                    act(self.links[member], tag, data, work)
                except Exception as error:  # the thread of the exchange waits for this
                    work.set_exception(error)

        if asyncio._get_running_loop() is self.loop:
            begin()
        else:
            try:
                self.loop.call_soon_threadsafe(begin)
            except RuntimeError as error:  # the loop is closed
                raise TransportError("a payload connection ended: the transport was closed") from error
        return list(works.values())

    def close(self) -> None:
        """Send and await nothing more, in the loop's thread; who waits is released."""
        for link in self.links.values():
            link.close_round(round_tag(self.view_id, self.round_id))

    def wait(self, member: int, received: Future[None]) -> None:
        """Wait until a message from ``member`` has arrived.

        Raises:
            TransportError: The link ended; the error names the replica.
            CancelledError: The round was cancelled.
        """
        try:
            received.result()
        except TransportError as error:
            raise TransportError(f"payloads of replica {member} can't arrive: {error}", replicas=[member]) from error

    def finish(self) -> None:
        """Wait until everything has been sent, so that its memory can be reused.

        Raises:
            TransportError: A link ended.
        """
        for sent in self._sends:
            sent.result()
