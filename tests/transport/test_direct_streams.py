"""Direct streams between peers of a swarm: which peers may open one, and which route payloads take."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest

from diloco.errors import TransportError
from diloco.transport import DirectStreams, join
from tests.transport.contract import contribution, exchange
from tests.transport.swarms import HIVEMIND_LEAVES_CONNECTIONS, Swarms, wait_for_members

LIMIT_S = 30.0
HOST = "127.0.0.1"


class Listener:
    """The peer "me", which sends "welcome, NAME" to each peer that has proved itself."""

    def __init__(self) -> None:
        self.proven: dict[asyncio.StreamWriter, str] = {}
        self.direct = DirectStreams("me", self.proven)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"welcome, {self.proven[writer]}".encode())
        await writer.drain()
        writer.close()

    async def welcomes(self, peer: str, offer: Any) -> bytes:
        """Return what ``peer`` receives when it uses an offer."""
        reader, writer = await DirectStreams(peer, {}).open(offer)
        try:
            return await reader.read()
        finally:
            writer.close()


@asynccontextmanager
async def listening() -> AsyncIterator[Listener]:
    listener = Listener()
    await listener.direct.listen([HOST], 0, listener.accept)
    yield listener
    await listener.direct.refuse()


def run(body: Callable[[Listener], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(LIMIT_S), listening() as listener:
            await body(listener)

    asyncio.run(whole())


def test_who_has_an_offer_is_known_by_name_at_the_first_place_that_answers() -> None:
    async def body(listener: Listener) -> None:
        with socket.create_server((HOST, 0)) as mute:  # accepts the connection and sends nothing
            offer = listener.direct.offer("you", [HOST])
            assert offer is not None
            offer.places = (f"{HOST}:{mute.getsockname()[1]}", *offer.places)
            for _ in range(2):
                assert await listener.welcomes("you", offer) == b"welcome, you", "an offer can be used again"

    run(body)


def test_an_offer_is_of_no_use_to_anybody_else() -> None:
    async def body(listener: Listener) -> None:
        offer = listener.direct.offer("you", [HOST])
        assert offer is not None
        listener.direct.offer("another", [HOST])
        assert await listener.welcomes("another", offer) == b""
        assert await listener.welcomes("you", msgspec.structs.replace(offer, key=bytes(32))) == b""

    run(body)


def test_nothing_is_said_to_somebody_else_at_the_place() -> None:
    async def body(listener: Listener) -> None:
        async with listening() as impostor:
            offer = listener.direct.offer("you", [HOST])
            other = impostor.direct.offer("you", [HOST])
            assert offer is not None
            assert other is not None
            offer.places = other.places
            with pytest.raises(OSError, match="another program listens at"):
                await listener.welcomes("you", offer)

    run(body)


OFFERS = [(), (HOST,), (f"{HOST}:70000",), ("nobody.invalid:1",)]


def test_an_offer_that_is_none_is_no_way() -> None:
    async def body(listener: Listener) -> None:
        offer = listener.direct.offer("you", [HOST])
        assert offer is not None
        for places in OFFERS:
            with pytest.raises(OSError):
                await listener.welcomes("you", msgspec.structs.replace(offer, places=places))

    run(body)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(1 << 16), b"\x16\x03\x01\xff\xff"], ids=len)
def test_whatever_a_stranger_says_it_is_turned_away(said: bytes) -> None:
    async def body(listener: Listener) -> None:
        for context in (None, _trusting()):
            reader, writer = await asyncio.open_connection(HOST, listener.direct.port, ssl=context)
            writer.write(said)
            if context is None:
                writer.write_eof()
            else:
                writer.write(bytes(32))  # an invalid proof
            with suppress(ConnectionError):
                assert len(await reader.read()) < 100, "at most messages of TLS itself"
            writer.transport.abort()
        assert await listener.welcomes("you", listener.direct.offer("you", [HOST])) == b"welcome, you"
        assert set(listener.proven.values()) == {"you"}

    run(body)


def test_older_tls_is_refused() -> None:
    async def body(listener: Listener) -> None:
        context = _trusting()
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(HOST, listener.direct.port, ssl=context)

    run(body)


def _trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def test_a_port_that_is_taken_is_an_error_that_names_it() -> None:
    async def body(listener: Listener) -> None:
        with pytest.raises(TransportError, match=rf"port {listener.direct.port} of {HOST}.*network.listen"):
            await DirectStreams("you", {}).listen([HOST], listener.direct.port, listener.accept)

    run(body)


# The routes of payloads.


@pytest.mark.parametrize(
    ("second", "way"),
    [
        ({"hidden": True}, "direct streams"),
        ({"direct": "never"}, "libp2p (one of the two peers does not use direct streams)"),
    ],
    ids=["the other one listens", "one wants none"],
)
@HIVEMIND_LEAVES_CONNECTIONS
def test_payloads_go_directly_where_one_can_reach_the_other(swarms: Swarms, second: dict[str, Any], way: str) -> None:
    first = swarms.peer(0).transport
    connected = swarms.peer(1, [first], **second)
    join(connected, LIMIT_S)
    both = [first, connected.transport]
    for each in both:
        wait_for_members(each, 2)
        each.tick()
    exchange(both, [contribution(m) for m in range(2)])
    assert all(each.link_descriptions[1 - each.replica].startswith(way) for each in both)


@HIVEMIND_LEAVES_CONNECTIONS
def test_who_allows_direct_streams_alone_uses_no_other_way(swarms: Swarms) -> None:
    first = swarms.peer(0, direct="only").transport
    connected = swarms.peer(1, [first], direct="never")
    join(connected, LIMIT_S)
    changed, both = threading.Condition(), (first, connected.transport)

    def note(following: object) -> None:
        with changed:
            changed.notify_all()

    for each in both:
        each.on_change = note
    with changed:
        assert changed.wait_for(
            lambda: any("direct='only' allows no other" in f"{each.reason}{each.failure}" for each in both),
            LIMIT_S,
        ), [each.reason for each in both]
