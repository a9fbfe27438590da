"""What a program that is no replica may send to the port of one: nobody else is affected, and no memory is taken."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import ssl
import sys
import threading
import tracemalloc
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from diloco.membership import NextView, View
from diloco.protocol import Ask, Beat, Entry, Welcome
from diloco.transport import (
    Address,
    Admission,
    Credentials,
    Directory,
    Members,
    PeerTransport,
    TcpDirectory,
    TcpStreams,
    connect,
    load_identity,
    new_secret,
)
from tests.transport.contract import contribution, exchange
from tests.transport.nowhere import answering, place, rules
from tests.transport.relays import FRAME, Relays, Unit, frame, part, plain_stranger_at, said_to, stranger_at, unframe
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
        tracemalloc.start()
        for _ in range(300):
            idle.enter_context(closing(plain_stranger_at(address)))
        assert first.recv(1) == b"", "the oldest one is closed"
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < 60 << 20, "each takes a quarter of a megabyte, for TLS"
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
    credentials = Credentials()
    entry = Entry(rank, "6.6.6.6:1", TcpStreams(credentials).me)
    with closing(stranger_at(asked.address, credentials=credentials)) as stranger:
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


NOWHERE = "127.0.0.1:1"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Directory]:
    """That of the only member of a view. As in a swarm, the key of a process gives it a number."""
    monkeypatch.setattr(TcpStreams, "owns", lambda _, identity, rank: rank == number_of(identity))
    transport = PeerTransport(rules(rank=0), TcpStreams())
    with closing(transport):
        place = transport.connections.listen("127.0.0.1", range(1), "127.0.0.1")
        directory = TcpDirectory(transport, (Entry(0, NOWHERE, transport.connections.streams.me),), place)
        transport.begin(View.of(1), member=True)
        yield directory


def number_of(identity: str) -> int:
    return int(identity[:7], 16)


class Caller:
    """A process with a key of its own, which opens connections to a member of a swarm, or accepts them."""

    def __init__(self, member: Directory, stack: ExitStack) -> None:
        self.place, self.stack, self.credentials = member.connections.address, stack, Credentials()
        self.identity = member.connections.streams.identity_of(self.credentials.public_key)

    def opens(self, message: dict[str, Any]) -> ssl.SSLSocket:
        stream = self.stack.enter_context(self.credentials.opening.wrap_socket(plain_stranger_at(self.place)))
        stream.sendall(frame(message))
        assert stream.recv(1) == b"+"
        return stream

    def hello(self, rank: int, name: str = "") -> ssl.SSLSocket:
        return self.opens({"kind": "hello", "rank": rank, "address": NOWHERE, "hello": name or f"{rank}"})

    def greets(self, ranks: Iterable[int]) -> Address:
        """Return where it answers those that connect to it, as one rank after the other."""
        listening = self.stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def serve() -> None:
            for rank in ranks:
                raw = listening.accept()[0]
                stream = self.stack.enter_context(self.credentials.listening.wrap_socket(raw, server_side=True))
                stream.sendall(b"+")
                assert said(stream)["kind"] == "hello"
                stream.sendall(frame({"kind": "greeting", "rank": rank}))

        threading.Thread(target=serve, daemon=True).start()
        return Address(*listening.getsockname())

    def ask(self, rank: int, **more: Any) -> dict[str, Any]:
        entry = {"rank": rank, "address": NOWHERE, "key": self.identity}
        return said(self.opens({"kind": "ask", "entry": entry | more}))


def said(stream: ssl.SSLSocket) -> dict[str, Any]:
    """Return the next message but for heartbeats."""
    while True:
        data = stream.recv(FRAME.size)
        size = len(data) + FRAME.unpack(data)[1]
        while len(data) < size:
            data += stream.recv(size - len(data))
        if (message := unframe(data))["kind"] != "beat":
            return message


@contextmanager
def beating(stream: ssl.SSLSocket) -> Iterator[None]:
    """Send heartbeats, as a process that is there."""
    done = threading.Event()

    def beat() -> None:
        with suppress(OSError):
            while not done.wait(QUICK["heartbeat_s"] / 4):
                stream.sendall(frame({"kind": "beat"}))

    thread = threading.Thread(target=beat)
    thread.start()
    yield
    done.set()
    thread.join()


def test_a_stranger_has_few_connections_however_often_it_opens_each(alone: Directory) -> None:
    """One that came again in place of another did not count, nor did one that it had this process open."""
    connections = alone.connections
    with ExitStack() as stack:
        stranger = Caller(alone, stack)
        connections.entries[1] = Entry(1, NOWHERE, "of who only asks in that number, and keeps nobody out")
        for number in range(24):
            assert said(stranger.hello(1 + number // 2, f"{number}"))["kind"] == "greeting"
        assert len(connections.connected) <= 5, "one may be about to be dropped"
        place = stranger.greets(range(50, 60))
        for rank in range(50, 60):
            connections.call(connections.dial(Entry(rank, str(place), stranger.identity)))
        assert len(connections.connected) <= 5
        assert not any(peer.trusted for peer in connections.peers.values())


def test_a_stranger_that_stays_in_the_number_of_another_one_keeps_it_out_of_nothing(alone: Directory) -> None:
    """Whose key it follows from has it, until somebody is a member."""
    with ExitStack() as stack:
        stranger, owner = Caller(alone, stack), Caller(alone, stack)
        number = number_of(owner.identity)
        stays = stranger.hello(number)
        assert said(stays)["kind"] == "greeting"
        assert stranger.ask(number)["kind"] == "members", "it has asked in that number, too"
        with beating(stays):
            assert owner.ask(number)["kind"] == "members"
            joins = owner.hello(number)
            assert said(joins)["kind"] == "greeting"
        assert said(stays)["kind"] == "excluded"
        with beating(joins):
            for answer in (said(stranger.hello(number, "again")), stranger.ask(number)):
                assert answer["kind"] == "refused"
        assert alone.connections.identity(number) == owner.identity


def test_only_the_key_of_a_member_takes_its_rank_while_it_is_one(alone: Directory) -> None:
    """Over TCP any process took it once the member was quiet for two heartbeats, and so showed that it had ended."""
    connections = alone.connections
    with ExitStack() as stack:
        member, another = Caller(alone, stack), Caller(alone, stack)
        connections.entries[1] = Entry(1, NOWHERE, member.identity)
        connections.post(connections.trust, [0, 1])
        for answer in (another.ask(1), said(another.hello(1))):
            assert (answer["kind"], answer.get("for_good", False)) == ("refused", False)
            assert "which has another key, until the others have lost it" in answer["reason"]
        assert member.ask(1)["kind"] == "members", "it was started again"
        assert said(member.hello(1))["kind"] == "greeting"
        connections.post(connections.trust, [0])
        connections.post(connections.hang_up, 1)
        assert another.ask(1)["kind"] == "members"


def test_who_speaks_for_another_key_is_not_answered(alone: Directory) -> None:
    with ExitStack() as stack:
        caller = Caller(alone, stack)
        entry = {"rank": 1, "address": NOWHERE, "key": alone.connections.streams.me}
        assert caller.opens({"kind": "ask", "entry": entry}).recv(1) == b""


def test_who_connects_as_a_rank_before_the_table_is_known_gives_way_to_the_one_in_the_table() -> None:
    """It would have become the member, as nobody compared its key."""
    with closing(PeerTransport(rules(rank=0), TcpStreams())) as transport, ExitStack() as stack:
        connections = transport.connections
        place = connections.listen("127.0.0.1", range(1), "127.0.0.1")
        directory = TcpDirectory(transport, (Entry(0, str(place), connections.streams.me),), place)
        stranger, owner = Caller(directory, stack), Caller(directory, stack)
        stays = stranger.hello(1)
        assert said(stays)["kind"] == "greeting"
        entry = connections.entries[1] = Entry(1, str(owner.greets([1])), owner.identity)
        assert not connections.hears(entry)
        connections.call(connections.dial(entry))
        assert connections.identity(1) == owner.identity
        assert said(stays)["kind"] == "excluded"


def test_of_two_processes_that_replace_a_silent_one_the_second_waits_for_the_first(
    alone: Directory,
) -> None:
    """Both had waited for the silent one to answer, and the second one then ended the connection of the first."""
    with ExitStack() as stack:
        silent, *both = (Caller(alone, stack) for _ in range(3))
        assert said(silent.hello(1))["kind"] == "greeting"

        def comes(caller: Caller) -> str:
            answer = said(stream := caller.hello(1))["kind"]
            if answer == "greeting":
                stack.enter_context(beating(stream))
            return str(answer)

        assert sorted(at_once([partial(comes, each) for each in both])) == ["greeting", "refused"]


def test_who_stood_still_does_not_give_away_the_place_of_one_that_it_has_yet_to_hear(live: Live) -> None:
    """It had heard nothing for longer than two heartbeats, and so took another process for that one at once."""
    connections = live.transports[0].connections
    stood_still_since_s = connections.loop.time() - 60.0
    assert connections.call(connections.peers[1].answers(stood_still_since_s, QUICK["heartbeat_s"]))


def test_a_member_that_is_told_to_open_connections_opens_one_to_each_and_few_at_a_time(
    alone: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may ask the others for one, as often as it likes."""
    dialled, released = list[int](), asyncio.Event()

    async def dial(entry: Entry) -> None:
        dialled.append(entry.rank)
        await released.wait()

    async def introduce() -> None:
        for rank in (7, 7, *range(100, 300)):
            alone.transport._introduce(Entry(rank, f"peer:{rank}", f"key {rank}"))
        await asyncio.sleep(0)
        released.set()

    monkeypatch.setattr(alone.connections, "dial", dial)
    alone.connections.call(introduce())
    assert dialled == [7, *range(100, 163)]


def test_strangers_that_send_small_messages_leave_time_for_the_others(alone: Directory) -> None:
    """Each takes a tenth of a millisecond of the control thread, of which 256 strangers took all."""
    with ExitStack() as stack:
        stream = Caller(alone, stack).hello(1)
        assert said(stream)["kind"] == "greeting"
        stream.sendall(frame({"kind": "beat"}) * 400)
        for _ in range(3):
            Caller(alone, stack).ask(1000)
        assert alone.connections.peers[1].num_messages < 250


def test_strangers_that_name_many_places_do_not_keep_the_table_from_joiners(alone: Directory) -> None:
    """The answer became too long to be sent."""
    connections, many = alone.connections, ("x" * 4000,) * 4
    connections._unknown_peers = type(connections._unknown_peers)(256, 256)  # as many as of 64 keys
    with ExitStack() as stack:
        stranger = Caller(alone, stack)
        for rank in range(1, 71):
            assert said(stranger.hello(rank))["kind"] == "greeting"
            connections.entries[rank] = Entry(rank, NOWHERE, stranger.identity, places=many)  # as it has asked
        answer = Caller(alone, stack).ask(1000)
    assert (answer["kind"], answer["members"]) == ("members", [0])


def test_who_does_not_read_an_answer_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = sys.modules["diloco.transport.connections.streams"]
    monkeypatch.setattr(streams, "ANSWER_S", 0.01)

    async def say() -> list[type]:
        reader, writer = mock.Mock(), mock.Mock(drain=asyncio.Event().wait)
        done, _ = await asyncio.wait([asyncio.ensure_future(streams.say(Beat(), reader, writer))], timeout=SOON_S)
        return [type(each.exception()) for each in done]

    assert asyncio.run(say()) == [TimeoutError]


def test_who_does_not_read_what_it_is_told_is_lost(wires: Wires, relays: Relays) -> None:
    """Otherwise its messages would pile up here."""
    first, _ = wires.meet(2, continue_without_lost=True, silence_s=60.0, round_timeout_s=60.0)
    free = threading.Event()

    def hold_back(unit: Unit) -> bytes:
        assert free.wait(60)
        return unit.data

    relays.hook = hold_back
    long = Welcome(NextView(View.of(2), View(-1, (0, 1)), 1, {}), bytes(1 << 18))
    for _ in range(96):  # part of it is buffered in the kernel
        first.connections.post(first.connections.send, 1, long)
    average = first.average(contribution(0)).wait()
    free.set()
    assert average.contributors == (0,)
    assert "does not read its messages" in first.connections.machine.rounds.reason


def test_who_only_gets_heartbeats_and_does_not_read_them_is_lost(
    alone: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They piled up for as long as it sent some itself, as nothing else was sent to it that would have been counted."""
    connections = alone.connections
    with ExitStack() as stack:
        stream = Caller(alone, stack).hello(1)
        connections.wait_for(lambda: 1 in connections.connected, SOON_S)
        transport = connections.peers[1].writer.transport
        monkeypatch.setattr(transport, "get_write_buffer_size", lambda: 1 << 30)
        with beating(stream):
            connections.wait_for(lambda: 1 not in connections.connected, SOON_S)
    assert 1 not in connections.connected


def test_a_rank_that_a_run_does_not_have_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the run gathered, what had asked in each of 2^31 numbers was kept for good."""
    reader, writer = mock.Mock(read=mock.AsyncMock()), mock.Mock(drain=mock.AsyncMock())
    monkeypatch.setattr(TcpStreams, "identity", lambda *_: "a stranger")

    async def ask(numbers: Iterable[int]) -> None:
        for number in numbers:
            await serve(Ask(Entry(number, NOWHERE, "a stranger")), reader, writer)
            reader.reset_mock(), writer.reset_mock()

    with closing(PeerTransport(rules(rank=-1), TcpStreams())) as transport:
        transport.connections.most_ranks = 2
        TcpDirectory(transport, (), Address("", 0), gathers=True)
        serve = transport.connections.services[Ask]
        transport.connections.call(ask(range(2, 50)))
        taken_bytes = []
        for first in (50, 800, 1550):  # other threads of the process may take memory meanwhile, but not each time
            tracemalloc.start()
            transport.connections.call(ask(range(first, first + 750)))
            taken_bytes.append(tracemalloc.get_traced_memory()[0])
            tracemalloc.stop()
    assert min(taken_bytes) < 60_000, "it was 137 kB"


def test_an_answer_gives_no_invalid_address_and_changes_none_of_a_connected_rank() -> None:
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
        monkeypatch.setattr(directory, "dial_all", mock.AsyncMock(side_effect=lambda found: found))
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
    entry = {"rank": 9, "address": me, "key": me, "facts": {}, "held_step": -1, "places": []}
    following = NextView(View(3, (9,)), View(2, (9,)), 0, {})
    openings: dict[str, tuple[dict[str, Any], ...]] = {
        "hello in the name of a member": (hello | {"rank": 1},),
        "table in another's name": ({"kind": "ask", "entry": entry | {"key": "somebody"}},),
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
