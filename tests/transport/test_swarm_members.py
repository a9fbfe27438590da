"""Which peers may be members of a swarm, and how a swarm is founded."""

from __future__ import annotations

import asyncio
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from diloco.errors import RendezvousError, TransportError
from diloco.protocol import Entry, Rules
from diloco.transport import (
    Address,
    Admission,
    Directory,
    Lost,
    Node,
    NodePlace,
    PeerRecord,
    PeerReport,
    PeerStreams,
    PeerTransport,
    SwarmPlace,
    absences,
    join,
    load_identity,
    new_secret,
    open_status_client,
    run_peer,
)
from tests.transport.contract import contribution, exchange
from tests.transport.nowhere import nobody_at
from tests.transport.relays import frame
from tests.transport.swarms import (
    HIVEMIND_LEAVES_CONNECTIONS,
    LIMIT_S,
    LOOPBACK,
    Swarms,
    over_libp2p,
    streams_of,
    wait_for_members,
)
from tests.transport.wires import at_once

pytestmark = HIVEMIND_LEAVES_CONNECTIONS
PATIENCE = {"rendezvous_timeout_s": 2.0}
SECRET = new_secret()


@pytest.fixture(scope="module")
def member(lasting: Swarms) -> PeerTransport:
    """The only peer of its run; peers that search for it found another swarm or are rejected."""
    return lasting.peer(0).transport


@pytest.fixture(scope="module")
def relay(keys: Path) -> Iterator[str]:
    """The address of a peer that trains nothing."""
    addresses, ready, loop = list[str](), threading.Event(), asyncio.new_event_loop()

    def listening(at: tuple[str, ...]) -> None:
        addresses.extend(at)
        ready.set()

    place = NodePlace(listen=LOOPBACK, map_ports=False, public=True)
    serving = loop.create_task(run_peer(keys / "relay.key", place, listening))

    def serve() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(serving)
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    assert ready.wait(LIMIT_S)
    yield addresses[0]
    loop.call_soon_threadsafe(serving.cancel)
    thread.join(LIMIT_S)


def test_a_peer_to_which_nobody_can_open_a_connection_is_a_full_member(swarms: Swarms) -> None:
    """Hivemind draws a peer's place in the DHT from `random`; with the same place, peers hid each other's records."""
    found: list[Directory] = []
    for number, hidden in enumerate((False, True, False)):
        random.seed(0)  # as programs of one run often do
        found.append(swarms.peer(number, [each.transport for each in found[:1]], hidden=hidden))
        if number:
            join(found[-1], LIMIT_S)  # the third has to connect to the hidden one, too
    transports = [each.transport for each in found]
    for transport in transports:
        wait_for_members(transport, 3)
        transport.tick()
    averages = exchange(transports, [contribution(m) for m in range(3)])
    assert all(torch.equal(average.values, averages[0].values) for average in averages)
    assert averages[0].contributors == (0, 1, 2)
    assert not over_libp2p(transports), "payloads go directly where one can reach the other"

    async def look() -> list[PeerReport]:
        at = NodePlace(join=swarms.addresses_of(transports[0]), listen=(), map_ports=False)
        async with open_status_client(swarms.key(9), at, Admission("run")) as client:
            return await client.ask()

    told = {each.number: each.status for each in asyncio.run(look())}
    for each in transports:
        status = told[each.replica]
        assert status is not None, "an observer gets the status of the hidden peer, too"
        assert (status.name, status.members, status.step) == (f"peer {each.replica}", (0, 1, 2), each.step)


def test_who_looks_for_all_that_it_knew_dials_few_at_once(
    member: PeerTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that had lost its view dialled a thousand addresses at once, and ran out of descriptors."""
    node, dialling, most = streams_of(member).node, 0, 0

    async def connect(peer_id: str, addresses: object) -> None:
        nonlocal dialling, most
        dialling, most = dialling + 1, max(most, dialling + 1)
        await asyncio.sleep(0)
        dialling -= 1
        raise OSError("nobody is there")

    known = tuple(f"/ip4/9.9.9.9/tcp/1/p2p/Qm{number}" for number in range(1000))
    monkeypatch.setattr(node, "_place", NodePlace(join=known))
    monkeypatch.setattr(node, "_connect", connect)
    member.connections.call(node.enter())
    assert 1 < most <= 64


def test_an_observer_that_can_not_listen_leaves_no_daemon(swarms: Swarms, member: PeerTransport) -> None:
    async def observe() -> None:
        at = NodePlace(join=swarms.addresses_of(member), listen=LOOPBACK, map_ports=False, direct_port=port)
        async with open_status_client(swarms.key(9), at, Admission("run")):
            pass

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            mock.patch.object(Node, "close", autospec=True, side_effect=Node.close) as close,
            pytest.raises(TransportError, match="can't listen"),
        ):
            asyncio.run(observe())
    assert close.call_count == 1


def test_one_record_of_a_finished_peer_ends_no_search(swarms: Swarms, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anyone who knows the run's name can store one; before, a peer that found no member at that moment ended."""
    for finished, words in ((1, "has had a swarm within the last half hour"), (2, "the others have finished run")):
        records = [PeerRecord(m, "swarm", (), m <= finished, f"peer {m}") for m in (1, 2, 3)]
        monkeypatch.setattr(Node, "find", mock.AsyncMock(return_value=records))
        with pytest.raises(RendezvousError, match=words):
            swarms.peer(0, **PATIENCE)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("find", "the peers of the run can't be looked up: the daemon has ended"),
        ("announce", r"this peer could not be announced \(the daemon has ended\)"),
    ],
)
def test_a_search_that_the_dht_fails_ends_with_an_error_after_which_it_is_repeated(
    swarms: Swarms, monkeypatch: pytest.MonkeyPatch, step: str, words: str
) -> None:
    """Its errors have no common base class, so that they ended the process with a traceback."""
    monkeypatch.setattr(Node, step, mock.AsyncMock(side_effect=RuntimeError("the daemon has ended")))
    with pytest.raises(TransportError, match=words):
        swarms.peer(0, **PATIENCE)


def test_who_loses_its_view_again_and_again_does_not_look_for_all_that_it_ever_knew(swarms: Swarms) -> None:
    """It dialled the addresses that it had known at each loss, also of peers that had ended days before."""
    given, longest_gone, there = (f"/ip4/9.9.9.9/tcp/{port}/p2p/Qm" for port in (1, 2, 3))
    streams = mock.Mock(place=NodePlace(join=(given, longest_gone)))
    known = {1: Entry(1, "Qm", places=(there,))}
    before = mock.Mock(entries=lambda: known, connections=mock.Mock(streams=streams))
    lost = Lost(mock.Mock(transport=before), mock.Mock(), 1.0)
    place = SwarmPlace(identity=swarms.key(0), admission=Admission("run"), node=NodePlace(join=(given,)))
    with closing(place.transport(Rules(), lost)) as transport:
        assert streams_of(transport).place.join == (given, there)


def test_only_those_on_the_list_who_have_the_secret_may_come(swarms: Swarms, keys: Path) -> None:
    allowed = frozenset(load_identity(keys / f"{number}.key").peer_id for number in (0, 1, 3))
    ours = new_secret()
    first = swarms.peer(0, secret=ours, allowed=allowed).transport
    assert swarms.peer(1, [first], secret=ours, allowed=allowed).joining
    with pytest.raises(RendezvousError, match=r"it does not admit this peer, .* network\.allow does not list it"):
        swarms.peer(2, [first], secret=ours)
    assert first.view.members == (0,)


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        (("run", SECRET), ("run", ""), "its run has a secret. Give a copy of its file with --secret-file"),
        (("run", SECRET), ("run", new_secret()), "its run has another secret. Give a copy of its file"),
        (("run", ""), ("run", SECRET), "its run has no secret. Leave out --secret-file"),
        (("run", SECRET), ("ran", SECRET), "it trains another run than 'ran'. Give the name of its run with --run"),
        (("run", ""), ("ran", ""), "it trains another run than 'ran'. Give the name of its run with --run"),
    ],
)
def test_who_names_a_peer_of_another_secret_or_run_is_told_which_and_founds_nothing(
    swarms: Swarms, theirs: tuple[str, str], ours: tuple[str, str], words: str
) -> None:
    """Before, it founded a second swarm of the same name, and trained alone to the end."""
    first = swarms.peer(0, run=theirs[0], secret=theirs[1]).transport
    with pytest.raises(RendezvousError) as caught:
        swarms.peer(1, [first], run=ours[0], secret=ours[1])
    assert f"the peer at {swarms.addresses_of(first)[0]} answers, but {words}" in str(caught.value)


def test_a_peer_that_refuses_at_its_door_ends_no_search_while_another_that_was_named_may_answer(
    swarms: Swarms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, one of two addresses that said "another secret" ended a joiner before the other one answered."""
    liar = swarms.peer(0, secret=SECRET).transport
    member = swarms.peer(2).transport
    visit, opened, silent = PeerStreams.visit, PeerStreams.open, [2]

    async def open_later(streams: PeerStreams, address: Any) -> Any:
        if address.host == str(member.address) and silent:
            raise OSError("it is starting")
        return await opened(streams, address)

    async def visit_later(streams: PeerStreams, peer_id: str) -> Any:
        if peer_id == str(member.address) and silent:
            silent.pop()
            raise OSError("it is starting")
        return await visit(streams, peer_id)

    monkeypatch.setattr(PeerStreams, "open", open_later)
    monkeypatch.setattr(PeerStreams, "visit", visit_later)
    silent *= 100
    with pytest.raises(RendezvousError, match=r"no member of run 'run' was found .* but its run has a secret"):
        swarms.peer(3, [liar, member], **PATIENCE)
    del silent[1:]
    assert swarms.peer(1, [liar, member]).joining


def test_an_observer_is_told_why_a_peer_does_not_answer_it(swarms: Swarms, relay: str) -> None:
    """Before, it was told that nobody had been seen of a run of this name."""
    first = swarms.peer(0, secret=SECRET).transport

    async def look(*join: str, run: str = "run", secret: str = "") -> list[PeerReport]:
        at = NodePlace(join=join, listen=(), map_ports=False)
        async with open_status_client(swarms.key(9), at, Admission(run, secret)) as client:
            return await client.ask()

    for admission, words in (({}, "its run has a secret"), ({"run": "ran"}, "it trains another run than 'ran'")):
        (report,) = asyncio.run(look(*swarms.addresses_of(first), **admission))
        assert words in report.objection
        assert absences([report]) == ["refuses"]
    (report,) = asyncio.run(look(*swarms.addresses_of(first), secret=SECRET))
    assert report.status is not None
    assert asyncio.run(look(relay)) == []


def test_who_names_a_peer_of_another_version_is_told_so(
    swarms: Swarms, member: PeerTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer_knock(stream: Any, *_: object) -> None:
        stream[1].write(frame({"kind": "doorplate", "version": 99, "trains": True, "same_run": True}))
        await stream[0].read()  # until the other end closes it

    door = sys.modules[PeerStreams.__module__].Door
    monkeypatch.setattr(sys.modules[door.__module__], "_answer_knock", answer_knock)
    monkeypatch.setattr(PeerStreams, "open", mock.AsyncMock(side_effect=OSError("it closes the stream")))
    with pytest.raises(RendezvousError, match=r"uses version 99 of the protocol, and this peer version \d+\. Install"):
        swarms.peer(1, [member])


def test_who_names_addresses_waits_for_a_member_and_founds_only_if_it_says_so(
    swarms: Swarms, relay: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A relay is an entrance: who comes through it waits, alone or with others, until one founds that may."""
    with pytest.raises(RendezvousError, match="To found the run instead, add --found"):
        swarms.peer(1, at=[relay], run="relayed", **PATIENCE)
    slow = {"run": "relayed", "at": [relay], "rendezvous_timeout_s": 8.0}
    both = at_once([lambda: swarms.peer(1, **slow), lambda: swarms.peer(2, **slow)])
    assert all(isinstance(each, RendezvousError) for each in both), both
    # said while they wait, and at the end by the one that ends while the other still waits
    assert "1 more also wait for one" in caplog.text or any("1 more peers wait for one" in str(each) for each in both)
    founder, joiner = at_once(
        [
            lambda: swarms.peer(3, run="relayed", at=[relay], founds=True, join_window_s=2.0),
            lambda: swarms.peer(1, run="relayed", at=[relay], held_step=-1),
        ]
    )
    assert (founder.joining, joiner.joining) == (False, True)
    assert founder.swarm == joiner.swarm


def test_who_comes_in_the_shared_start_is_told_for_how_long_it_waits_and_does_not_give_up(
    swarms: Swarms, caplog: pytest.LogCaptureFixture
) -> None:
    """It waited for "a member", and would have given up before a long shared start ended. It was called "gone"."""
    first = swarms.peer(0).transport
    why = "the replicas are in their shared start; others join after step 200, in about 3m00s"
    first.views.closed_to_joiners = why
    states: list[str] = []

    async def look() -> None:
        async with open_status_client(swarms.key(9), NodePlace(join=at, listen=(), map_ports=False), ours) as client:
            seen = await client.ask()
            states.extend(absences(seen))

    def open_door() -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while "joining" not in states or f"({why}) for 8 s" not in caplog.text:
            assert time.monotonic() < deadline_s, (states, caplog.text)
            asyncio.run(look())
        first.views.closed_to_joiners = ""

    ours, at = Admission("run"), swarms.addresses_of(first)
    joiner, opened = at_once([lambda: swarms.peer(1, [first], rendezvous_timeout_s=6.0), open_door])
    assert opened is None, opened
    assert joiner.joining


def test_two_that_can_not_reach_each_other_are_told_that_they_need_a_relay(
    swarms: Swarms, relay: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PeerStreams, "open", mock.AsyncMock(side_effect=OSError("no route")))
    looks: dict[str, Any] = {"run": "far", "at": [relay], "rendezvous_timeout_s": 5.0}
    told = at_once([lambda: swarms.peer(1, **looks), lambda: swarms.peer(2, **looks)])
    assert all("can't be reached. If both are behind routers, they need a relay" in str(each) for each in told), told
    assert "can't be reached. If both are behind routers, they need a relay" in caplog.text


def test_who_comes_back_and_listens_nowhere_meets_itself_in_no_table(swarms: Swarms, relay: str) -> None:
    """The others knew it as a node that listens. Before, it ended: it could not be announced (AssertionError)."""
    before = swarms.peer(1, run="back", at=[relay], founds=True)
    before.transport.close()
    assert not swarms.peer(1, run="back", at=[relay], founds=True, hidden=True).joining


def test_who_is_behind_a_router_names_the_relay_through_which_others_reach_it(
    swarms: Swarms, relay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, it printed its private address, and that it needs a relay."""
    hidden = swarms.peer(1, run="behind a router", at=[relay], hidden=True, founds=True)
    assert hidden.listens_at() == (relay,)
    listens = swarms.peer(2, run="another", at=[relay], founds=True)
    assert relay not in listens.listens_at()
    private = "/ip4/192.168.1.2/tcp/4/p2p/Qm"
    monkeypatch.setattr(Node, "addresses", mock.AsyncMock(return_value=(private,)))
    monkeypatch.setattr(PeerStreams, "seen_at", mock.AsyncMock(return_value="9.9.9.9"))
    listens.open_up()
    assert listens.listens_at() == (relay,)
    assert "others reach it through the relay" in listens.limits_of_reach()


def test_who_does_not_fit_is_refused_in_one_sentence(swarms: Swarms, keys: Path) -> None:
    """Other settings, a key that was copied to another machine, a number that is taken, and who was farther.

    The founder resumed from an older checkpoint than another peer's, whose work would be lost. At last one member
    refuses for good, to which all joiners are sent, and keeps nobody out.
    """
    fp4 = {"codec": "fp4"}
    founder = swarms.peer(0, facts=fp4, held_step=30)
    first = founder.transport
    owner = swarms.peer(1, [first], facts=fp4)
    join(owner, LIMIT_S)
    with pytest.raises(RendezvousError, match="has codec = fp4 and replica 2"):
        swarms.peer(2, [first], facts={"codec": "int8"}, **PATIENCE)
    with pytest.raises(RendezvousError, match=r"still answers\. It has the same key: was identity\.key copied\?"):
        swarms.peer(1, [first], facts=fp4)
    assert owner.transport.failure is None
    (keys / "other-0").mkdir(exist_ok=True)
    with closing(Swarms(keys / "other-0")) as other, pytest.raises(RendezvousError, match="choose another number"):
        other.peer(0, [first], facts=fp4, **PATIENCE)
    first.step = 40
    with pytest.raises(RendezvousError, match=r"is at step 40, and the newest checkpoint of replica 2 is of step 50"):
        swarms.peer(2, [first], facts=fp4, held_step=50, **PATIENCE)
    as_far = swarms.peer(3, [first], facts=fp4, held_step=40, held_swarm="0123456789abcdef")
    assert (as_far.joining, as_far.step, as_far.founded_step) == (True, 40, 30)
    services = first.connections.services

    async def refuse(message: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame({"kind": "refused", "reason": "go away", "for_good": True}))
        await reader.read(1)

    services.update(dict.fromkeys([each for each in services if each.__name__ == "Ask"], refuse))
    members = [first, owner.transport]
    member = swarms.peer(2, members, facts=fp4, held_step=50, held_swarm=founder.swarm)
    assert member.joining, "the swarm is the one that it was a member of"
    join(member, LIMIT_S)
    wait_for_members(members[1], 3)


def test_peers_of_another_run_are_not_found_and_a_fresh_start_does_not_replace_a_swarm(
    swarms: Swarms, member: PeerTransport
) -> None:
    """The record of a swarm outlives its last member, and only a peer with a checkpoint may found the swarm again."""
    gone = swarms.peer(1, [member], run="gone", founds=True, **PATIENCE)
    assert not gone.joining, "it founded a swarm of its own run"
    assert gone.transport.view.members == (1,)
    assert member.view.members == (0,)
    gone.transport.close()
    with pytest.raises(RendezvousError, match="has had a swarm within the last half hour"):
        swarms.peer(2, [member], run="gone", founds=True, **PATIENCE)
    again = swarms.peer(3, [member], run="gone", held_step=120, founds=True, **PATIENCE)
    assert not again.joining


def test_who_ended_while_it_looked_is_not_waited_for(swarms: Swarms, member: PeerTransport) -> None:
    """Its record stays and claims a newer step. Where nobody is there to enter through, that is said."""
    with pytest.raises(RendezvousError):
        swarms.peer(1, [member], run="ended", held_step=90, founds=True, join_window_s=60.0, rendezvous_timeout_s=0.1)
    assert not swarms.peer(2, [member], run="ended", held_step=50, founds=True, silence_s=1.0).joining


def test_two_that_can_not_ask_each_other_yet_found_one_swarm(
    swarms: Swarms, member: PeerTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind routers, a relay knows them after minutes only. Before, both had founded a swarm by then."""
    usual, routes = PeerStreams.open, threading.Event()

    async def open_later(streams: PeerStreams, address: Address) -> Any:
        if not routes.is_set():
            raise OSError("no route")
        return await usual(streams, address)

    def found() -> Directory:
        connected = swarms.peer(1, [member], **looks)
        routes.set()
        return connected

    monkeypatch.setattr(PeerStreams, "open", open_later)
    looks: dict[str, Any] = {"run": "routers", "join_window_s": 4.0, "held_step": 50, "founds": True}
    first, second = at_once([found, lambda: swarms.peer(2, [member], **looks)])
    assert (first.joining, second.joining) == (False, True)
    assert first.swarm == second.swarm


def test_why_the_network_cannot_be_entered_is_said(swarms: Swarms, member: PeerTransport) -> None:
    """A peer that has ended, another one than the address names, a blocked port, and a wrong name."""
    nobody = load_identity(swarms.key(9)).peer_id
    here = next(each for each in swarms.addresses_of(member) if "/ip4/127.0.0.1/" in each)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, nobody_at() as ended, ExitStack() as stack:
        port = full.getsockname()[1]
        for _ in range(2):  # the kernel answers no further ones, as a firewall
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        why = {
            f"/ip4/127.0.0.1/tcp/{ended.port}": f"{ended}: nothing listens there",
            here.partition("/p2p/")[0]: f"it is not the peer {nobody}",
            f"/ip4/127.0.0.1/tcp/{port}": f"127.0.0.1:{port}: no answer within 5 s; open the port",
            "/dns4/no-such-host.invalid/tcp/1": "no-such-host.invalid:1: the name does not resolve",
        }
        with pytest.raises(RendezvousError) as caught:
            swarms.peer(3, at=[f"{address}/p2p/{nobody}" for address in why], rendezvous_timeout_s=0.1)
        with pytest.raises(RendezvousError):  # it tries again until the limit
            swarms.peer(3, at=[f"/ip4/127.0.0.1/tcp/{ended.port}/p2p/{nobody}"], **PATIENCE)
    assert [words for words in why.values() if words not in str(caught.value)] == []
