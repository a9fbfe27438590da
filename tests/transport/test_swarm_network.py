"""The network below a swarm: which route payloads take, daemons that misbehave, and clocks that are wrong."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from diloco.transport import Address, PeerStreams, PeerTransport, join, parse_address
from tests.processes import Processes, receive, report
from tests.transport.contract import contribution, exchange
from tests.transport.nowhere import nobody_at
from tests.transport.swarms import HIVEMIND_LEAVES_CONNECTIONS, LIMIT_S, Swarms, streams_of, wait_for_members

pytestmark = HIVEMIND_LEAVES_CONNECTIONS
ENDS_S = 20.0  # longer than the sum of all time limits at the end
HOUR_S = 3600.0


def over_libp2p(transports: list[PeerTransport]) -> bool:
    """Return whether payloads go over libp2p, where a second stripe would be useless."""
    return any(peer.single for each in transports for peer in each.connections.peers.values())


@pytest.mark.parametrize("hidden", [False, True], ids=["both listen", "one listens"])
def test_payloads_go_directly_where_one_can_reach_the_other(swarms: Swarms, hidden: bool) -> None:
    one = swarms.peer(0).transport
    connected = swarms.peer(1, [one], hidden=hidden)
    join(connected, LIMIT_S)
    both = [one, connected.transport]
    for each in both:
        wait_for_members(each, 2)
        each.tick()
    exchange(both, [contribution(m) for m in range(2)])
    assert not over_libp2p(both)


def test_nothing_is_said_to_somebody_else_at_the_address_of_a_peer(swarms: Swarms) -> None:
    """The key decides who is who, not the address: over libp2p the peer itself is reached."""
    one, other = map(streams_of, swarms.meet(2))
    call = swarms.transports[0].connections.call
    there = Address("127.0.0.1", other.port)
    assert call(one.open_directly(other.node.peer_id, [there]))
    with nobody_at() as nowhere:
        for places in ([], [nowhere], [parse_address("nobody.invalid:1")], [Address("127.0.0.1", one.port)]):
            with pytest.raises(OSError, match="no direct connection"):
                call(one.open_directly(other.node.peer_id, places))


def test_a_place_that_is_no_address_is_left_out(swarms: Swarms, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the place that a member named ended all members of lower rank, as an internal error of their own."""
    monkeypatch.setattr(PeerStreams, "places_for_payloads", lambda self, addresses: ("nowhere", "a:b", ":1", ""))
    both = swarms.meet(2)
    exchange(both, [contribution(m) for m in range(2)])
    assert [each.failure for each in both] == [None, None]
    assert over_libp2p(both)


def daemon_of(transport: PeerTransport) -> int:
    """Return the process id of the peer's libp2p daemon."""
    return streams_of(transport).node.daemon_pid


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_ends_in_time_whatever_has_become_of_its_daemon(swarms: Swarms, number: signal.Signals) -> None:
    """A killed or frozen daemon does not answer, and much of Hivemind would wait for it forever."""
    transport = swarms.peer(0).transport
    daemon = daemon_of(transport)
    exited = os.pidfd_open(daemon)
    os.kill(daemon, number)
    began_s = time.monotonic()
    transport.leave()
    transport.close()
    assert time.monotonic() - began_s < ENDS_S
    assert transport.connections.loop.is_closed(), "the thread of the peer has ended, too"
    assert select.select([exited], [], [], ENDS_S)[0], "the daemon has ended"
    os.close(exited)


def peer(rank: int, keys: Path) -> None:
    """The main function of a process: a peer that runs until the test ends it."""
    transport = Swarms(keys).peer(0).transport
    report(daemon_of(transport))
    receive()


def test_the_daemon_has_a_session_of_its_own_and_ends_with_a_peer_that_is_killed(keys: Path) -> None:
    with Processes() as processes:
        processes.start(1, peer, keys)
        daemon = processes.next_report(0)
        assert os.getsid(daemon) == daemon, "Ctrl-C in the peer's terminal does not reach the daemon"
        exited = os.pidfd_open(daemon)
        processes.kill(0)
        assert select.select([exited], [], [], 60.0)[0]
        os.close(exited)


def member(rank: int, keys: Path, number: int, at: Sequence[str], off_s: float, among: int) -> None:
    """The main function of a process: a member whose clock is off by ``off_s``, and by more when the test says so."""
    right, off = time.time, [off_s]
    time.time = lambda: right() + off[0]  # before Hivemind is loaded
    swarms = Swarms(keys)
    connected = swarms.peer(number, at=at, rendezvous_timeout_s=30.0)
    if connected.joining:
        join(connected, LIMIT_S)
    wait_for_members(connected.transport, among)
    report(swarms.addresses_of(connected.transport))
    while (by_s := receive(LIMIT_S)) is not None:
        off[0] += by_s
        report(connected.transport.view.members)
    connected.transport.leave()
    connected.transport.close()


def test_who_joins_may_have_any_clock_and_a_clock_that_is_set_keeps_nobody_out(keys: Path) -> None:
    """The third peer joins through the one whose clock is behind; then the first one's clock is set forward."""
    with Processes() as processes:
        processes.start(1, member, keys, 0, (), 0.0, 1)
        at = processes.next_report(0)
        processes.start(1, member, keys, 1, at, -HOUR_S, 2)
        through_it = processes.next_report(1)
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
