"""Messages of payload links, the parts into which they are cut, and the format of a part.

::

    1 byte   kind: b"D" for a part, b"Z" for a compressed part, b"A" for an acknowledgement
    8 bytes  number of the message
    4 bytes  tag, 4 bytes size of the message
    4 bytes  offset of the part in the message, 4 bytes size of the data that follows
    8 bytes  XXH3 of that data

All numbers are big-endian. Fields that a kind does not use are zero. Sizes are checked before anything is allocated.

Codecs use a fixed number of bits per value, but not all codes are equally frequent. The entropy coder of Zstandard, at
its fastest level that has one, saves 10 to 15 % of fp4 and 5 % of int8. Each part is compressed by itself.
"""

from __future__ import annotations

import struct
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import xxhash
import zstandard

from diloco.errors import TransportError

__all__ = [
    "HEAD",
    "LEAST_PART_BYTES",
    "MOST_PART_BYTES",
    "Head",
    "Incoming",
    "Outgoing",
    "Part",
    "compress",
    "part_bytes",
]

MAX_MESSAGE_BYTES, MOST_PART_BYTES = 1 << 30, 1 << 18
"""Larger messages and parts are refused."""

HEAD = struct.Struct(">cQIIIIQ")

LEAST_PART_BYTES = 12 << 10  # less than TCP's initial window, which it sends at once after a pause
_NOTHING = memoryview(b"")

_LEVEL = 1
_WORTH = 0.98  # a compressed part is sent only if it is at most this share of the part


class Head(NamedTuple):
    """The header of a part; an acknowledgement is a header without a body."""

    kind: bytes
    number: int
    tag: int = 0
    total: int = 0
    start: int = 0
    size: int = 0
    checksum: int = 0

    @property
    def valid(self) -> bool:
        """Whether this is the header of a part that lies within its message, neither being too large."""
        fits = self.start + self.size <= self.total <= MAX_MESSAGE_BYTES and self.size <= MOST_PART_BYTES
        return self.kind in (b"D", b"Z") and fits and (self.size > 0 or self.total == 0)

    def content(self, data: memoryview) -> memoryview | bytes:
        """Return the content of the part of which ``data`` arrived.

        Raises:
            TransportError: ``data`` does not decompress to 1 byte or more that lie within the message.

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
            raise TransportError(f"a compressed part of message {self.number} is damaged: {error}") from error


@dataclass(eq=False)
class Outgoing:
    """A message to send."""

    tag: int
    data: memoryview
    sent: Future[None]  # resolved when the other side has the message
    missing: int = 0  # bytes that are not acknowledged yet
    number: int = 0  # assigned when the message is next to be sent
    cut: int = 0  # bytes that have been cut into parts


@dataclass(eq=False)
class Incoming:
    """A message that this rank has asked for, or of which parts have arrived, or both."""

    tag: int
    received: Future[None] | None = None  # resolved when `buffer` is filled; None: not asked for yet
    buffer: memoryview = _NOTHING  # where this rank wants the message
    data: memoryview = _NOTHING  # where the parts are stored: `buffer`, or memory of its own
    number: int = 0  # of the message, once it has begun to arrive
    missing: int = 0  # bytes that have not arrived yet
    parts: dict[int, int] = field(default_factory=dict)  # start -> end of the parts that have arrived

    def put(self, start: int, content: memoryview | bytes) -> None:
        """Store a part that has not arrived yet.

        Raises:
            TransportError: The part is shorter than any sender makes one, or the parts are no tiling of the message,
                which then has to be sent again.
        """
        end = start + len(content)
        if len(content) < LEAST_PART_BYTES and end < len(self.data):  # many tiny parts would cost more than their data
            raise TransportError(f"a part of {len(content)} bytes arrived; only the last one may be that small")
        self.data[start:end] = content
        self.parts[start] = end
        self.missing -= len(content)
        if self.missing <= 0 and not self._tiled:
            self.parts.clear()
            self.missing = len(self.data)
            raise TransportError(f"the parts of a message of {len(self.data)} bytes overlap")

    @property
    def _tiled(self) -> bool:
        """Whether each part begins where the one before ends, so that every byte has arrived once."""
        starts = sorted(self.parts)
        ends = [self.parts[start] for start in starts]
        return starts == [0, *ends[:-1]] and ends[-1] == len(self.data)


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
        """The header that precedes the body."""
        message, checksum = self.message, xxhash.xxh3_64_intdigest(self.body)
        kind = b"D" if self.body is self.data else b"Z"
        return Head(kind, message.number, message.tag, len(message.data), self.start, len(self.body), checksum)


def compress(data: memoryview) -> memoryview | bytes:
    """Return ``data`` compressed, or ``data`` itself if that saves less than 2 %."""
    found = zstandard.ZstdCompressor(level=_LEVEL).compress(data)
    return found if len(found) <= _WORTH * len(data) else data


def part_bytes(waiting_bytes: int, connections: int) -> int:
    """Return the size of the next part: smaller as less is left, so that all connections finish at about the same time.

    Args:
        waiting_bytes: Bytes that no connection has taken yet.

    >>> part_bytes(1 << 30, 4), part_bytes(3_200_000, 16), part_bytes(50_000, 16)
    (262144, 100000, 12288)
    >>> part_bytes(50_000, 1)  # a single connection need not finish together with others
    262144
    """
    share = waiting_bytes // (2 * connections) if connections > 1 else MOST_PART_BYTES
    return max(LEAST_PART_BYTES, min(MOST_PART_BYTES, share))
