"""Messages of unknown and hostile peers: the receiving peer continues, and no other peer is affected."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from diloco.membership import NextView, View
from diloco.transport import Credentials, Node, NodePlace, PeerTransport, load_identity, new_secret
from tests.transport.contract import contribution, exchange
from tests.transport.relays import frame, unframe
from tests.transport.swarms import HIVEMIND_LEAVES_CONNECTIONS, Swarms, streams_of

pytestmark = HIVEMIND_LEAVES_CONNECTIONS

LIMIT_S = 60.0


ME = "{me}"
ENTRY = {"rank": 9, "address": ME, "facts": {}, "held_step": -1, "places": []}


def hello(rank: Any, address: str = ME) -> bytes:
    return frame({"kind": "hello", "rank": rank, "address": address})


def table(**fields: Any) -> bytes:
    return frame({"kind": "ask", "entry": ENTRY, **fields})


OPENINGS: dict[str, bytes] = {
    "hello in the name of a member": hello(1),
    "hello from another address": hello(9, "QmXoypizjW3WknFiJnKLwHCnL72vedxjQkDDP1mXWo6uco"),
    "table in another's name": table(entry=ENTRY | {"address": "somebody"}),
    "table of a member's number": table(entry=ENTRY | {"rank": 0}),
    "link of nobody": frame({"kind": "link", "key": "0/0-1/0", "connection": 0, "rank": 1}),
}
"""Openings of a stream from a peer that knows the secret; `ME` is its own identity. Frames that are none: over TCP."""
FOLLOWING = NextView(View(3, (9,)), View(2, (9,)), 0, {}, "")
AFTER_HELLO: dict[str, dict[str, Any]] = {
    "a vote": {"kind": "vote", "view": 2, "round": [0, 0], "reason": "no"},
    "a welcome": {"kind": "welcome", "following": FOLLOWING},
    "a value for the mailbox": {"kind": "store", "key": "x" * 100, "value": b"y"},
    "a wish to join in another's name": {"kind": "join", "entry": ENTRY | {"rank": 1}, "connected": [0, 1]},
}
"""Messages of a connected peer that is not a member; tests/protocol has all of them."""
SECRET = new_secret()


class Stranger:
    """An unknown peer in its own event loop."""

    def __init__(self, key: Path, secret: str, known: tuple[str, ...]) -> None:
        self.loop = asyncio.new_event_loop()
        self.identity = load_identity(key)
        self.credentials = Credentials("swarm run", secret, self.identity.tls_key)
        self.node = self.loop.run_until_complete(
            Node.start(self.identity, NodePlace(join=known, listen=(), map_ports=False))
        )

    def say(self, target: str, data: bytes, *, proof: bool = True) -> bytes:
        """Open a stream, send ``data``, and read the answer until the other side ends the stream."""
        return self.loop.run_until_complete(asyncio.wait_for(self._say(target, data, proof), LIMIT_S))

    async def _say(self, target: str, data: bytes, proof: bool) -> bytes:
        reader, writer = await self.node.open(target)
        try:
            assert await reader.readexactly(1) == b"?", "it is ready for TLS"
            if proof:
                await self.credentials.secure(reader, writer, listening=False)
                assert await reader.readexactly(1) == b"+", "it has admitted this peer"
            writer.write(named(data, self.node.peer_id))
            await writer.drain()
            if proof:
                writer.close()  # which delivers what was written; TLS can't close one direction alone
                return b""
            writer.write_eof()
            return await reader.read()
        except (ConnectionError, asyncio.IncompleteReadError):
            return b""
        finally:
            writer.close()

    def close(self) -> None:
        self.loop.run_until_complete(self.node.close())
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


def named(data: bytes, me: str) -> bytes:
    """Insert the sender's identity into the text of a frame."""
    if ME.encode() not in data:
        return data
    return frame(msgspec.json.decode(msgspec.json.encode(unframe(data)).replace(ME.encode(), me.encode())))


class Live:
    """Two members that continue to exchange, whatever an unknown peer sends to one of them."""

    def __init__(self, members: list[PeerTransport], stranger: Stranger) -> None:
        self.members = members
        self.stranger = stranger
        self.outer_step = 0
        self.target = streams_of(members[0]).me

    def still_works(self) -> None:
        assert [member.view.members for member in self.members] == [(0, 1), (0, 1)]
        assert [member.failure for member in self.members] == [None, None]
        given = [contribution(m, outer_step=self.outer_step) for m in range(2)]
        self.outer_step += 1
        averages = exchange(self.members, given)
        assert torch.equal(averages[0].values, averages[1].values)
        assert averages[0].contributors == (0, 1)


@pytest.fixture(scope="module")
def live(keys: Path) -> Iterator[Live]:
    swarms = Swarms(keys)
    members = swarms.meet(2, secret=SECRET)
    stranger = Stranger(keys / "9.key", SECRET, swarms.addresses_of(members[0]))
    yield Live(members, stranger)
    stranger.close()
    swarms.close()
    gc.collect()


@pytest.mark.parametrize("opening", OPENINGS.values(), ids=OPENINGS)
def test_whatever_a_stream_begins_with_the_peer_goes_on(live: Live, opening: bytes) -> None:
    live.stranger.say(live.target, opening)
    live.still_works()


@pytest.mark.parametrize("message", AFTER_HELLO.values(), ids=AFTER_HELLO)
def test_who_is_connected_and_no_member_has_no_say(live: Live, message: dict[str, Any]) -> None:
    frames = [named(each, live.stranger.node.peer_id) for each in (hello(9), frame(message))]
    live.stranger.say(live.target, b"".join(frames))
    live.still_works()


@pytest.mark.parametrize("opening", [b"", b"x", bytes(31), bytes(32), bytes(1 << 20)], ids=len)
def test_without_the_secret_nothing_is_read(live: Live, opening: bytes) -> None:
    assert len(live.stranger.say(live.target, opening, proof=False)) < 100, "alerts of TLS"
    live.still_works()
