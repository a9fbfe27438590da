"""What hostile headers cost: each parser that listens is sent sizes, counts and numbers that no honest peer sends."""

from __future__ import annotations

import asyncio
import json
import struct
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from diloco.errors import TransportError
from diloco.protocol import json_object, room_bytes
from diloco.transport import (
    HEAD,
    MAX_JSON_BYTES,
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Admission,
    DonorService,
    Head,
    NodePlace,
    PayloadConnection,
    PeerAddress,
    PeerRecord,
    PeerStreams,
    ReliableLink,
    SendScheduler,
    StatusClient,
    Stream,
    load_identity,
    pack,
    serve_probes,
)
from diloco.transport.connections import reliable_link
from tests.transport.connection_managers import MakeRank, stranger_at
from tests.transport.test_payload_connection import Listening, head_of

EARLY_BYTES = 1 << 20  # instead of 64 MiB, so that reaching it takes no time
BUFFER_BYTES = 2 << 20  # of one connection, and more than all else that a test allocates
ASKED_TAG, ASKED_BYTES = 7, 40_000


class Peak:
    num_bytes = 0


@contextmanager
def traced() -> Iterator[Peak]:
    """Measure the most memory in use at any time."""
    peak = Peak()
    tracemalloc.start()
    try:
        yield peak
        peak.num_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def part(body: bytes, **fields: Any) -> bytes:
    return HEAD.pack(*head_of(body, **fields)) + body


FLOODS = {
    "one header of a gigabyte": [part(b"x", total=MAX_MESSAGE_BYTES, tag=1)],
    "headers of many messages": [part(b"x", number=n, tag=n, total=100_000) for n in range(1, 100)],
    "empty messages": [part(b"", number=n, tag=n, total=0) for n in range(1, 5000)],
    "a message of another size": [part(b"x", total=1 << 29, tag=ASKED_TAG)],
    "parts of one byte": [part(b"x", tag=ASKED_TAG, total=ASKED_BYTES, start=n) for n in range(0, ASKED_BYTES, 2)],
    "parts of one byte of an early message": [part(b"x", tag=1, total=400_000, start=n) for n in range(0, 60_000, 2)],
    "a number far ahead": [part(b"", number=n << 40, tag=1, total=0) for n in range(1, 5000)],
}


def received_over(stream: bytes) -> tuple[ReliableLink, PayloadConnection, bytearray, Future[None]]:
    """Return what a link that waits for one message becomes when ``stream`` arrives."""
    room, received = bytearray(b"-" * ASKED_BYTES), Future[None]()

    async def listen() -> tuple[ReliableLink, PayloadConnection]:
        link = ReliableLink(SendScheduler(asyncio.get_running_loop()))
        link.receive(ASKED_TAG, memoryview(room), received)
        transport = Listening()
        connection = PayloadConnection(link, transport, 20.0)
        connection.begin(b"")
        for start in range(0, len(stream), 1 << 16):
            if connection.ended.done() or connection.waits:
                break
            transport.hear(connection, stream[start : start + (1 << 16)])
        return link, connection

    return *asyncio.run(listen()), room, received


@pytest.mark.parametrize("flood", FLOODS)
def test_a_payload_header_takes_no_more_memory_than_documented(flood: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reliable_link, "_MOST_EARLY_BYTES", EARLY_BYTES)
    stream = b"".join(FLOODS[flood])
    with traced() as peak:
        _, connection, _, received = received_over(stream)
    assert peak.num_bytes < EARLY_BYTES + BUFFER_BYTES
    assert connection.waits or connection.ended.done() or isinstance(received.exception(0), TransportError)


def test_a_message_larger_than_all_early_ones_may_be_waits_until_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reliable_link, "_MOST_EARLY_BYTES", EARLY_BYTES)
    body = bytes(200_000)

    async def listen() -> None:
        link, transport = ReliableLink(SendScheduler(asyncio.get_running_loop())), Listening()
        link.add(0, connection := PayloadConnection(link, transport, 20.0))
        connection.begin(b"")
        for start in range(0, 10 * len(body), len(body)):
            if start == len(body):
                assert connection.waits
                link.receive(1, memoryview(bytearray(10 * len(body))), received := Future[None]())
            transport.hear(connection, part(body, tag=1, total=10 * len(body), start=start))
        assert received.result(0) is None

    asyncio.run(listen())


@pytest.mark.parametrize(
    "cuts",
    [[(0, 20_000), (10_000, 30_000)], [(0, 20_000), (15_000, 40_000)], [(0, 39_999), (39_998, 39_999)], [(1, 40_000)]],
    ids=str,
)
def test_parts_that_overlap_complete_no_message(cuts: list[tuple[int, int]]) -> None:
    """Otherwise bytes that were never written would be taken for a payload."""
    stream = b"".join(part(b"x" * (b - a), tag=ASKED_TAG, total=ASKED_BYTES, start=a) for a, b in cuts)
    _, _, _, received = received_over(stream)
    assert not received.done()


def test_a_message_of_another_size_is_an_error_at_once_and_the_next_one_arrives() -> None:
    """Its further parts are acknowledged, so that the sender does not wait."""
    wrong = part(b"x", number=1, tag=ASKED_TAG, total=1)
    right = part(b"y" * 50, number=2, tag=8, total=50)
    link, connection, room, received = received_over(wrong + right)
    with pytest.raises(TransportError, match="1 bytes arrived where 40000 bytes were expected"):
        received.result(0)
    link.receive(8, memoryview(content := bytearray(50)), after := Future[None]())
    assert (after.result(0), bytes(content), bytes(room[:1])) == (None, b"y" * 50, b"-")
    assert not connection.ended.done()
    assert cast(Listening, connection.transport).written == [
        b"".join(HEAD.pack(*Head(b"A", number)) for number in (1, 2))
    ]


@pytest.mark.parametrize(
    ("service", "question"),
    [
        ("probe", {"kind": "probe", "ask": "ping"}),
        ("fetch", {"kind": "fetch", "fragment": 0, "after": 0, "snapshot": ""}),
    ],
)
@pytest.mark.parametrize("sizes", [(MAX_JSON_BYTES, 0), (2, MAX_JSON_BYTES)], ids=["text", "blob"])
def test_who_asks_for_a_service_can_not_make_it_buffer_a_megabyte(
    make_rank: MakeRank, service: str, question: dict[str, Any], sizes: tuple[int, int]
) -> None:
    first = make_rank(0)
    serve_probes(first.connections)
    first.connections.services["fetch"] = DonorService().serve
    with closing(stranger_at(first.address)) as stranger:
        stranger.settimeout(2.0)
        stranger.sendall(pack(question))
        assert stranger.recv(4096)
        stranger.sendall(struct.pack(">4sIQ", PROTOCOL, *sizes))
        assert stranger.recv(1) == b""


JSON = {
    "numbers": b'{"a":[' + b",".join([b"1e9"] * 50_000) + b"]}",
    "texts": b'{"a":[' + b",".join([b'"ab"'] * 50_000) + b"]}",
    "wide texts": b'{"a":[' + b",".join([b'"\\u1234"'] * 50_000) + b"]}",
    "one wide text": json.dumps({"a": "a" * 200_000 + "\U0001f600"}, ensure_ascii=False).encode(),
    "one escaped wide text": json.dumps({"a": "a" * 200_000 + "\U0001f600"}).encode(),
    "names": json.dumps({f"{number:x}": "ab" for number in range(50_000)}).encode(),
    "lists": json.dumps({"a": [[]] * 16_000}).encode(),
    "objects": json.dumps({"a": [{"a": 1}] * 16_000}).encode(),
}


@pytest.mark.parametrize("case", JSON)
def test_the_memory_that_a_message_counts_for_is_what_it_takes(case: str) -> None:
    """Queues of messages are bounded by this number."""
    tracemalloc.start()
    kept = json_object(JSON[case])
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept
    assert num_bytes <= room_bytes(JSON[case])


def test_peers_that_anybody_may_announce_share_the_memory_for_their_answers() -> None:
    """With 1 MiB for each of the 4096 peers that a look-up returns, their answers would take 4 GiB."""
    answers: list[asyncio.StreamReader] = []

    class Flooded:
        """Streams to peers that all answer with a megabyte."""

        node: Any

        def know(self, peer_id: str, addresses: tuple[str, ...]) -> None: ...

        async def find(self, admission: Admission) -> list[PeerRecord]:
            return [PeerRecord(f"peer {number}", number) for number in range(1000)]

        async def open(self, address: PeerAddress) -> Stream:
            answers.append(reader := asyncio.StreamReader())
            reader.feed_data(struct.pack(">4sIQ", PROTOCOL, MAX_JSON_BYTES, 0))
            transport = Listening()
            protocol = asyncio.StreamReaderProtocol(reader)
            writer = asyncio.StreamWriter(transport, protocol, reader, asyncio.get_running_loop())
            transport.is_closing = lambda: True  # type: ignore[method-assign]  # it ends without a word
            return reader, writer

    async def ask() -> list[str]:
        flooded = Flooded()
        flooded.node = flooded
        client = StatusClient(cast(PeerStreams, flooded), Admission("run"))
        return [each.problem for each in await asyncio.wait_for(client.ask({}), 5.0)]

    problems = asyncio.run(ask())
    assert len(problems) == 1000
    assert all("1048576 + 0 bytes was announced, more than the limit of 67108 + 0 bytes" in each for each in problems)


def test_addresses_of_peers_that_come_and_go_do_not_pile_up(keys: Path) -> None:
    streams = PeerStreams(load_identity(keys / "0.key"), NodePlace(), Admission("run"))
    tracemalloc.start()
    for number in range(20_000):
        streams.know("a member", ("/ip4/10.0.0.1/tcp/1",))
        streams.know(f"peer {number}", (f"/ip4/10.0.0.1/tcp/{number}" + "x" * 1000,))
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert num_bytes < 4096 * 2000
    assert {"a member", "peer 19999"} <= streams._known.keys()
