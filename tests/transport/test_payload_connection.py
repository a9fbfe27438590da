"""One connection of a payload link: how it handles received data and the kernel's TCP counters."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import tracemalloc
from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from diloco.algorithm import make_codec
from diloco.errors import TransportError
from diloco.transport import (
    HEAD,
    Head,
    LinkRequest,
    OpenedLink,
    PathSample,
    PayloadConnection,
    ReliableLink,
    Route,
    SendScheduler,
)


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


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="no other kernel tells")


def head_of(body: bytes, *, kind: bytes = b"D", number: int = 1, tag: int = 7, total: int, start: int = 0) -> Head:
    """Return the header of a part, of which ``body`` is sent."""
    return Head(kind, number, tag, total, start, len(body), xxhash.xxh3_64_intdigest(body))


@pytest.mark.parametrize(("cut_bytes", "writes"), [(33, 6), (10_000, 3), (1 << 20, 2)])
def test_parts_are_taken_however_they_are_cut_on_their_way_and_acknowledged_together(
    cut_bytes: int, writes: int
) -> None:
    sent = [bytes([number]) * size for number, size in enumerate((1 << 18, 50, 0, (1 << 18) - 1, 300, 70_000))]
    heads = [head_of(each, number=tag + 1, tag=tag, total=len(each)) for tag, each in enumerate(sent)]
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


def frame(content: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(content)


ZEROS = bytes(1000)
REFUSED = {
    "nothing": b"",
    "no frame": b"any other bytes",
    "a frame that was cut": frame(ZEROS)[:-1],
    "a frame and more": frame(ZEROS) + b"more",
    "two frames": 2 * frame(ZEROS),
    "a frame of unknown size": frame(ZEROS, write_content_size=False),
    "an empty frame": frame(b""),
    "more than is left of the message": frame(bytes(4001)),
    "more than a part holds": frame(bytes((1 << 18) + 1)),
    "a bomb": frame(bytes(1 << 28)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_compressed_part_that_is_not_what_its_header_says_is_refused_before_it_takes_memory(case: str) -> None:
    async def listen() -> None:
        link, transport = ReliableLink(SendScheduler(asyncio.get_running_loop())), Listening()
        total = 1 << 20 if case == "more than a part holds" else 5000
        room, received = bytearray(total), Future[None]()
        link.receive(7, memoryview(room), received)
        connection = PayloadConnection(link, transport, 20.0)
        connection.begin(b"")
        tracemalloc.start()
        head = head_of(REFUSED[case], kind=b"Z", total=total, start=1000)
        transport.hear(connection, HEAD.pack(*head) + REFUSED[case])
        most_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert connection.ended.done()
        assert "part" in connection.ended.result()
        assert (room, received.done(), transport.written) == (bytearray(total), False, [])
        assert most_bytes < 1 << 20

    asyncio.run(listen())


@given(
    st.binary(max_size=300), st.integers(0, 10), st.dictionaries(st.integers(0, 100), st.integers(0, 255), max_size=3)
)
def test_a_damaged_frame_is_an_error_or_no_longer_than_the_message(
    block: bytes, repeated: int, damaged: dict[int, int]
) -> None:
    body = bytearray(frame(block * repeated))
    for place, byte in damaged.items():
        body[place % len(body)] = byte
    total = max(len(body), len(block) * repeated)
    try:
        content = head_of(bytes(body), kind=b"Z", total=total).content(memoryview(body))
    except TransportError:
        return
    assert 0 < len(content) <= total


def sent_over(
    kernel: Kernel | None, message: bytes, *, full: bool, bits_per_s: float = 0, compresses: bool = True
) -> bytes:
    """Return the bytes that a connection writes for a message, and check that they arrive as that message."""

    async def send() -> bytes:
        scheduler = SendScheduler(asyncio.get_running_loop())
        links = [ReliableLink(scheduler) for _ in range(2)]
        ways = [Listening(socket=kernel), Listening(socket=None)]
        ends = [
            PayloadConnection(link, way, 20.0, compresses=compresses) for link, way in zip(links, ways, strict=True)
        ]
        for now_s in (0.4, 0.6, 0.8, 1.0) if bits_per_s else ():
            sample = PathSample(0.2, int(0.2 * bits_per_s / 8), round_trip_s=0.2, least_round_trip_s=0.1)
            scheduler.pace.observe(now_s, sample)
        room, sent, received = bytearray(len(message)), Future[None](), Future[None]()
        for link, end in zip(links, ends, strict=True):
            end.begin(b"")
            link.add(0, end)
        if full:
            ends[0].pause_writing()
            ends[0].resume_writing()
        links[0].send(7, memoryview(message), sent)
        links[1].receive(7, memoryview(room), received)
        await asyncio.sleep(0)
        ways[1].hear(ends[1], b"".join(ways[0].written))
        ways[0].hear(ends[0], b"".join(ways[1].written))
        assert sent.done()
        assert received.done()
        assert room == message
        return b"".join(ways[0].written)

    return asyncio.run(send())


@needs_linux
def test_a_part_is_compressed_if_the_network_limits_the_transfer_and_the_path_is_long() -> None:
    message = bytes(50_000)
    far, near = Kernel(b"bbr"), Kernel(b"bbr", round_trip_s=0.0005)
    as_it_is = HEAD.size + len(message)
    for kernel, full, pace in ((far, True, 0), (far, False, 1e8), (far, True, 1e10), (None, True, 0)):
        assert len(sent_over(kernel, message, full=full, bits_per_s=pace)) < 1000
        assert len(sent_over(kernel, message, full=full, bits_per_s=pace, compresses=False)) == as_it_is
    for kernel, full, pace in ((far, False, 0), (far, False, 1e10), (near, True, 0), (near, False, 1e8)):
        assert len(sent_over(kernel, message, full=full, bits_per_s=pace)) == as_it_is


def test_a_part_is_compressed_if_another_connection_of_its_link_has_to_wait() -> None:
    """With many connections, each carries only one or two parts of a burst."""

    async def send() -> None:
        link, ways = ReliableLink(SendScheduler(asyncio.get_running_loop())), [Listening(), Listening()]
        ends = [PayloadConnection(link, way, 20.0) for way in ways]
        for number, end in enumerate(ends):
            link.add(number, end)
        ends[0].pause_writing()
        link.send(7, memoryview(bytes(50_000)), Future())
        await asyncio.sleep(0)
        assert 0 < len(b"".join(ways[1].written)) < 1000
        assert not ways[0].written

    asyncio.run(send())


@given(st.binary(max_size=2000), st.integers(0, 200), st.booleans())
def test_every_message_arrives_as_it_was_and_never_takes_more_bytes_than_uncompressed(
    block: bytes, repeated: int, full: bool
) -> None:
    message = block * repeated
    assert len(sent_over(None, message, full=full)) <= len(sent_over(None, message, full=full, compresses=False))


def test_fp4_of_noise_is_sent_with_a_tenth_less() -> None:
    payload = make_codec("fp4").encode(torch.randn(400_000, generator=torch.Generator().manual_seed(0)))
    sent = len(sent_over(None, payload.numpy().tobytes(), full=True))
    assert 0.88 < sent / len(payload) < 0.91


class Kernel:
    """The socket options of a connection, as far as they are read."""

    family = socket.AF_INET

    def __init__(self, control: bytes, round_trip_s: float = 0.1) -> None:
        self.set: list[bytes] = []
        self.in_order = self.beyond = self.paced_bits_per_s = 0
        self._control, self._round_trip_s = control, round_trip_s

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        if option == socket.TCP_CONGESTION:
            return self._control.ljust(size, b"\0")
        words = [0] * 24
        words[2], words[5], words[15] = 1448, self.beyond, round(1e6 * self._round_trip_s)
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
