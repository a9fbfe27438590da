"""One stripe of a payload link, which carries parts of messages in both directions, and the format of a part.

::

    1 byte   kind: b"D" for a part, b"Z" for a compressed part, b"A" for an acknowledgement
    8 bytes  tag of the message
    4 bytes  size of the message, 4 bytes offset of the part in it
    4 bytes  size of the data that follows

All numbers are big-endian. Fields that a kind does not use are zero. Sizes are checked before anything is allocated.
What is damaged on the way ends the connection, which is TLS.

Codecs use a fixed number of bits per value, but not all codes are equally frequent. The entropy coder of Zstandard, at
its fastest level that has one, saves 10 to 15 % of fp4 and 5 % of int8. Each part is compressed by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
import sys
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import zstandard

from diloco.errors import CodecError, TransportError
from diloco.transport.connections.pace import NEAR_S, TcpCounters, tcp_counters

if TYPE_CHECKING:
    from diloco.transport.connections.payload_link import PayloadLink


MOST_MESSAGE_BYTES, MOST_PART_BYTES = 1 << 30, 1 << 18
"""Larger messages and parts are refused."""

HEAD = struct.Struct(">cQIII")

_MOST_MESSAGES = 1 << 13  # of a round, from one peer: pieces of its contribution, and of its mean
LEAST_PART_BYTES = 4 << 10  # at half a megabit per second, which one of many connections has, this takes 0.07 s

_LEVEL = 1
_WORTH = 0.98  # a compressed part is sent only if it is at most this share of the part


class Head(NamedTuple):
    """The header of a part; an acknowledgement is a header without a body."""

    kind: bytes
    tag: int
    total: int = 0
    start: int = 0
    size: int = 0

    @property
    def valid(self) -> bool:
        """Whether this is the header of a part that lies within its message, neither being too large."""
        fits = self.start + self.size <= self.total <= MOST_MESSAGE_BYTES and self.size <= MOST_PART_BYTES
        return self.kind in (b"D", b"Z") and fits and (self.size > 0 or self.total == 0)

    def content(self, data: memoryview) -> memoryview | bytes:
        """Return the content of the part of which ``data`` arrived.

        >>> zeros = memoryview(bytes(1000))
        >>> part = Part(Outgoing(7, zeros, Future()), 0, zeros, compress(zeros))
        >>> part.head.kind, part.head.content(memoryview(part.body)) == bytes(1000)
        (b'Z', True)
        """
        if self.kind == b"D":
            return data
        most_bytes = min(self.total - self.start, MOST_PART_BYTES)
        try:
            size = zstandard.frame_content_size(data)
            if not 0 < size <= most_bytes:
                told = f"{size} bytes" if size >= 0 else "unknown size"
                raise TransportError(f"a compressed part of {told} arrived where 1 to {most_bytes} bytes are possible")
            return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise TransportError(f"a compressed part is damaged: {error}") from error


@dataclass(eq=False)
class Outgoing:
    tag: int
    data: memoryview
    sent: Future[None]  # resolved when the other side has the message
    missing: int = 0  # bytes that are not acknowledged yet
    cut: int = 0  # bytes that have been cut into parts


@dataclass(eq=False)
class Incoming:
    """A message that this rank waits for."""

    buffer: memoryview  # where it is stored
    received: Future[None]  # resolved when the buffer is filled
    missing: int  # bytes that have not arrived yet
    parts: dict[int, int] = field(default_factory=dict)  # start -> end of the parts that have arrived
    num_refused: int = 0  # number of wrong parts that have arrived

    def store(self, head: Head, data: memoryview) -> None:
        """Store a part that has not arrived before.

        Raises:
            TransportError: The part is wrong.
            CodecError: The message is.
        """
        size = len(self.buffer)
        if head.total != size:
            raise CodecError(f"a message of {head.total} bytes arrived where {size} bytes were expected")
        content = head.content(data)
        end = head.start + len(content)
        if len(content) < LEAST_PART_BYTES and end < size:  # tiny parts cost more than their data
            raise TransportError(f"a part of {len(content)} bytes arrived; only the last one may be that small")
        self.buffer[head.start : end] = content
        self.parts[head.start] = end
        self.missing -= len(content)
        if self.missing > 0:
            return
        starts = sorted(self.parts)
        ends = [self.parts[each] for each in starts]
        if starts != [0, *ends[:-1]] or ends[-1] != size:
            raise CodecError(f"the parts of a message of {size} bytes overlap")


@dataclass(eq=False)
class Early:
    """What has arrived for a round before its messages are known: little more than ``most_bytes``."""

    most_bytes: int
    parts: dict[tuple[int, int], tuple[Head, memoryview]] = field(default_factory=dict)  # by tag and start
    _bytes: int = 0

    def keep(self, head: Head, data: memoryview) -> None:
        """Keep a copy of a part that has not arrived before."""
        if (head.tag, head.start) in self.parts:
            return
        self._bytes += len(data)
        most_parts = 2 * self.most_bytes // LEAST_PART_BYTES + _MOST_MESSAGES  # each takes 650 bytes besides its data
        if self._bytes > 2 * self.most_bytes + MOST_PART_BYTES or len(self.parts) > most_parts:
            raise TransportError(f"more arrived early for a round than its {self.most_bytes} bytes")
        self.parts[head.tag, head.start] = head, memoryview(bytes(data))


@dataclass(eq=False)
class Part:
    """A range of a message that one connection carries."""

    message: Outgoing
    start: int
    data: memoryview
    body: memoryview | bytes  # what is sent: `data`, or `data` compressed
    acknowledged: bool = False

    @property
    def head(self) -> Head:
        kind = b"D" if self.body is self.data else b"Z"
        return Head(kind, self.message.tag, len(self.message.data), self.start, len(self.body))


def compress(data: memoryview) -> memoryview | bytes:
    found = zstandard.ZstdCompressor(level=_LEVEL).compress(data)
    return found if len(found) <= _WORTH * len(data) else data


def part_bytes(waiting_bytes: int, connections: int) -> int:
    """Return the size of the next part: smaller as less is left, so that all connections finish at about the same time.

    >>> part_bytes(1 << 30, 4), part_bytes(3_200_000, 16), part_bytes(50_000, 16)
    (262144, 100000, 4096)
    >>> part_bytes(50_000, 1)  # a single connection need not finish together with others
    262144
    """
    share = waiting_bytes // (2 * connections) if connections > 1 else MOST_PART_BYTES
    return max(LEAST_PART_BYTES, min(MOST_PART_BYTES, share))


_UNSENT_S = 0.02
"""A connection is free while the kernel holds back no more of what it was given than it sends in so many seconds. With
more, data would wait for a slow connection while others are free."""

_SLOW_BITS_PER_S = 2e9  # at a lower rate compression takes less than a third of a core
_MAX_PACING_RATE = 47  # a socket option of Linux that Python does not name: bytes per second, an unsigned long
_MOST_INT = (1 << 31) - 1  # that a socket option takes, such as a silence in ms
_NO_PACE = (1 << 8 * struct.calcsize("L")) - 1
_BUFFER_BYTES = 2 * (HEAD.size + MOST_PART_BYTES)  # receive buffer of a connection
_MOST_WOKEN_BYTES = 1 << 15  # less than any kernel's receive buffer, so that the threshold is always reached
_MOST_UNREAD_BYTES = 2 * MOST_PART_BYTES  # a part that is being sent, and acknowledgements
_RECORD_BYTES = 1 << 14  # longest TLS record; it can't be decrypted before all of it has arrived


class Stripe(asyncio.BufferedProtocol):
    """Takes over an open connection between two ranks that have introduced themselves."""

    MOST_FORGOTTEN = 1 << 11  # parts that were sent, are wanted no more, and fit into the buffers of any path

    def __init__(
        self, link: PayloadLink, transport: asyncio.Transport, silence_s: float, *, compresses: bool = True
    ) -> None:
        # resolved with the reason when the connection has ended
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.transport = transport
        self._socket = transport.get_extra_info("socket")  # not to be had any more from a TLS connection that has ended
        self._link = link
        # unacknowledged parts by tag and start; None: of a message that is no longer to be sent
        self._parts: dict[tuple[int, int], Part | None] = {}
        self.full = False  # whether the transport has paused writing
        self._compresses = compresses
        self._buffer = memoryview(b"")  # receive buffer
        self._begun = self._filled = 0  # start and end of the unprocessed data in it
        self._whole_bytes = HEAD.size  # size of the next item that can be processed
        self._pauses = False  # whether it reads nothing for a moment
        self._limits = (0.0, 0.0)
        self._most_unsent_bytes = math.inf  # unknown where this makes no difference
        self.near = False  # whether round trips are so short that nothing of this kind is worth while
        self._woken_bytes = 1  # bytes that must arrive before the kernel reports them
        # bytes of TLS that the kernel may have reported and that can't be decrypted yet
        self._held_bytes = _RECORD_BYTES if transport.get_extra_info("ssl_object") else 0
        self._tune(silence_s)
        transport.set_write_buffer_limits(high=1)  # TLS would never report 0 as exceeded

    def begin(self, already: bytes) -> None:
        """Start on a transport whose reading is paused. ``already`` is the data that was read from it before."""
        self._filled = len(already)
        self._buffer = memoryview(bytearray(max(_BUFFER_BYTES, self._filled)))
        self._buffer[: self._filled] = already
        self.transport.set_protocol(self)
        self._read_on()

    def end(self, why: str = "it ended") -> None:
        """Close the connection. The peer gets its unacknowledged parts again over others."""
        if not self.ended.done():
            self.ended.set_result(why)
            self._link.drop(self, list(filter(None, self._parts.values())), why)
        if self.full:
            with contextlib.suppress(AttributeError):  # raised by Python 3.11.2 for a TLS connection that has ended
                self.transport.abort()
        else:
            self.transport.close()  # flushes what was written, such as the last acknowledgements

    @property
    def is_free(self) -> bool:
        return not (self.full or self.transport.is_closing() or self.counters().unsent > self._most_unsent_bytes)

    @property
    def compresses(self) -> bool:
        return self._compresses and not self.near and self._link.pace.seen_bits_per_s < _SLOW_BITS_PER_S

    def write(self, part: Part) -> None:
        self._parts[part.message.tag, part.start] = part
        self.transport.writelines((HEAD.pack(*part.head), part.body))  # TLS copies nothing to join them

    def forget(self, messages: Collection[Outgoing]) -> None:
        """Release what was sent of these messages, as the other side may never acknowledge it."""
        self._parts |= {key: None for key, part in self._parts.items() if part and part.message in messages}
        most = self.MOST_FORGOTTEN  # counted only when there can be so many, since each part comes by here
        if len(self._parts) > most and [*self._parts.values()].count(None) > most:
            self.end("the other side does not acknowledge what it gets")

    def counters(self) -> TcpCounters:
        return tcp_counters(self._socket)

    def limit(self, bits_per_s: float, seen_bits_per_s: float) -> None:
        """Let the kernel send no faster than a pace, and hold back what it sends in a moment at the rate seen."""
        if self.near or (bits_per_s, seen_bits_per_s) == self._limits:
            return
        self._limits = bits_per_s, seen_bits_per_s
        self._most_unsent_bytes = seen_bits_per_s / 8 * _UNSENT_S
        if sys.platform == "linux":
            pace = struct.pack("L", _NO_PACE if math.isinf(bits_per_s) else int(bits_per_s / 8))
            with contextlib.suppress(OSError):  # the connection has ended
                self._socket.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, pace)

    def _tune(self, silence_s: float) -> None:
        if self._socket is None or self._socket.family not in (socket.AF_INET, socket.AF_INET6):
            return
        self._set(socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", int(1000 * silence_s))  # detects a dead path
        self._set(socket.SOL_SOCKET, "SO_KEEPALIVE", 1)  # detects it also at an end that has nothing to send
        for option in ("TCP_KEEPIDLE", "TCP_KEEPALIVE", "TCP_KEEPINTVL"):  # macOS calls the first one TCP_KEEPALIVE
            self._set(socket.IPPROTO_TCP, option, max(1, int(silence_s / 4)))
        self.near = 0 < self.counters().round_trip_s < NEAR_S

    def _set(self, level: int, option: str, value: int) -> None:
        """Set a socket option if this system has it and the connection is open."""
        with contextlib.suppress(OSError, AttributeError):
            self._socket.setsockopt(level, getattr(socket, option), min(value, _MOST_INT))

    # Callbacks of the transport.

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(str(exc) or type(exc).__name__ if exc else "it ended")

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        self._link.wake()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self.ended.done():  # what still arrives is discarded
            return self._buffer
        if self._begun + self._whole_bytes > len(self._buffer):  # moves the unprocessed data to the front
            self._filled -= self._begun
            self._buffer[: self._filled] = self._buffer[self._begun : self._begun + self._filled]
            self._begun = 0
        return self._buffer[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Process all complete parts, and acknowledge them together.

        A write or a wake-up costs as much as copying many kilobytes. The kernel is therefore asked to report data only
        once most of the next part has arrived.
        """
        if self.ended.done():  # it is about to be closed
            return
        self._filled += nbytes
        taken: list[bytes] = []
        why = ""
        try:
            while not (self.ended.done() or self._pauses) and self._filled - self._begun >= self._whole_bytes:
                self._take_next(taken)
        except TransportError as error:
            why = str(error)
        except Exception as error:  # of ours; sending again what caused it would not help
            self._link.end(f"an internal error ({type(error).__name__}: {error})")
            return
        if taken and not self.transport.is_closing():
            self.transport.write(b"".join(taken))
            if self.transport.get_write_buffer_size() > _MOST_UNREAD_BYTES:
                why = why or "the other side does not read what it is told"
        if why:
            self.end(why)
        if self._begun == self._filled:
            self._begun = self._filled = 0
        missing_bytes = self._whole_bytes - (self._filled - self._begun)
        woken_bytes = max(1, min(missing_bytes - self._held_bytes, _MOST_WOKEN_BYTES))
        if woken_bytes != self._woken_bytes:
            self._woken_bytes = woken_bytes
            self._set(socket.SOL_SOCKET, "SO_RCVLOWAT", woken_bytes)

    def _read_on(self) -> None:
        self._pauses = False
        self.buffer_updated(0)
        if not (self._pauses or self.transport.is_closing()):
            self.transport.resume_reading()

    def _take_next(self, taken: list[bytes]) -> None:
        head, begun = Head._make(HEAD.unpack_from(self._buffer, self._begun)), self._begun + HEAD.size
        if head.kind == b"A":
            if (head.tag, head.start) not in self._parts:
                raise TransportError(f"part {head.start} of a message was acknowledged, but had not been sent")
            if part := self._parts.pop((head.tag, head.start)):
                self._link.acknowledge(part)
        elif not head.valid:
            words = f"an invalid part of kind {head.kind!r} arrived: {head.size} bytes at {head.start} of {head.total}"
            self._link.refuse(head, words)
        elif self._filled - begun < head.size:
            self._whole_bytes = HEAD.size + head.size
            return
        else:
            data = self._buffer[begun : begun + head.size]
            self._link.arrived(head, data)
            if (pause_s := self._link.pause_s(head.size)) > 0:
                self._pauses = True
                self.transport.pause_reading()
                self.ended.get_loop().call_later(pause_s, self._read_on)
            taken.append(HEAD.pack(*Head(b"A", head.tag, start=head.start)))
            begun += head.size
        self._begun, self._whole_bytes = begun, HEAD.size
