"""How a peer of a swarm ends when its libp2p daemon misbehaves, and how the daemon ends with its peer."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path

import pytest

from diloco.transport import PeerStreams, PeerTransport
from tests.processes import Processes, receive, report
from tests.transport.swarms import HIVEMIND_LEAVES_CONNECTIONS, Swarms

pytestmark = HIVEMIND_LEAVES_CONNECTIONS

ENDS_S = 20.0
"""Longer than the sum of all time limits at the end."""


def daemon_of(transport: PeerTransport) -> int:
    """Return the process id of the peer's libp2p daemon."""
    streams = transport.connections.streams
    assert isinstance(streams, PeerStreams)
    return streams.node.daemon_pid


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
