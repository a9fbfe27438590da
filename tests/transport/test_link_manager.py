"""Payload links over streams that break: every message arrives once, in order and undamaged."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import xxhash

from diloco.algorithm import RoundId
from diloco.errors import TransportError
from diloco.protocol import Entry, Timing
from diloco.transport import (
    HEAD,
    Address,
    ConnectionManager,
    Head,
    Link,
    LinkManager,
    LinkRequest,
    Outgoing,
    Pacer,
    Part,
    ReliableLink,
    RoundMessages,
    SendScheduler,
    TcpStreams,
    pack,
)
from diloco.transport.connections import reliable_link
from tests.transport.connection_managers import said_to
from tests.transport.wires import at_once

LIMIT_S = 20.0
OTHER = 0  # the replica at the other end, whatever its rank
NONE = memoryview(b"")


class Breaking(TcpStreams):
    """TCP whose open connections can be cut and whose received bytes can be damaged."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[asyncio.StreamWriter] = []
        self.changed = threading.Condition()
        self.refuses = False
        self.damage: Callable[[bytes], bytes] | None = None
        self.relays: list[asyncio.Server] = []

    async def open(self, address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.refuses:
            raise OSError("no way there")
        if self.damage is not None:
            address = await self._relay(address, self.damage)
        reader, writer = await super().open(address)
        with self.changed:
            self.opened.append(writer)
            self.changed.notify_all()
        return reader, writer

    def cut(self) -> None:
        """Abort all connections at once."""
        for writer in self.opened:
            writer.transport.abort()

    async def _relay(self, to: Address, damage: Callable[[bytes], bytes]) -> Address:
        """Start a relay that damages what comes back from ``to``, and return its address."""

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Callable[..., Any]) -> None:
            with closing(writer):
                while data := await reader.read(1 << 16):
                    writer.write(way(data))

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            theirs = await asyncio.open_connection(to.host, to.port)
            await asyncio.gather(pass_on(reader, theirs[1], bytes), pass_on(theirs[0], writer, damage))

        self.relays.append(await asyncio.start_server(relay, "127.0.0.1"))
        return Address(*self.relays[-1].sockets[0].getsockname())

    async def close(self) -> None:
        for each in self.relays:
            each.close()


class End:
    def __init__(self, rank: int, patience_s: float) -> None:
        self.streams = Breaking()
        self.connections = ConnectionManager(rank, Timing(), self.streams)
        self.address = self.connections.listen("127.0.0.1", range(1), "127.0.0.1")
        self.entries: dict[int, Entry] = {}
        self.connections.entries = self.entries
        self.links = LinkManager(self.connections, patience_s)

    def open(self, peer: int, streams: int = 1, timeout_s: float = LIMIT_S) -> ReliableLink:
        low, high = sorted((self.connections.rank, peer))
        key, first = f"0/{low}-{high}", self.connections.rank < peer
        request = LinkRequest(key, peer, first, streams, True, timeout_s)
        return self.links.open_link(request)

    def in_loop(self, function: Callable[[], Any]) -> None:
        done = threading.Event()
        self.connections.post(lambda: (function(), done.set()))
        assert done.wait(LIMIT_S)


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[End, End]]:
    ends = [End(rank, getattr(request, "param", LIMIT_S)) for rank in range(2)]
    for end, other in (ends, ends[::-1]):
        end.entries[other.connections.rank] = Entry(other.connections.rank, str(other.address))
    yield ends[0], ends[1]
    for end in ends:
        end.connections.close()


def linked(pair: tuple[End, End], streams: int = 1) -> tuple[RoundMessages, RoundMessages]:
    """Return the messages of both ends over one link."""
    links = at_once([lambda: pair[0].open(1, streams), lambda: pair[1].open(0, streams)])
    assert all(isinstance(link, ReliableLink) for link in links), links
    first, second = (
        RoundMessages(RoundId(0, 0), end.connections.loop, 1, {OTHER: link})
        for end, link in zip(pair, links, strict=True)
    )
    return first, second


def wait_for(end: End, come: Callable[[], Any]) -> None:
    for _ in range(2000):
        if come():
            return
        end.connections.call(asyncio.sleep(0.01))
    raise AssertionError("it has not come")


def wait(work: Any) -> None:
    """Wait for ``work`` in a thread, so that a hang becomes a failure."""
    (error,) = at_once([work.result])
    if isinstance(error, Exception):
        raise error


def test_messages_find_their_rooms_whichever_comes_first(pair: tuple[End, End]) -> None:
    first, second = linked(pair, streams=2)
    values = [torch.arange(1000.0) * n if n else torch.empty(0) for n in range(6)]
    for n, each in enumerate(values):
        first.send([OTHER], each, n)
    rooms = [torch.empty_like(each) for each in values]
    works = [second.receive(OTHER, rooms[n], n) for n in reversed(range(6))]
    back = torch.empty(3, dtype=torch.uint8)
    coming = first.receive(OTHER, back, 0)
    second.send([OTHER], torch.tensor([1, 2, 3], dtype=torch.uint8), 0)
    first.finish()
    for work in (*works, coming):
        work.result()
    assert all(torch.equal(room, value) for room, value in zip(rooms, values, strict=True))
    assert back.tolist() == [1, 2, 3]


@pytest.mark.parametrize("streams", [(2, 5), (5, 2)], ids=str)
def test_of_what_both_ends_want_the_larger_number_of_connections_is_opened(
    pair: tuple[End, End], streams: tuple[int, int]
) -> None:
    at_once([lambda: pair[0].open(1, streams[0]), lambda: pair[1].open(0, streams[1])])
    opened = pair[0].streams
    with opened.changed:
        assert opened.changed.wait_for(lambda: len(opened.opened) == 5, LIMIT_S)


def test_messages_of_one_tag_arrive_in_the_order_sent(pair: tuple[End, End]) -> None:
    first, second = linked(pair)
    rooms = [torch.empty(1) for _ in range(5)]
    works = [second.receive(OTHER, room, 7) for room in rooms]
    for n in range(5):
        first.send([OTHER], torch.tensor([float(n)]), 7)
    for work in works:
        work.result()
    assert [room.item() for room in rooms] == [0, 1, 2, 3, 4]


def test_messages_leave_when_an_emulated_link_lets_them_go() -> None:
    loop = Mock()
    loop.time.return_value = 10.0
    link = ReliableLink(SendScheduler(loop), pacer=Pacer(Link(8e6, latency_s=0.1)))
    sent = [Future[None]() for _ in range(2)]
    for tag, each in enumerate(sent):
        link.send(tag, memoryview(bytes(500_000)), each)
    (first_s, *first), (second_s, *_) = (call.args for call in loop.call_at.call_args_list)
    assert (first_s, second_s) == pytest.approx((10.6, 11.1))
    loop.time.return_value = first_s
    first[0](*first[1:])
    assert link.active
    assert link.waiting_bytes == 500_000, "the second message has not left"
    link.end("it was closed")
    assert all("it was closed" in str(each.exception(0)) for each in sent)


def test_what_a_broken_connection_lost_is_sent_again(pair: tuple[End, End]) -> None:
    """The connection is cut at every tenth message, by both ends in turn."""
    first, second = linked(pair)
    count, size = 60, 200_000
    rooms = [torch.empty(size, dtype=torch.uint8) for _ in range(count)]
    works = [second.receive(OTHER, room, n) for n, room in enumerate(rooms)]
    for n in range(count):
        first.send([OTHER], torch.full((size,), n, dtype=torch.uint8), n)
        if n % 10 == 5:
            pair[0].in_loop(pair[0].streams.cut)
    first.finish()
    for work in works:
        work.result()
    assert all(bool((room == n).all()) for n, room in enumerate(rooms))
    assert len(pair[0].streams.opened) > 1, "it was reopened"


def test_a_damaged_message_is_sent_again(pair: tuple[End, End]) -> None:
    damaged: list[int] = []

    def damage(data: bytes) -> bytes:
        if len(data) > 4000 and not damaged:
            damaged.append(len(data))
            return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]
        return data

    pair[0].streams.damage = damage
    first, second = linked(pair)
    room, values = torch.empty(1000), torch.arange(1000.0)
    work = first.receive(OTHER, room, 1)
    second.send([OTHER], values, 1)
    wait(work)
    assert torch.equal(room, values)
    assert damaged
    assert len(pair[0].streams.opened) > 1, "the connection ended"


@pytest.mark.parametrize("pair", [0.9], indirect=True)
def test_a_link_that_stays_broken_ends_on_both_ends(pair: tuple[End, End]) -> None:
    first, second = linked(pair)
    works = [first.receive(OTHER, torch.empty(1), 0), second.receive(OTHER, torch.empty(1), 0)]

    def part() -> None:
        pair[0].streams.refuses = True
        pair[0].streams.cut()

    pair[0].in_loop(part)
    with pytest.raises(TransportError, match=r"no way there, and it could not be reopened within 0.9 s"):
        wait(works[0])
    with pytest.raises(TransportError, match=r"the other side did not reconnect within 0.9 s"):
        wait(works[1])
    first.send([OTHER], torch.empty(1), 0)
    with pytest.raises(TransportError, match="no way there"):
        first.finish()


def test_the_kernel_of_both_ends_notices_a_dead_way(pair: tuple[End, End]) -> None:
    """The end that has nothing to send notices it too, as the other end may have dropped the connection unnoticed."""
    for messages in linked(pair):
        for connection in messages.links[OTHER].connections.values():
            theirs = connection.transport.get_extra_info("socket")
            options = (socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)
            assert [theirs.getsockopt(socket.IPPROTO_TCP, each) for each in options] == [1000 * LIMIT_S, 5, 5]
            assert theirs.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.mark.parametrize("pair", [0.3], indirect=True)
def test_nobody_at_the_other_end_is_an_error_in_time(pair: tuple[End, End]) -> None:
    with pytest.raises(TransportError, match="could not be made: the other side did not connect"):
        pair[1].open(0, timeout_s=0.2)
    with pytest.raises(TransportError, match="the other side does not know this link"):
        pair[0].open(1)


def test_closing_wakes_who_waits_on_both_ends(pair: tuple[End, End]) -> None:
    first, second = linked(pair)
    mine, theirs = first.receive(OTHER, torch.empty(1), 0), second.receive(OTHER, torch.empty(1), 0)
    first.links[OTHER].close()
    with pytest.raises(TransportError, match="it was closed"):
        wait(mine)
    second.links[OTHER].close()
    with pytest.raises(TransportError, match="it was closed"):
        wait(theirs)


def test_a_message_of_another_size_than_its_room_ends_no_process(pair: tuple[End, End]) -> None:
    first, second = linked(pair)
    first.send([OTHER], torch.empty(3), 0)
    first.send([OTHER], torch.ones(1), 1)
    wait(second.receive(OTHER, room := torch.empty(1), 1))
    assert room.item() == 1
    with pytest.raises(TransportError, match="12 bytes arrived where 16 bytes were expected"):
        wait(second.receive(OTHER, torch.empty(4), 0))


def test_a_message_of_two_sizes_ends_the_connection_that_waited_with_the_second(
    pair: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reliable_link, "_MOST_EARLY_BYTES", 2056)  # so that one message may arrive early
    first, second = (messages.links[OTHER] for messages in linked(pair, streams=2))
    wait_for(pair[0], lambda: len(first.connections) == len(second.connections) == 2)
    raised: list[Any] = []
    pair[1].in_loop(lambda: asyncio.get_running_loop().set_exception_handler(lambda _, about: raised.append(about)))

    def begin(connection: int, number: int, total: int) -> None:
        head = Head(b"D", number, number, total, total - 4, 4, xxhash.xxh3_64_intdigest(bytes(4)))
        way = first.connections[connection]
        way._parts[number, total - 4] = Part(Outgoing(number, NONE, Future()), 0, NONE, NONE, acknowledged=True)
        pair[0].in_loop(lambda: way.transport.write(HEAD.pack(*head) + bytes(4)))

    begin(0, 1, 8)
    wait_for(pair[1], lambda: second._incoming)
    begin(0, 2, 8)
    begin(1, 2, 16)
    wait_for(pair[1], lambda: all(each.waits for each in second.connections.values()))
    pair[1].in_loop(lambda: second.receive(2, memoryview(bytearray(8)), Future()))
    wait_for(pair[1], lambda: "as one of 16" in second.why)
    assert not raised


STRANGE = [
    {"kind": "link", "key": "0/0-1", "connection": 0, "rank": 5, "streams": 1},
    {"kind": "link", "key": "0/0-1", "connection": 0, "rank": 0, "streams": "many"},
    {"kind": "link", "key": "0/0-1", "connection": 0, "rank": 0},
    {"kind": "link", "key": ["0/0-1"], "connection": {}, "rank": None},
    {"kind": "link"},
]


@pytest.mark.parametrize("message", STRANGE, ids=str)
def test_a_stranger_takes_no_link(pair: tuple[End, End], message: dict[str, Any]) -> None:
    first, second = linked(pair)
    said_to(pair[1].address, pack(message))
    room = torch.empty(2)
    work = second.receive(OTHER, room, 3)
    first.send([OTHER], torch.ones(2), 3)
    wait(work)
    assert room.tolist() == [1, 1]
