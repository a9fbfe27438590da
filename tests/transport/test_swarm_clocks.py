"""Peers whose clocks are wrong, or are set while they train: nothing depends on machines' clocks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from diloco.transport import join
from tests.processes import Processes, receive, report
from tests.transport.swarms import LIMIT_S, Swarms, wait_for_members

HOUR_S = 3600.0


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
