"""Connections at the port of a connection manager: unknown peers, services, and connections that arrive at its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import threading
from contextlib import closing
from typing import Any

import pytest

from diloco.errors import TransportError
from diloco.transport import UNKNOWN_PEER_BLOB_BYTES, pack, read_frame
from diloco.transport.connections import connection_manager
from tests.transport.connection_managers import LIMIT_S, MakeRank, Rank, pair, said_to, stranger_at

STRANGERS = {
    "http": b"GET / HTTP/1.1\r\nHost: me\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "random": bytes((17 * n * n + 3) % 256 for n in range(4096)),
    "huge text": b"DLC1" + (0xFFFFFFFF).to_bytes(4, "big") + bytes(8),
    "huge blob": b"DLC1" + (2).to_bytes(4, "big") + (1 << 62).to_bytes(8, "big") + b"{}",
    "no kind": pack({"kind": ""})[:16].replace(b"\x0b", b"\x02") + b"{}",
    "unknown kind": pack({"kind": "launch-missiles"}),
    "no rank": pack({"kind": "hello"}),
    "no number": pack({"kind": "hello", "rank": "first", "address": "a:1"}),
    "no address": pack({"kind": "hello", "rank": 3, "address": "a:b"}),
    "a number of a rank that is none": pack({"kind": "hello", "rank": 1 << 40, "address": "a:1"}),
    "a negative rank": pack({"kind": "hello", "rank": -3, "address": "a:1"}),
    "an address with escapes": pack({"kind": "hello", "rank": 3, "address": "\x1b[2J:1"}),
    "17 kB of text": pack({"kind": "hello", "rank": 3, "address": "a:1", "more": "x" * 17_000}),
    "a blob of 5 kB": pack({"kind": "who"}, bytes(5000)),
    "16 kB of lists": pack({"kind": "who", "more": [[]] * 5000}),
    "half a frame": pack({"kind": "hello", "rank": 3, "address": "a:1"})[:-1],
}


@pytest.mark.parametrize("opening", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_harms_nobody(make_rank: MakeRank, opening: bytes) -> None:
    first, second = pair(make_rank)
    said_to(first.address, opening)
    assert first.connections.connected == {1}
    second.say(0, {"kind": "hello again"})
    assert first.heard.get(timeout=LIMIT_S)[1] == {"kind": "hello again"}
    assert first.losses.empty()


def test_a_huge_announced_size_costs_no_memory(make_rank: MakeRank) -> None:
    """The connection ends at the header; memory of the announced size is never allocated."""
    first = make_rank(0)
    pages = os.sysconf("SC_PAGE_SIZE")

    def resident_bytes() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * pages

    before = resident_bytes()
    for _ in range(20):
        with closing(stranger_at(first.address)) as stranger:
            stranger.sendall(STRANGERS["huge blob"])
            assert stranger.recv(1) == b""
    assert resident_bytes() - before < 64 << 20


def test_a_stranger_who_says_nothing_is_shown_out(make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_manager, "FIRST_MESSAGE_S", 0.05)
    first = make_rank(0)
    with closing(stranger_at(first.address)) as stranger:
        assert stranger.recv(1) == b""


def stranger_as(first: Rank, rank: int) -> socket.socket:
    """Open a connection over which an unknown peer claims to be a rank."""
    stranger = stranger_at(first.address)
    stranger.sendall(pack({"kind": "hello", "rank": rank, "address": str(first.address)}))
    assert stranger.recv(16, socket.MSG_WAITALL)[:4] == b"DLC1"
    first.settled()
    return stranger


def test_a_stranger_says_little_and_a_member_may_say_much(make_rank: MakeRank) -> None:
    first = make_rank(0)
    much = {"kind": "much", "words": "x" * 17_000}
    with closing(stranger_as(first, 5)) as stranger:
        stranger.sendall(pack({"kind": "little", "words": "x" * 16_000}))
        assert first.heard.get(timeout=LIMIT_S)[1]["kind"] == "little"
        stranger.sendall(pack(much))
        rank, loss = first.losses.get(timeout=LIMIT_S)
    assert rank == 5
    assert "17026 + 0 bytes was announced, more than the limit of 16384 + 4096 bytes" in loss.text
    first.connections.post(first.connections.trust, [6])
    with closing(stranger_as(first, 6)) as member:
        member.sendall(pack(much, bytes(100_000)))
        assert first.heard.get(timeout=LIMIT_S)[1] == much


@pytest.mark.parametrize("trusted", [False, True])
def test_who_does_not_read_what_it_is_told_is_lost(make_rank: MakeRank, *, trusted: bool) -> None:
    first = make_rank(0)
    first.connections.post(first.connections.trust, [5] if trusted else [])
    most_bytes = (
        connection_manager.MOST_UNSENT_BYTES if trusted else connection_manager.MOST_UNSENT_TO_UNKNOWN_PEER_BYTES
    )
    with closing(stranger_as(first, 5)):
        for _ in range((most_bytes + (16 << 20)) // 100_000):  # part of it is buffered in the kernel
            first.say(5, {"kind": "x"}, bytes(100_000))
        rank, loss = first.losses.get(timeout=LIMIT_S)
    assert rank == 5
    assert "does not read its messages" in loss.text


def test_connections_of_one_address_that_do_nothing_are_bounded(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_manager, "MOST_OPEN_OF_ONE", 3)
    first = make_rank(0)
    idle = [stranger_at(first.address) for _ in range(3)]
    with closing(stranger_at(first.address)) as one_too_many:
        assert one_too_many.recv(1) == b""
    idle.pop().close()
    with contextlib.ExitStack() as stack:
        for each in idle:
            stack.enter_context(closing(each))
        while True:  # the place becomes free once the end of the connection has been noticed
            with closing(stranger_at(first.address)) as other, contextlib.suppress(ConnectionError):
                other.sendall(pack({"kind": "who"}))
                if other.recv(4) == b"DLC1":
                    break


def test_somebody_else_behind_an_address_is_told_apart(make_rank: MakeRank) -> None:
    first, other = make_rank(0), make_rank(4)
    with pytest.raises(TransportError, match=rf"{other.address} should be rank 1, but answered .*Another diloco"):
        first.connections.call(first.connections.connect(1, other.address), LIMIT_S)
    assert first.connections.connected == frozenset()


# Services, and closing.


def test_a_service_takes_over_a_connection_which_ends_with_it(make_rank: MakeRank) -> None:
    async def echo(
        message: dict[str, Any], blob: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if message["words"] == "fail":
            raise ValueError("an odd question")
        writer.write(pack({"kind": "echo", "words": message["words"]}, blob))
        await writer.drain()

    async def ask(words: str) -> tuple[dict[str, Any], bytes]:
        reader, writer = await asyncio.open_connection(first.address.host, first.address.port)
        writer.write(pack({"kind": "echo", "words": words}, b"blob"))
        try:
            answer = await read_frame(reader, most_blob_bytes=UNKNOWN_PEER_BLOB_BYTES)
            assert await reader.read() == b""
            return answer
        finally:
            writer.close()

    first, second = pair(make_rank)
    first.connections.services["echo"] = echo
    assert second.connections.call(ask("hello"), LIMIT_S) == ({"kind": "echo", "words": "hello"}, b"blob")
    with pytest.raises(asyncio.IncompleteReadError):
        second.connections.call(ask("fail"), LIMIT_S)
    assert first.connections.connected == {1}


def test_who_says_hello_while_the_other_one_closes_is_shown_out(make_rank: MakeRank) -> None:
    """Its task may be past the point at which it can be cancelled, and connect after the others have closed."""
    first = make_rank(0)
    with closing(stranger_at(first.address)) as late:
        first.settled()

        async def hello_in_the_last_moment() -> None:
            late.sendall(pack({"kind": "hello", "rank": 5, "address": "127.0.0.1:1"}))
            await first.connections.end()

        first.connections.call(hello_in_the_last_moment(), LIMIT_S)
        assert first.connections.connected == frozenset()
        first.connections.close()
        while late.recv(4096):
            pass


@pytest.mark.parametrize("turns", range(7))
def test_who_comes_while_the_other_one_closes_leaves_nothing_open(make_rank: MakeRank, turns: int) -> None:
    """At any stage of its connection: accepted by the system, known to the loop, or handled by a task."""
    first = make_rank(0)

    async def come_and_close() -> None:
        late.connect((first.address.host, first.address.port))
        for _ in range(turns):
            await asyncio.sleep(0)
        await first.connections.end()

    with closing(socket.socket()) as late:
        first.connections.call(come_and_close(), LIMIT_S)
        first.connections.close()
        late.settimeout(LIMIT_S)
        with contextlib.suppress(ConnectionError):
            while late.recv(4096):
                pass
    gc.collect()


def test_what_nobody_takes_keeps_no_connection_open_after_the_end(make_rank: MakeRank) -> None:
    async def pour(
        message: dict[str, Any], blob: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(bytes(64 << 20))
        asked.set()

    first, asked = make_rank(0), threading.Event()
    first.connections.services["pour"] = pour
    with closing(stranger_at(first.address)) as idle:
        idle.sendall(pack({"kind": "pour"}))
        assert asked.wait(LIMIT_S)
        first.settled()
        first.connections.close()
        gc.collect()
        with contextlib.suppress(ConnectionError):
            while idle.recv(1 << 20):
                pass
