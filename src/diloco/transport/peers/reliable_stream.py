"""Messages over streams of bytes that may break: what was on its way when one broke is sent again over the next.

Each message is numbered and carries a checksum. The receiver acknowledges how far it has everything, and the sender
keeps a message until then. When a stream has ended, the lower of the two ranks opens another; each side says what it
has, and the other continues behind that. So a router that forgets a connection costs a round trip and no payload.

::

    1 byte   b"D" payload, b"A" acknowledgement
    8 bytes  number of the message; of an acknowledgement: of the last message that has come
    4 bytes  tag, 4 bytes size, 8 bytes XXH3 of what follows (all zero in an acknowledgement)
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import xxhash
from torch import Tensor

from diloco.errors import TransportError

__all__ = ["MAX_MESSAGE_BYTES", "ReliableStream", "StreamWork"]

MAX_MESSAGE_BYTES = 1 << 30
"""A larger message is refused."""

_HEAD = struct.Struct(">cQIIQ")
_MOST_EARLY_BYTES = 64 << 20
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
class _Receive:
    data: memoryview
    work: StreamWork


class ReliableStream:
    """Messages both ways, over one stream after the other. All but `send` and `receive` runs in the loop's thread.

    Args:
        loop: whose thread does everything.

    Attributes:
        received: number of the last message that has come whole.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.received = 0
        self._loop = loop
        self._unacknowledged: deque[_Outgoing] = deque()
        self._sent = 0  # number of the last message sent over the present stream, or held by the other side
        self._confirmed = 0  # of the last message that the other side has acknowledged
        self._acknowledged = 0  # of the last message that was acknowledged to the other side
        self._receives: dict[int, deque[_Receive]] = {}
        self._early: dict[int, deque[bytes]] = {}
        self._early_bytes = 0
        self._to_write = asyncio.Event()
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
        self._call(self._expect, tag, _Receive(_bytes_of(values), work))
        return work

    # In the loop's thread.

    @property
    def ended(self) -> bool:
        """Whether nothing is sent or received any more."""
        return self._error is not None

    def end(self, error: TransportError) -> None:
        """Give ``error`` to all that wait now or later; only the first call counts."""
        if self._error is not None:
            return
        self._error = error
        waiting = [each.work for each in self._unacknowledged]
        waiting += [each.work for receives in self._receives.values() for each in receives]
        for work in waiting:
            work.finish(error)
        self._to_write.set()
        self._taken.set()

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, theirs: int) -> str:
        """Use a stream until it breaks or `end` is called; returns why it broke.

        Args:
            reader, writer: the stream.
            theirs: number of the last message sent from here that the other side has.

        Raises:
            TransportError: if it can't have that one.
        """
        if not self._confirmed <= theirs <= self._sent:
            raise TransportError(f"the other side has {theirs} messages, and {self._sent} were sent")
        self._confirm(theirs)
        self._sent = theirs
        self._acknowledged = self.received
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
        return next((str(e) or type(e).__name__ for e in ended if isinstance(e, Exception)), "it ended")

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError as error:  # the loop is closed
            raise TransportError("a payload connection ended: the transport was closed") from error

    def _push(self, tag: int, data: memoryview, work: StreamWork) -> None:
        if self._error is not None:
            work.finish(self._error)
            return
        last = self._unacknowledged[-1].number if self._unacknowledged else self._confirmed
        self._unacknowledged.append(_Outgoing(last + 1, tag, data, work))
        self._to_write.set()

    def _expect(self, tag: int, receive: _Receive) -> None:
        if self._error is not None:
            receive.work.finish(self._error)
            return
        if early := self._early.get(tag):
            data = early.popleft()
            if not early:
                del self._early[tag]
            self._early_bytes -= len(data)
            _fill(receive, data)
        else:
            self._receives.setdefault(tag, deque()).append(receive)
        self._taken.set()

    def _confirm(self, number: int) -> None:
        while self._unacknowledged and self._unacknowledged[0].number <= number:
            self._confirmed = self._unacknowledged[0].number
            self._unacknowledged.popleft().work.finish()

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        while self._error is None:
            self._to_write.clear()
            if self._acknowledged < self.received:
                self._acknowledged = self.received
                writer.write(_HEAD.pack(b"A", self.received, 0, 0, 0))
            following = next((each for each in self._unacknowledged if each.number > self._sent), None)
            if following is None:
                await writer.drain()
                await self._to_write.wait()
                continue
            self._sent = following.number
            checksum = xxhash.xxh3_64_intdigest(following.data)
            writer.write(_HEAD.pack(b"D", following.number, following.tag, len(following.data), checksum))
            writer.write(following.data)
            await writer.drain()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while True:
            kind, number, tag, size, checksum = _HEAD.unpack(await reader.readexactly(_HEAD.size))
            if kind == b"A":
                if not self._confirmed <= number <= self._sent:
                    raise TransportError(f"message {number} was acknowledged and {self._sent} are sent")
                self._confirm(number)
                continue
            if kind != b"D" or number != self.received + 1 or size > MAX_MESSAGE_BYTES:
                raise TransportError(f"a message {kind!r} {number} of {size} bytes came after {self.received}")
            receives = self._receives.get(tag)
            if receives and len(receives[0].data) != size:
                raise TransportError(f"a message of {size} bytes came instead of {len(receives[0].data)}")
            while not receives and self._early_bytes + size > _MOST_EARLY_BYTES and self._early_bytes:
                self._taken.clear()
                await self._taken.wait()
                receives = self._receives.get(tag)
            data = await reader.readexactly(size)
            if xxhash.xxh3_64_intdigest(data) != checksum:
                raise TransportError(f"message {number} was damaged on its way")
            self.received = number
            self._to_write.set()
            if receives := self._receives.get(tag):  # or by now
                _fill(receives.popleft(), data)
                if not receives:
                    del self._receives[tag]
            else:
                self._early.setdefault(tag, deque()).append(data)
                self._early_bytes += size


def _fill(receive: _Receive, data: bytes) -> None:
    if len(receive.data) != len(data):
        receive.work.finish(TransportError(f"a message of {len(data)} bytes came instead of {len(receive.data)}"))
        return
    receive.data[:] = data
    receive.work.finish()


def _bytes_of(values: Tensor) -> memoryview:
    return values.detach().view(-1).numpy().data.cast("B") if values.numel() else memoryview(b"")
