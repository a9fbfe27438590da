"""Payload links over streams of bytes that may break: what was on its way when one broke is sent again over the next.

Each message is numbered and carries a checksum; the receiver says up to which number it has everything, and the sender
keeps a message until then. Where a stream ends, the rank that is the lower one opens another; each side tells the other
what it has, and sending goes on behind it. So a router that forgets a connection costs a round trip and no payload.

::

    1 byte   b"D" payload, b"A" acknowledgement
    8 bytes  number            of the message; of an acknowledgement: the last one that came
    4 bytes  tag, 4 bytes size, 8 bytes XXH3 of what follows (all zero in an acknowledgement)
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash
from torch import Tensor

from diloco.errors import TransportError

__all__ = ["MAX_MESSAGE_BYTES", "ReliableStream", "StreamWork"]

MAX_MESSAGE_BYTES = 1 << 30
"""A larger message is not taken, whatever its head says."""

_HEAD = struct.Struct(">cQIIQ")
_HELD_BYTES = 64 << 20
_BUFFER_BYTES = 1 << 20


class StreamWork:
    """A message on its way: done when the other side has it, or when it has come."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: TransportError | None = None

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error

    def finish(self, error: TransportError | None = None) -> None:
        """The first call counts."""
        if not self._done.is_set():
            self._error = error
            self._done.set()


@dataclass(eq=False)
class _Outgoing:
    number: int
    tag: int
    data: memoryview
    work: StreamWork


@dataclass(eq=False)
class _Room:
    data: memoryview
    work: StreamWork


@dataclass(eq=False)
class _Traffic:
    """What outlives a broken stream; all numbers are of the last message that it is true of."""

    unacknowledged: deque[_Outgoing] = field(default_factory=deque)
    sent: int = 0
    confirmed: int = 0  # the other side said that it has it
    received: int = 0
    acknowledged: int = 0  # I said that I have it


class ReliableStream:
    """One stream's messages both ways. All methods but `send` and `receive` run in the event loop's thread.

    Args:
        loop: whose thread does everything.
        broken: called when the stream ended and the link did not.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, broken: Callable[[str], None]) -> None:
        self._loop = loop
        self._broken = broken
        self._traffic = _Traffic()
        self._rooms: dict[int, deque[_Room]] = {}
        self._early: dict[int, deque[bytes]] = {}
        self._early_bytes = 0
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        self._error: TransportError | None = None

    # For any thread.

    def send(self, values: Tensor, tag: int) -> StreamWork:
        """Start sending a contiguous CPU tensor."""
        work = StreamWork()
        self._call(self._push, tag, _bytes_of(values), work)
        return work

    def receive(self, values: Tensor, tag: int) -> StreamWork:
        """Start receiving into a contiguous CPU tensor."""
        work = StreamWork()
        self._call(self._make_room, tag, _Room(_bytes_of(values), work), work)
        return work

    # In the loop's thread.

    @property
    def ended(self) -> bool:
        """Whether nothing is sent or received any more."""
        return self._error is not None

    @property
    def received(self) -> int:
        """Number of the last message that came whole."""
        return self._traffic.received

    def end(self, error: TransportError) -> None:
        """Whoever waits gets ``error``, and so does who comes later."""
        if self._error is not None:
            return
        self._error = error
        waiting = [each.work for each in self._traffic.unacknowledged]
        waiting += [room.work for rooms in self._rooms.values() for room in rooms]
        for work in waiting:
            work.finish(error)
        self._changed.set()
        self._taken.set()

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, theirs: int) -> None:
        """Use a stream until it breaks or the link ends.

        Args:
            reader, writer: the stream.
            theirs: number of the last message of mine that the other side has.
        """
        traffic = self._traffic
        if not traffic.confirmed <= theirs <= traffic.sent:
            raise TransportError(f"the other side has {theirs} messages, and {traffic.sent} were sent")
        self._confirm(theirs)
        traffic.sent = theirs
        traffic.acknowledged = traffic.received
        writer.transport.set_write_buffer_limits(high=_BUFFER_BYTES)
        writing = asyncio.ensure_future(self._write(writer))
        reading = asyncio.ensure_future(self._read(reader))
        try:
            await asyncio.wait((writing, reading), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writing, reading):
                task.cancel()
            ended = await asyncio.gather(writing, reading, return_exceptions=True)
            writer.close()
        if self._error is None:
            why = next((str(e) or type(e).__name__ for e in ended if isinstance(e, Exception)), "it ended")
            self._broken(why)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError as error:  # the loop is closed
            raise TransportError("a payload connection ended: the transport was closed") from error

    def _push(self, tag: int, data: memoryview, work: StreamWork) -> None:
        if self._error is not None:
            work.finish(self._error)
            return
        traffic = self._traffic
        last = traffic.unacknowledged[-1].number if traffic.unacknowledged else traffic.confirmed
        traffic.unacknowledged.append(_Outgoing(last + 1, tag, data, work))
        self._changed.set()

    def _make_room(self, tag: int, room: _Room, work: StreamWork) -> None:
        if self._error is not None:
            work.finish(self._error)
            return
        early = self._early.get(tag)
        if early:
            data = early.popleft()
            if not early:
                del self._early[tag]
            self._early_bytes -= len(data)
            self._taken.set()
            self._fill(room, data)
        else:
            self._rooms.setdefault(tag, deque()).append(room)
            self._taken.set()

    def _confirm(self, number: int) -> None:
        traffic = self._traffic
        while traffic.unacknowledged and traffic.unacknowledged[0].number <= number:
            traffic.confirmed = traffic.unacknowledged[0].number
            traffic.unacknowledged.popleft().work.finish()

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        traffic = self._traffic
        while self._error is None:
            self._changed.clear()
            if traffic.acknowledged < traffic.received:
                traffic.acknowledged = traffic.received
                writer.write(_HEAD.pack(b"A", traffic.received, 0, 0, 0))
            following = next((each for each in traffic.unacknowledged if each.number > traffic.sent), None)
            if following is None:
                await writer.drain()
                await self._changed.wait()
                continue
            traffic.sent = following.number
            checksum = xxhash.xxh3_64_intdigest(following.data)
            writer.write(_HEAD.pack(b"D", following.number, following.tag, len(following.data), checksum))
            writer.write(following.data)
            await writer.drain()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        traffic = self._traffic
        while True:
            kind, number, tag, size, checksum = _HEAD.unpack(await reader.readexactly(_HEAD.size))
            if kind == b"A":
                if not traffic.confirmed <= number <= traffic.sent:
                    raise TransportError(f"message {number} was acknowledged and {traffic.sent} are sent")
                self._confirm(number)
                continue
            if kind != b"D" or number != traffic.received + 1 or size > MAX_MESSAGE_BYTES:
                raise TransportError(f"a message {kind!r} {number} of {size} bytes came after {traffic.received}")
            rooms = self._rooms.get(tag)
            if rooms and len(rooms[0].data) != size:
                raise TransportError(f"a message of {size} bytes came where {len(rooms[0].data)} were due")
            while not rooms and self._early_bytes + size > _HELD_BYTES and self._early_bytes:
                self._taken.clear()
                await self._taken.wait()
                rooms = self._rooms.get(tag)
            data = await reader.readexactly(size)
            if xxhash.xxh3_64_intdigest(data) != checksum:
                raise TransportError(f"message {number} was damaged on its way")
            traffic.received = number
            self._changed.set()
            rooms = self._rooms.get(tag)  # there may be room by now
            if rooms:
                self._fill(rooms.popleft(), data)
                if not rooms:
                    del self._rooms[tag]
            else:
                self._early.setdefault(tag, deque()).append(data)
                self._early_bytes += size

    def _fill(self, room: _Room, data: bytes) -> None:
        if len(room.data) != len(data):
            room.work.finish(TransportError(f"a message of {len(data)} bytes came where {len(room.data)} were due"))
            return
        room.data[:] = data
        room.work.finish()


def _bytes_of(values: Tensor) -> memoryview:
    return values.detach().view(-1).numpy().data.cast("B") if values.numel() else memoryview(b"")
