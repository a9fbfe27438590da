"""One connection of a payload link: what it makes of what comes in."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock

import pytest
import xxhash

from diloco.transport.path import Pace
from diloco.transport.peers.payload_connection import HEAD, Head, PayloadConnection
from diloco.transport.peers.reliable_link import ReliableLink


class Listening(asyncio.Transport):
    """A connection that hears what it is made to hear, and keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def hear(self, connection: PayloadConnection, data: bytes) -> None:
        while data:
            room = connection.get_buffer(-1)
            size = min(len(room), len(data))
            room[:size], data = data[:size], data[size:]
            connection.buffer_updated(size)

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    set_protocol = pause_reading = resume_reading = close = Mock()  # type: ignore[assignment]


@pytest.mark.parametrize(("cut_bytes", "writes"), [(33, 6), (10_000, 3), (1 << 20, 2)])
def test_parts_are_taken_however_they_are_cut_on_their_way_and_acknowledged_together(
    cut_bytes: int, writes: int
) -> None:
    sent = [bytes([number]) * size for number, size in enumerate((1 << 18, 50, 0, (1 << 18) - 1, 300, 70_000))]
    heads = [
        Head(b"D", tag + 1, tag, len(each), 0, len(each), xxhash.xxh3_64_intdigest(each))
        for tag, each in enumerate(sent)
    ]
    stream = b"".join(HEAD.pack(*head) + each for head, each in zip(heads, sent, strict=True))

    async def listen() -> None:
        link = ReliableLink(asyncio.get_running_loop(), Pace())
        rooms = [bytearray(len(each)) for each in sent]
        works = [Future[None]() for _ in sent]
        for tag, (room, work) in enumerate(zip(rooms, works, strict=True)):
            link.receive(tag, memoryview(room), work)
        transport = Listening()
        connection = PayloadConnection(link, transport, 20.0)
        connection.begin(stream[:40])
        for start in range(40, len(stream), cut_bytes):
            transport.hear(connection, stream[start : start + cut_bytes])
        for work, room, each in zip(works, rooms, sent, strict=True):
            assert work.done()
            assert room == each
        assert b"".join(transport.written) == b"".join(HEAD.pack(*Head(b"A", head.number)) for head in heads)
        assert len(transport.written) == writes

    asyncio.run(listen())


def test_what_comes_after_a_damaged_part_is_dropped() -> None:
    async def listen() -> None:
        link, transport = ReliableLink(asyncio.get_running_loop(), Pace()), Listening()
        connection = PayloadConnection(link, transport, 20.0)
        connection.begin(b"")
        room = connection.get_buffer(-1)
        part = HEAD.pack(*Head(b"D", 1, 7, 1 << 18, 0, 1 << 18, checksum=1))
        transport.hear(connection, part + bytes(len(room) - len(part)))
        assert connection.ended.result() == "message 1 was damaged on its way"
        transport.hear(connection, bytes(3 * len(room)))
        assert transport.written == []

    asyncio.run(listen())
