"""The network below a swarm: payloads and their routes, daemons that misbehave, and clocks that are wrong."""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from diloco.errors import ConfigurationError, RendezvousError
from diloco.transport import Address, Node, NodePlace, PeerStreams, join, load_identity, parse_address
from tests.processes import Processes, receive, report
from tests.transport import contract
from tests.transport.contract import MakeEndpoints, contribution, exchange
from tests.transport.nowhere import nobody_at
from tests.transport.swarms import (
    HIVEMIND_LEAVES_CONNECTIONS,
    LIMIT_S,
    Swarms,
    over_libp2p,
    streams_of,
    wait_for_members,
)

pytestmark = HIVEMIND_LEAVES_CONNECTIONS
ENDS_S = 20.0  # longer than the sum of all time limits at the end
HOUR_S = 3600.0
FIRSTS = itertools.count(step=30)


@pytest.fixture(scope="class")
def swarm_of(lasting: Swarms) -> Iterator[MakeEndpoints]:
    """One swarm of each size for all tests, because a peer takes long to start."""
    with mock.patch.object(PeerStreams, "places_for_payloads", return_value=("nowhere", "a:b", ":1", "")):
        yield cache(lasting.meet)
    assert over_libp2p(lasting.transports)


class TestLibp2pStreamsContract(contract.PayloadContract):
    """Payloads over libp2p, as members name places that are no addresses. Before, these ended those of lower rank."""

    @pytest.fixture
    def make_endpoints(self, swarm_of: MakeEndpoints, monkeypatch: pytest.MonkeyPatch) -> MakeEndpoints:
        monkeypatch.setattr(contract, "FIRST", next(FIRSTS))
        return swarm_of

    @pytest.mark.parametrize("num_replicas", [3])  # a lone replica sends nothing
    def test_every_replica_gets_the_same_weighted_mean(self, make_endpoints: MakeEndpoints, num_replicas: int) -> None:
        super().test_every_replica_gets_the_same_weighted_mean(make_endpoints, num_replicas)


def test_payloads_go_directly_and_nothing_is_said_to_somebody_else_at_the_address_of_a_peer(swarms: Swarms) -> None:
    """The key decides who is who, not the address: over libp2p the peer itself is reached."""
    both = swarms.meet(2)
    exchange(both, [contribution(m) for m in range(2)])
    assert not over_libp2p(both)
    one, other = map(streams_of, both)
    call = both[0].connections.call
    assert call(one.open_directly(other.node.peer_id, [Address("127.0.0.1", other.port)]))
    with nobody_at() as nowhere:
        for places in ([], [nowhere], [parse_address("nobody.invalid:1")], [Address("127.0.0.1", one.port)]):
            with pytest.raises(OSError, match="no direct connection"):
                call(one.open_directly(other.node.peer_id, places))


def test_who_was_away_is_reached_over_tcp_while_libp2p_does_not_dial_it(swarms: Swarms) -> None:
    """Between its attempts are longer and longer pauses, so that one of those who had lost each other was left out."""
    one, other = swarms.meet(2)
    streams, entry = streams_of(one), one.entries()[1]
    with mock.patch.object(Node, "open", mock.AsyncMock(side_effect=OSError("dial backoff"))):
        address = streams.locate(entry)
        _, writer = one.connections.call(one.connections.reach(address, entry.key))
        assert streams.identity(writer) == str(other.address)
        streams.locate(replace(entry, places=("127.0.0.1:1",)))
        with pytest.raises(OSError, match=r"dial backoff; no direct connection to 127\.0\.0\.1:1"):
            one.connections.call(one.connections.reach(address, entry.key))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_ends_in_time_whatever_has_become_of_its_daemon(swarms: Swarms, number: signal.Signals) -> None:
    """A killed or frozen daemon does not answer, and much of Hivemind would wait for it forever."""
    transport = swarms.peer(0).transport
    daemon = streams_of(transport).node.daemon_pid
    exited = os.pidfd_open(daemon)
    os.kill(daemon, number)
    began_s = time.monotonic()
    transport.leave()
    transport.close()
    assert time.monotonic() - began_s < ENDS_S
    assert transport.connections.loop.is_closed(), "the thread of the peer has ended, too"
    assert select.select([exited], [], [], ENDS_S)[0], "the daemon has ended"
    os.close(exited)


def test_a_peer_that_is_stopped_while_its_daemon_starts_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had left one with sockets in /tmp, each time."""
    begun, folders = asyncio.Event(), list[Path]()

    async def create(**_: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    def p2p_in(folder: Path) -> object:
        folders.append(folder)
        return mock.Mock(create=create)

    async def start() -> None:
        task = asyncio.create_task(Node.start(load_identity(tmp_path / "key"), NodePlace()))
        await begun.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    monkeypatch.setattr(load_identity.__globals__["load_engine"](), "p2p_in", p2p_in)
    asyncio.run(start())
    assert [folder.exists() for folder in folders] == [False]


def member(rank: int, keys: Path, number: int, at: Sequence[str], off_s: float, among: int) -> None:
    """The main function of a process: a member whose clock is off by ``off_s``, and by more when the test says so."""
    right, off = time.time, [off_s]
    time.time = lambda: right() + off[0]  # before Hivemind is loaded
    swarms = Swarms(keys)
    connected = swarms.peer(number, at=at, rendezvous_timeout_s=30.0)
    if connected.joining:
        join(connected, LIMIT_S)
    wait_for_members(connected.transport, among)
    report((swarms.addresses_of(connected.transport), streams_of(connected.transport).node.daemon_pid))
    while (by_s := receive(LIMIT_S)) is not None:
        off[0] += by_s
        report(connected.transport.view.members)
    connected.transport.leave()
    connected.transport.close()


def test_who_joins_may_have_any_clock_and_a_clock_that_is_set_keeps_nobody_out(keys: Path) -> None:
    """The third peer joins through the one whose clock is behind; then the first one's clock is set forward.

    The daemon of each has a session of its own, and ends with a peer that is killed.
    """
    with Processes() as processes:
        processes.start(1, member, keys, 0, (), 0.0, 1)
        at, daemon = processes.next_report(0)
        assert os.getsid(daemon) == daemon, "Ctrl-C in the peer's terminal does not reach the daemon"
        processes.start(1, member, keys, 1, at, -HOUR_S, 2)
        through_it, _ = processes.next_report(1)
        processes.start(1, member, keys, 2, through_it, 10.0, 3)
        processes.next_report(2)
        processes.send(0, 2 * HOUR_S)
        assert processes.next_report(0) == (0, 1, 2)
        processes.send(1, None)
        processes.results(LIMIT_S, [1])
        processes.start(1, member, keys, 1, at, 0.0, 3)
        processes.next_report(3)
        processes.send(0, 0.0)
        assert processes.next_report(0) == (0, 1, 2)
        exited = os.pidfd_open(daemon)
        processes.kill(0)
        assert select.select([exited], [], [], LIMIT_S)[0], "the daemon has ended"
        os.close(exited)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:31330", "/ip4/127.0.0.1/tcp/31330", "/ip4/127.0.0.1/tcp/31330/p2p/", "/ip4/127.0.0.1/tcp/31330/p2p/Qm1",
     "/ip4/127.0.0.1/tcp/99999/p2p/{peer}", "/ip4/127.0.0.1/tcp/31330/p2p/{peer} ", "/dns4/a/tcp/1/p2p/{peer}9"],
)  # fmt: skip
def test_what_is_no_address_of_a_peer_is_refused_at_once(keys: Path, address: str) -> None:
    """Before, the command tried it for minutes, with all others that were given."""
    identity = load_identity(keys / "1.key")
    places = (f"/ip4/127.0.0.1/tcp/9/p2p/{identity.peer_id}", address.format(peer=identity.peer_id))
    with pytest.raises(ConfigurationError, match="is not the address of a peer"):
        asyncio.run(Node.start(identity, NodePlace(join=places)))


def test_who_is_to_join_a_copy_of_itself_is_told_so(keys: Path) -> None:
    """Before, it was told to copy the whole address, as the peer there was another one."""
    identity, here = load_identity(keys / "1.key"), ("/ip4/127.0.0.1/tcp/0",)

    async def joins() -> None:
        first = await Node.start(identity, NodePlace(listen=here, map_ports=False))
        try:
            place = NodePlace(join=(await first.addresses())[:1], listen=here, map_ports=False)
            with pytest.raises(RendezvousError, match=r"has this one's identity\. Was identity\.key copied\?"):
                await Node.start(identity, place)
        finally:
            await first.close()

    asyncio.run(joins())
