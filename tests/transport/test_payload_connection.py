"""One connection of a payload link: how it handles received data and the kernel's TCP counters."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock

import pytest
import xxhash

from diloco.transport.connections.opened_link import LinkRequest, OpenedLink, Route
from diloco.transport.connections.payload_connection import HEAD, Head, PayloadConnection
from diloco.transport.connections.reliable_link import ReliableLink
from diloco.transport.connections.send_scheduler import SendScheduler


class Listening(asyncio.Transport):
    """A transport that is fed by the test and records what is written."""

    def __init__(self, **extra: Any) -> None:
        super().__init__(extra)
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
        link = ReliableLink(SendScheduler(asyncio.get_running_loop()))
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
        link, transport = ReliableLink(SendScheduler(asyncio.get_running_loop())), Listening()
        connection = PayloadConnection(link, transport, 20.0)
        connection.begin(b"")
        room = connection.get_buffer(-1)
        part = HEAD.pack(*Head(b"D", 1, 7, 1 << 18, 0, 1 << 18, checksum=1))
        transport.hear(connection, part + bytes(len(room) - len(part)))
        assert connection.ended.result() == "message 1 was damaged in transit"
        transport.hear(connection, bytes(3 * len(room)))
        assert transport.written == []

    asyncio.run(listen())


class Kernel:
    """The socket options of a connection, as far as they are read."""

    family = socket.AF_INET

    def __init__(self, control: bytes) -> None:
        self.set: list[bytes] = []
        self.in_order = self.beyond = self.paced_bits_per_s = 0
        self._control = control

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        if option == socket.TCP_CONGESTION:
            return self._control.ljust(size, b"\0")
        words = [0] * 24
        words[2], words[5], words[15] = 1448, self.beyond, 100_000
        return struct.pack("=8B24I4Q6I", *[0] * 8, *words, self.paced_bits_per_s // 8, 0, self.in_order, 0, *[0] * 6)

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        if option == getattr(socket, "TCP_CONGESTION", None):
            self.set.append(value)


def observed(kernel: Kernel, told: list[dict[str, int]]) -> list[int]:
    """Return the acknowledged bytes of each interval, given the counters that the kernel reports at its end."""

    async def observe() -> list[int]:
        link = ReliableLink(SendScheduler(asyncio.get_running_loop()))
        link.connections[0] = PayloadConnection(link, Listening(socket=kernel), 20.0)
        opened = OpenedLink(LinkRequest("0/0-1", 1, True, 1, False, 20.0), Route("TCP"), link)
        found = []
        for each in told:
            vars(kernel).update(each)
            found.append(opened.observe(0.05).acknowledged_bytes)
        return found

    return asyncio.run(observe())


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="no other kernel tells")


@needs_linux
def test_what_has_come_does_not_become_less_when_the_last_segment_proves_to_be_short() -> None:
    told = [{"in_order": 1448}, {"in_order": 1448, "beyond": 10}, {"in_order": 11 * 1448 - 900, "beyond": 0}]
    assert observed(Kernel(b"bbr"), [*told, {"in_order": 20_000}]) == [0, 14_480, 0, 20_000 - 11 * 1448]


@needs_linux
def test_tcp_that_has_come_to_think_little_of_a_way_begins_anew_once() -> None:
    fast, shared, slow = ({"paced_bits_per_s": rate} for rate in (90_000_000, 6_000_000, 500_000))
    for control, expected in ((b"bbr", [b"reno", b"bbr"]), (b"cubic", [])):
        kernel = Kernel(control)
        observed(kernel, [slow, fast, shared])
        assert kernel.set == []
        observed(kernel, [fast, slow, slow, shared])
        assert kernel.set == expected
        observed(kernel, [slow, fast, slow, fast, slow])
        assert kernel.set == 3 * expected
