"""One connection that carries parts of messages, both ways.

::

    1 byte   b"D" a part, b"A" the acknowledgement of one, b"S" how many connections the sender wants
    8 bytes  number of the message (of b"S": of connections)
    4 bytes  tag, 4 bytes size of the message
    4 bytes  where in it the part begins, 4 bytes size of the part
    8 bytes  XXH3 of the part, which follows

All numbers are big-endian; what a kind does not use is zero. Sizes are checked before anything is allocated.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import xxhash

from diloco.errors import TransportError
from diloco.transport.tcp import NEAR_S, Counters

if TYPE_CHECKING:
    from diloco.transport.peers.reliable_link import ReliableLink

__all__ = ["MAX_MESSAGE_BYTES", "MOST_PART_BYTES", "Head", "Part", "PayloadConnection"]

MAX_MESSAGE_BYTES, MOST_PART_BYTES = 1 << 30, 1 << 18
"""What is larger is refused."""

_HEAD = struct.Struct(">cQIIIIQ")
_LEAST_UNSENT_BYTES, _UNSENT_S = 1 << 14, 0.02
"""What the kernel may hold of a connection that it has not sent, beside so many seconds of what it sends: the others
could carry the rest."""


class Head(NamedTuple):
    """What goes before a part, and all of an acknowledgement."""

    kind: bytes
    number: int
    tag: int = 0
    total: int = 0
    start: int = 0
    size: int = 0
    checksum: int = 0

    def pack(self) -> bytes:
        return _HEAD.pack(*self)

    @property
    def of_a_part(self) -> bool:
        """Whether a part can have it."""
        fits = self.start + self.size <= self.total <= MAX_MESSAGE_BYTES and self.size <= MOST_PART_BYTES
        return self.kind == b"D" and fits and (self.size > 0 or self.total == 0)


@dataclass(eq=False)
class Part:
    """A stretch of a message, as one connection carries it."""

    head: Head
    data: memoryview
    acknowledged: bool = False


class PayloadConnection(asyncio.BufferedProtocol):
    """Takes over a connection whose ends know each other.

    Args:
        link: whose parts it carries.
        transport: of the connection.
        silence_s: a connection on which TCP acknowledges nothing for so long ends.

    Attributes:
        ended: gets the reason when the connection has ended.
    """

    def __init__(self, link: ReliableLink, transport: asyncio.Transport, silence_s: float) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.transport = transport
        self._link = link
        self._parts: dict[tuple[int, int], Part] = {}  # by message and start: written, and not acknowledged
        self._full = False
        self._head_bytes = bytearray(_HEAD.size)
        self._body_bytes = bytearray()
        self._head: Head | None = None
        self._into = memoryview(self._head_bytes)
        self._filled = 0
        self._waits = False  # until there is room for the part whose head has come
        self._already = b""  # read by others before, and not looked at yet
        self._unsent_bytes = 0  # that the kernel may hold; 0: as much as it likes
        self._tune(silence_s)
        transport.set_write_buffer_limits(high=1)  # 0 would be reached by nothing at all over TLS

    def begin(self, already: bytes) -> None:
        """Take over the connection, of which reading is paused and so much has been read."""
        self._already = already
        self.transport.set_protocol(self)
        self._read_on()

    def end(self, why: str = "it ended") -> None:
        """Close the connection; what it has not delivered goes to others."""
        if not self.ended.done():
            self.ended.set_result(why)
            self._link.drop(self, list(self._parts.values()), why)
        self._filled, self._already = 0, b""  # in case more is read before it is closed
        if self._full:
            self.transport.abort()
        else:
            self.transport.close()  # after what it has written, such as the last acknowledgements

    def write_next(self) -> bool:
        """Write a part of the link's, if this connection has room; whether it did."""
        if self._full or self.transport.is_closing() or (part := self._link.take()) is None:
            return False
        head = part.head._replace(checksum=xxhash.xxh3_64_intdigest(part.data))
        self._parts[head.number, head.start] = part
        self.transport.write(b"".join((head.pack(), part.data)))
        return True

    def want(self, connections: int) -> None:
        """Tell the other side how many connections the link should have."""
        if not self.transport.is_closing():
            self.transport.write(Head(b"S", connections).pack())

    def go_on_reading(self) -> None:
        """There may be room by now for the part that waits."""
        try:
            has_room = self._waits and self._head is not None and self._link.inbox.has_room(self._head)
        except TransportError as error:  # the message has begun otherwise over another connection
            self.end(str(error))
            return
        if has_room:
            self._waits = False
            self._read_on()

    def _read_on(self) -> None:
        while self._already and not self._waits:
            size = min(len(self._already), len(self._into) - self._filled)
            self._into[self._filled : self._filled + size] = self._already[:size]
            self._already = self._already[size:]
            self.buffer_updated(size)
        if not self._waits and not self.transport.is_closing():
            self.transport.resume_reading()

    def counters(self) -> Counters | None:
        """What the kernel tells of this connection."""
        return Counters.of(self.transport.get_extra_info("socket"))

    def keep_pace(self, bytes_per_s: float) -> None:
        """Let the kernel hold no more of what it has not sent than a connection of this rate needs."""
        unsent_bytes = max(_LEAST_UNSENT_BYTES, 1 << round(math.log2(1 + bytes_per_s * _UNSENT_S)))
        if self._unsent_bytes not in (0, unsent_bytes):
            self._unsent_bytes = unsent_bytes
            self._set(socket.IPPROTO_TCP, "TCP_NOTSENT_LOWAT", unsent_bytes)

    def _tune(self, silence_s: float) -> None:
        connection = cast("socket.socket | None", self.transport.get_extra_info("socket"))
        if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
            return
        self._set(socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", int(1000 * silence_s))  # a dead way is noticed
        self._set(socket.SOL_SOCKET, "SO_KEEPALIVE", 1)  # by the end that has nothing to send, too
        for option in ("TCP_KEEPIDLE", "TCP_KEEPALIVE", "TCP_KEEPINTVL"):  # the second one is macOS' name of the first
            self._set(socket.IPPROTO_TCP, option, max(1, int(silence_s / 4)))
        counters = self.counters()
        if counters is not None and counters.round_trip_s >= NEAR_S:
            self._unsent_bytes = _LEAST_UNSENT_BYTES
            self._set(socket.IPPROTO_TCP, "TCP_NOTSENT_LOWAT", self._unsent_bytes)

    def _set(self, level: int, option: str, value: int) -> None:
        """Where this system has it, and the connection is open."""
        with contextlib.suppress(OSError, AttributeError):
            self.transport.get_extra_info("socket").setsockopt(level, getattr(socket, option), value)

    # What the transport calls.

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(str(exc) or type(exc).__name__ if exc else "it ended")

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._link.wake()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._into[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._filled < len(self._into):
            return
        try:
            if self._head is None:
                self._take_head(Head._make(_HEAD.unpack(self._head_bytes)))
            else:
                self._take_part(self._head, self._into)
        except TransportError as error:
            self.end(str(error))

    def _take_head(self, head: Head) -> None:
        if head.kind == b"A":
            if (part := self._parts.pop((head.number, head.start), None)) is None:
                raise TransportError(
                    f"part {head.start} of message {head.number}, which was not sent, was acknowledged"
                )
            self._link.acknowledge(part)
        elif head.kind == b"S":
            self._link.wanted = head.number
        elif not head.of_a_part:
            raise TransportError(f"a part {head.kind!r} of {head.size} bytes at {head.start} of {head.total} came")
        self._filled = 0
        if head.kind != b"D":
            return
        if not self._link.inbox.has_room(head):
            self._waits = True
            self.transport.pause_reading()
        if len(self._body_bytes) < head.size:
            self._body_bytes = bytearray(MOST_PART_BYTES)
        self._head = head
        self._into = memoryview(self._body_bytes)[: head.size]
        if head.size == 0:
            self._take_part(head, self._into)

    def _take_part(self, head: Head, data: memoryview) -> None:
        if xxhash.xxh3_64_intdigest(data) != head.checksum:
            raise TransportError(f"message {head.number} was damaged on its way")
        self._link.inbox.arrived(head, data)
        self._head, self._filled = None, 0
        self._into = memoryview(self._head_bytes)
        if not self.transport.is_closing():
            self.transport.write(Head(b"A", head.number, start=head.start).pack())
