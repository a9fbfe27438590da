"""What a program that is no replica may send to the port of one: nobody else is affected, and no memory is taken."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import ssl
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any
from unittest import mock

import pytest
import torch

from diloco.membership import NextView, View
from diloco.protocol import Entry, Welcome
from diloco.transport import (
    Address,
    Admission,
    Credentials,
    Members,
    PeerTransport,
    TcpStreams,
    connect,
    load_identity,
    new_secret,
)
from tests.transport.contract import contribution, exchange
from tests.transport.nowhere import answering, place, rules
from tests.transport.relays import Relays, Unit, frame, part, plain_stranger_at, said_to, stranger_at, unframe
from tests.transport.swarms import HIVEMIND_LEAVES_CONNECTIONS, Swarms, answer_to, streams_of
from tests.transport.wires import QUICK, Wires, at_once, rendezvous

SOON_S = 5.0  # less than the time that a silent stranger has
HELLO = {"kind": "hello", "rank": 3, "address": "a:1"}
OPENINGS = {
    "nothing": b"",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "another version": frame(HELLO, magic=b"DLC0"),
    "a text of 4 GB": b"DLC3" + (0xFFFFFFFF).to_bytes(4, "big") + bytes(8),
    "17 kB of text": frame(HELLO | {"more": "x" * 17_000}),
    "16 kB of lists": frame({"kind": "who", "more": [[]] * 5000}),
    "no message": frame(b"{kind: hello}"),
    "a deep message": frame(b"\x91" * 10_000),
    "an unknown kind": frame({"kind": "launch-missiles"}),
    "no rank": frame({"kind": "hello"}),
    "a rank beyond the run": frame(HELLO),
    "its own rank": frame(HELLO | {"rank": 0}),
    "a living rank": frame(HELLO | {"rank": 1}),
    "no address": frame(HELLO | {"address": "a:b"}),
    "an address with escapes": frame(HELLO | {"address": "\x1b[2J:1"}),
    "a state of no fragment": frame({"kind": "fetch", "fragment": -1, "after": 0, "snapshot": ""}),
    "a stripe": frame({"kind": "link", "token": "0123456789abcdef", "number": 0, "rank": 1}) + part(b"x", total=1),
    "a probe of 1 TB": frame({"kind": "probe", "give": 1 << 40}),
}


class Live:
    """Two replicas that go on to exchange in their view, whatever a stranger sends to one of them."""

    rounds = itertools.count(100)

    def __init__(self, transports: list[PeerTransport]) -> None:
        self.transports, self.view = transports, transports[0].view

    def still_works(self) -> None:
        outer_step = next(self.rounds)
        averages = exchange(self.transports, [contribution(m, outer_step=outer_step) for m in range(2)])
        assert torch.equal(averages[0].values, averages[1].values)
        assert [average.contributors for average in averages] == [(0, 1), (0, 1)]
        assert [each.view for each in self.transports] == [self.view, self.view]
        assert [each.failure for each in self.transports] == [None, None]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    wires = Wires()
    yield Live(wires.meet(2))
    wires.close()


@pytest.mark.parametrize("opening", OPENINGS)
def test_a_stranger_harms_nobody_and_takes_no_memory(live: Live, opening: str) -> None:
    live.still_works()
    tracemalloc.start()
    for transport in live.transports:
        for plain in (True, False):
            heard = said_to(transport.address, OPENINGS[opening], plain=plain)
            assert b"hello" not in heard, "nobody takes it for a rank"
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 4 << 20
    live.still_works()


def test_what_is_announced_above_the_limit_ends_the_connection_at_once(live: Live) -> None:
    fetch = {"kind": "fetch", "fragment": 0, "after": 0, "snapshot": ""}
    for asked, limit in (({}, 1 << 14), ({"kind": "probe"}, 1 << 19), (fetch, 1 << 14)):
        with closing(stranger_at(live.transports[0].address)) as stranger:
            if asked:
                stranger.sendall(frame(asked))
                assert stranger.recv(4096)
            stranger.settimeout(SOON_S)
            stranger.sendall(b"DLC3" + (limit + 1).to_bytes(4, "big"))
            assert stranger.recv(1) == b"", asked


def test_connections_that_do_nothing_keep_nobody_out(live: Live) -> None:
    """Before, 64 of them closed the port for direct streams of a swarm to all its members."""
    with ExitStack() as idle:
        address = live.transports[0].address
        first = idle.enter_context(closing(plain_stranger_at(address)))
        for _ in range(300):
            idle.enter_context(closing(plain_stranger_at(address)))
        assert first.recv(1) == b"", "the oldest one is closed"
        with closing(stranger_at(address)) as honest:
            honest.sendall(frame({"kind": "probe"}))
            assert honest.recv(4) == b"DLC3"
        live.still_works()


def test_who_opens_connections_all_the_time_takes_a_tenth_of_the_processor_at_most(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each handshake takes more than a millisecond of the thread that hears the others' heartbeats."""
    connections, address = live.transports[0].connections, live.transports[0].address
    monkeypatch.setattr(connections, "_arrivals", type(connections._arrivals)(most=2, span_s=1e9))
    for _ in range(2):
        stranger_at(address).close()
    for _ in range(20):
        with pytest.raises((ConnectionError, ssl.SSLError)):
            stranger_at(address)
    live.still_works()


def test_a_process_that_stops_in_the_handshake_is_forgotten(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = asyncio.timeout
    monkeypatch.setattr(asyncio, "timeout", lambda seconds: limit(min(seconds, 1.0) if seconds else seconds))
    with closing(plain_stranger_at(live.transports[0].address)) as stranger:
        stranger.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        stranger.settimeout(9.0)
        assert stranger.recv(1) == b""


@pytest.mark.parametrize(("rank", "words"), [(1, "which still answers"), (0, "the process that was asked")])
def test_nobody_changes_the_address_of_a_rank_that_is_connected(live: Live, rank: int, words: str) -> None:
    """Before, a message to the rendezvous or to a member did, and joiners took its author for three donors."""
    asked, other = live.transports
    entry = {"rank": rank, "address": "6.6.6.6:1", "facts": {}, "held_step": -1, "places": []}
    with closing(stranger_at(asked.address)) as stranger:
        stranger.sendall(frame({"kind": "ask", "entry": entry}))
        answer = unframe(stranger.recv(1 << 16))
    assert answer["kind"] == "refused"
    assert words in answer["reason"]
    places = {each: known.address for each, known in asked.connections.entries.items()}
    assert places == {0: str(asked.address), 1: str(other.address)}
    live.still_works()


def test_who_does_not_close_what_was_closed_keeps_no_descriptor_of_the_other_end(live: Live) -> None:
    """TLS waits for it half a minute, during which thousands of such connections used up all descriptors."""
    with ExitStack() as left_open:
        for _ in range(2):
            stranger = left_open.enter_context(closing(stranger_at(live.transports[0].address)))
            stranger.sendall(frame({}))
            stranger.settimeout(SOON_S)
            assert stranger.recv(1) == b"", "it is closed"
            raw = socket.socket(fileno=os.dup(stranger.fileno()))
            with closing(raw), suppress(ConnectionResetError):
                raw.settimeout(SOON_S)
                assert raw.recv(1) == b"", "the other end has no descriptor of it any more"
    live.still_works()


class Name(Address):
    def __str__(self) -> str:
        return self.host


def test_a_stranger_has_few_connections_however_often_it_opens_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that came again in place of another did not count."""
    monkeypatch.setattr(TcpStreams, "named", True)  # as in a swarm: the key of a process is its address
    monkeypatch.setattr(TcpStreams, "address", lambda _, text: Name(text, 0))
    transport, credentials = PeerTransport(rules(rank=0), TcpStreams()), Credentials("tcp", "")
    place, me = transport.connections.listen("127.0.0.1", range(1), "127.0.0.1"), credentials.public_key
    with closing(transport), ExitStack() as stack:
        transport.begin(View.of(1), member=True)
        transport.connections.entries[1] = Entry(1, "who only asks in that number, and keeps nobody out")
        for number in range(24):
            stranger = stack.enter_context(credentials.opening.wrap_socket(plain_stranger_at(place)))
            hello = {"kind": "hello", "rank": 1 + number // 2, "address": transport.connections.streams.identity_of(me)}
            stranger.sendall(frame(hello | {"hello": f"{number}"}))
            assert stranger.recv(1) == b"+"
            assert unframe(stranger.recv(1 << 12))["kind"] == "greeting"
        assert len(transport.connections.connected) <= 5, "one may be about to be dropped"


def test_who_does_not_read_what_it_is_told_is_lost(wires: Wires, relays: Relays) -> None:
    """Otherwise its messages would pile up here."""
    first, _ = wires.meet(2, continue_without_lost=True, silence_s=60.0, round_timeout_s=60.0)
    free = threading.Event()

    def hold_back(unit: Unit) -> bytes:
        assert free.wait(60)
        return unit.data

    relays.hook = hold_back
    long = Welcome(NextView(View.of(2), View(-1, (0, 1)), 1, {}, ""), bytes(1 << 18))
    for _ in range(96):  # part of it is buffered in the kernel
        first.connections.post(first.connections.send, 1, long)
    average = first.average(contribution(0)).wait()
    free.set()
    assert average.contributors == (0,)
    assert "does not read its messages" in first.reason


def test_neither_an_address_that_is_none_nor_another_one_of_a_connected_rank_is_taken_from_an_answer() -> None:
    """Before, the first ended each later search, and a member could name itself as each donor of a joiner."""
    with rendezvous(2) as address:
        both = at_once([lambda m=m: connect(place(m, 2, address), rules(**QUICK)) for m in range(2)])
    told = Members((Entry(1, "6.6.6.6:1"), Entry(2, "nowhere"), Entry(3, "127.0.0.1:1")), (0, 1))
    with answering(told) as liar, ExitStack() as open_ones:
        first, second = (open_ones.enter_context(closing(each.transport)) for each in both)
        first.connections.most_ranks = 4
        first.connections.call(both[0].ask(liar))
        known = {rank: each.address for rank, each in first.connections.entries.items()}
        assert known == {0: str(first.address), 1: str(second.address), 3: "127.0.0.1:1"}


def test_a_joiner_takes_the_table_that_most_members_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the first one that answered could have it join the members that it named."""
    directory = connect(place(0, 1, Address("127.0.0.1", 0)), rules())
    honest = Members((Entry(1, "a:1"), Entry(2, "a:2")), (1, 2))
    with ExitStack() as open_ones, closing(directory.transport):
        liar = open_ones.enter_context(answering(Members((Entry(3, "a:3"),), (3,))))
        others = [open_ones.enter_context(answering(honest)) for _ in range(2)]
        monkeypatch.setattr(directory, "addresses", mock.AsyncMock(return_value=[liar, *others]))
        monkeypatch.setattr(directory, "connect", mock.AsyncMock(side_effect=lambda found: found))
        view = directory.transport.connections.call(directory.find())
    assert view.members == (1, 2)


# Over libp2p.


ADMISSION = Admission("run", new_secret())


@pytest.fixture(scope="module")
def swarm(lasting: Swarms) -> Swarms:
    lasting.meet(2, secret=ADMISSION.secret)
    return lasting


@HIVEMIND_LEAVES_CONNECTIONS
def test_whatever_a_stream_begins_with_the_peer_goes_on(swarm: Swarms) -> None:
    """From a peer that knows the secret. Frames that are none: over TCP; all messages: tests/protocol."""
    me = load_identity(swarm.key(9)).peer_id
    hello: dict[str, Any] = {"kind": "hello", "rank": 9, "address": me}
    entry = {"rank": 9, "address": me, "facts": {}, "held_step": -1, "places": []}
    following = NextView(View(3, (9,)), View(2, (9,)), 0, {}, "")
    openings: dict[str, tuple[dict[str, Any], ...]] = {
        "hello in the name of a member": (hello | {"rank": 1},),
        "hello from another address": (hello | {"address": "QmXoypizjW3WknFiJnKLwHCnL72vedxjQkDDP1mXWo6uco"},),
        "table in another's name": ({"kind": "ask", "entry": entry | {"address": "somebody"}},),
        "table of a member's number": ({"kind": "ask", "entry": entry | {"rank": 0}},),
        "link of nobody": ({"kind": "link", "key": "0/0-1/0", "connection": 0, "rank": 1},),
        "a vote of no member": (hello, {"kind": "vote", "view": 2, "round": [0, 0], "reason": "no"}),
        "a welcome of no member": (hello, {"kind": "welcome", "following": following}),
        "a value for the mailbox": (hello, {"kind": "store", "key": "x" * 100, "value": b"y"}),
        "a wish to join in another's name": (hello, {"kind": "join", "entry": entry | {"rank": 1}, "connected": [0]}),
    }

    async def say(target: Address) -> None:
        async with swarm.stranger(9, swarm.transports[0], ADMISSION) as streams:
            both = Live(swarm.transports)
            for name, messages in openings.items():
                answer = await answer_to(await streams.open(target), *messages)
                assert b"members" not in answer, name
                assert (b"greeting" in answer) == (messages[0] == hello), name
                both.still_works()

    asyncio.run(say(Address(streams_of(swarm.transports[0]).me, 0)))


@HIVEMIND_LEAVES_CONNECTIONS
def test_without_the_secret_nothing_is_read(swarm: Swarms) -> None:
    async def say(target: str) -> None:
        async with swarm.stranger(9, swarm.transports[0], ADMISSION) as streams:
            both = Live(swarm.transports)
            for opening in (b"", bytes(31), bytes(1 << 20)):
                reader, writer = await streams.node.open(target)
                with closing(writer), suppress(ConnectionError):
                    assert await reader.readexactly(1) == b"?", "it is ready for TLS"
                    writer.write(opening)
                    writer.write_eof()
                    assert len(await reader.read()) < 100, "alerts of TLS"
                both.still_works()

    asyncio.run(say(streams_of(swarm.transports[0]).me))
