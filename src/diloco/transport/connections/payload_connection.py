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
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import xxhash

from diloco.errors import TransportError
from diloco.transport.tcp import KEEPING_THEIR_RATE, NEAR_S, Counters

if TYPE_CHECKING:
    from diloco.transport.connections.reliable_link import ReliableLink

__all__ = ["HEAD", "Head", "Outgoing", "Part", "PayloadConnection", "part_bytes"]

_MAX_MESSAGE_BYTES, _MOST_PART_BYTES = 1 << 30, 1 << 18
"""What is larger is refused."""

HEAD = struct.Struct(">cQIIIIQ")
_LEAST_UNSENT_BYTES, _UNSENT_S = 1 << 14, 0.02
"""What the kernel may hold of a connection that it has not sent, beside so many seconds of what it sends: the others
could carry the rest."""

_TOO_SLOW = 16  # times slower than it once was; sharing a way with a few others does not make it that slow

_LEAST_PART_BYTES = 12 << 10  # less than TCP sends at once after a pause
_MOST_PART_S = 0.005  # where the pace is known: what leaves at once queues up
_ROOM_BYTES = 2 * (HEAD.size + _MOST_PART_BYTES)  # for what is read of a connection
_MOST_WOKEN_BYTES = 1 << 15  # less than the kernel has room for of any connection, so that they do come
_RECORD_BYTES = 1 << 14  # of TLS, the longest: what has come of one can't be deciphered before all of it has


class Head(NamedTuple):
    """What goes before a part, and all of an acknowledgement."""

    kind: bytes
    number: int
    tag: int = 0
    total: int = 0
    start: int = 0
    size: int = 0
    checksum: int = 0


@dataclass(eq=False)
class Outgoing:
    """A message to the other side."""

    tag: int
    data: memoryview
    sent: Future[None]  # done when the other side has it
    due_s: float = 0.0  # when it may leave, as of the loop's clock
    missing: int = 0  # bytes that the other side has not acknowledged
    number: int = 0  # once it is on its way
    cut: int = 0  # bytes that parts were made of


@dataclass(eq=False)
class Part:
    """A stretch of a message, as one connection carries it."""

    message: Outgoing
    start: int
    data: memoryview
    acknowledged: bool = False


def part_bytes(waiting_bytes: int, connections: int, bits_per_s: float = math.inf) -> int:
    """How much a connection that is free gets: the less is left, the smaller, so that all are done at about one time.

    Args:
        waiting_bytes: that no connection has taken yet.
        bits_per_s: at which payloads are to leave.

    >>> part_bytes(1 << 30, 4), part_bytes(3_200_000, 16), part_bytes(50_000, 16), part_bytes(1 << 30, 4, 1e8)
    (262144, 100000, 12288, 62500)
    >>> part_bytes(50_000, 1)  # there is no other one to be done with
    262144
    """
    share = waiting_bytes // (2 * connections) if connections > 1 else _MOST_PART_BYTES
    most = min(_MOST_PART_BYTES, share, bits_per_s / 8 * _MOST_PART_S)
    return max(_LEAST_PART_BYTES, int(most))


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
        self._room = memoryview(b"")  # for what is read
        self._begun = self._filled = 0  # where what has not been taken yet begins in it, and ends
        self._whole_bytes = HEAD.size  # of the next that can be taken
        self.waits = False  # until there is room for the part whose head has come
        self._unsent_bytes = 0  # that the kernel may hold; 0: as much as it likes
        self._fastest_bits_per_s = 0.0  # at which TCP has let it send
        self._woken_bytes = 1  # that come before the kernel tells of them
        # of TLS, that may not be deciphered yet, though the kernel has told of them
        self._held_bytes = _RECORD_BYTES if transport.get_extra_info("ssl_object") else 0
        self._tune(silence_s)
        transport.set_write_buffer_limits(high=1)  # 0 would be reached by nothing at all over TLS

    def begin(self, already: bytes) -> None:
        """Take over the connection, of which reading is paused and so much has been read."""
        self._filled = len(already)
        self._room = memoryview(bytearray(max(_ROOM_BYTES, self._filled)))
        self._room[: self._filled] = already
        self.transport.set_protocol(self)
        self.waits = True
        self.go_on_reading()

    def end(self, why: str = "it ended") -> None:
        """Close the connection; what it has not delivered goes to others."""
        if not self.ended.done():
            self.ended.set_result(why)
            self._link.drop(self, list(self._parts.values()), why)
        if self._full:
            self.transport.abort()
        else:
            self.transport.close()  # after what it has written, such as the last acknowledgements

    def write_next(self) -> bool:
        """Write a part of the link's, if this connection has room; whether it did."""
        if self._full or self.transport.is_closing() or (part := self._link.take()) is None:
            return False
        message, checksum = part.message, xxhash.xxh3_64_intdigest(part.data)
        head = Head(b"D", message.number, message.tag, len(message.data), part.start, len(part.data), checksum)
        self._parts[message.number, part.start] = part
        self.transport.write(b"".join((HEAD.pack(*head), part.data)))
        return True

    def want(self, connections: int) -> None:
        """Tell the other side how many connections the link should have."""
        if not self.transport.is_closing():
            self.transport.write(HEAD.pack(*Head(b"S", connections)))

    def go_on_reading(self) -> None:
        """There may be room by now for the part that waits."""
        if self.waits:
            self.waits = False
            self.buffer_updated(0)
            if not self.waits and not self.transport.is_closing():
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

    def notice(self, paced_bits_per_s: float) -> None:
        """Let TCP find out anew what the way carries, if it lets the connection send at a small part of what it once
        did: bbr sometimes takes a way for a slow one after losses, and needs seconds to find out otherwise."""
        self._fastest_bits_per_s = max(self._fastest_bits_per_s, paced_bits_per_s)
        if paced_bits_per_s >= self._fastest_bits_per_s / _TOO_SLOW:
            return
        self._fastest_bits_per_s = paced_bits_per_s  # a way that has really become slower is tried once
        with contextlib.suppress(OSError, AttributeError):
            connection, option = self.transport.get_extra_info("socket"), socket.TCP_CONGESTION
            control = connection.getsockopt(socket.IPPROTO_TCP, option, 16).rstrip(b"\0")
            if control.decode("ascii") in KEEPING_THEIR_RATE:  # others are slow for a loss, and stay so
                for each in (b"reno", control):  # setting what is set changes nothing
                    connection.setsockopt(socket.IPPROTO_TCP, option, each)

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
        if self.ended.done():  # what comes now is dropped
            return self._room
        if self._begun + self._whole_bytes > len(self._room):  # what is there of it moves to the front
            self._filled -= self._begun
            self._room[: self._filled] = self._room[self._begun : self._begun + self._filled]
            self._begun = 0
        return self._room[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Take all that is there whole, and acknowledge parts together: each write and each wake-up costs as much as
        the copying of many kilobytes. The kernel is to tell of what comes once most of the next part is there."""
        if self.ended.done():  # it is about to be closed
            return
        self._filled += nbytes
        taken: list[bytes] = []
        why = ""
        try:
            while not (self.waits or self.ended.done()) and self._filled - self._begun >= self._whole_bytes:
                self._take_next(taken)
        except TransportError as error:
            why = str(error)
        if taken and not self.transport.is_closing():
            self.transport.write(b"".join(taken))
        if why:
            self.end(why)
        if self._begun == self._filled:
            self._begun = self._filled = 0
        missing_bytes = self._whole_bytes - (self._filled - self._begun)
        woken_bytes = max(1, min(missing_bytes - self._held_bytes, _MOST_WOKEN_BYTES))
        if woken_bytes != self._woken_bytes:
            self._woken_bytes = woken_bytes
            self._set(socket.SOL_SOCKET, "SO_RCVLOWAT", woken_bytes)

    def _take_next(self, taken: list[bytes]) -> None:
        head, begun = Head._make(HEAD.unpack_from(self._room, self._begun)), self._begun + HEAD.size
        fits = head.start + head.size <= head.total <= _MAX_MESSAGE_BYTES and head.size <= _MOST_PART_BYTES
        if head.kind == b"A":
            if (part := self._parts.pop((head.number, head.start), None)) is None:
                raise TransportError(
                    f"part {head.start} of message {head.number}, which was not sent, was acknowledged"
                )
            self._link.acknowledge(part)
        elif head.kind == b"S":
            self._link.wanted = head.number
        elif head.kind != b"D" or not fits or head.size == 0 < head.total:
            raise TransportError(f"a part {head.kind!r} of {head.size} bytes at {head.start} of {head.total} came")
        elif not self._link.has_room(head):
            self.waits = True
            self.transport.pause_reading()
            return
        elif self._filled - begun < head.size:
            self._whole_bytes = HEAD.size + head.size
            return
        else:
            data = self._room[begun : begun + head.size]
            if xxhash.xxh3_64_intdigest(data) != head.checksum:
                raise TransportError(f"message {head.number} was damaged on its way")
            self._link.arrived(head, data)
            taken.append(HEAD.pack(*Head(b"A", head.number, start=head.start)))
            begun += head.size
        self._begun, self._whole_bytes = begun, HEAD.size
