"""Peers whose clocks are wrong, or are set while they train: nothing depends on machines' clocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from diloco.transport import join, load_engine
from diloco.transport.hivemind import node
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


def moved(rank: int, keys: Path, number: int, at: Sequence[str], by_s: float) -> None:
    """The main function of a process: a member whose network time changes, as in a merge of two networks."""
    node.KEEP_UP_EVERY_S = 0.2
    swarms, clock = Swarms(keys), load_engine().clock
    report(swarms.addresses_of(swarms.peer(number, at=at).transport))
    clock.enter([receive(LIMIT_S)])
    while abs(clock.off_s() - by_s) > 2.0:
        threading.Event().wait(0.1)
    report("there")
    receive(LIMIT_S)


def test_two_times_of_one_network_become_the_later_one(keys: Path) -> None:
    with Processes() as processes:
        processes.start(1, moved, keys, 0, (), -HOUR_S)
        processes.start(1, moved, keys, 1, processes.next_report(0), -HOUR_S)
        processes.next_report(1)
        processes.send(1, HOUR_S)
        assert processes.next_report(1) == "there"
        processes.send(0, 0.0)
        assert processes.next_report(0) == "there"


@pytest.mark.parametrize("off_s", [HOUR_S, -HOUR_S, 10.0])
def test_who_joins_may_have_any_clock(keys: Path, off_s: float) -> None:
    with Processes() as processes:
        processes.start(1, member, keys, 0, (), 0.0, 1)
        at = processes.next_report(0)
        processes.start(1, member, keys, 1, at, off_s, 2)
        through_it = processes.next_report(1)
        processes.start(1, member, keys, 2, through_it, 0.0, 3)
        processes.next_report(2)


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S])
def test_a_member_whose_clock_is_set_lets_others_come_back(keys: Path, step_s: float) -> None:
    with Processes() as processes:
        processes.start(1, member, keys, 0, (), 0.0, 1)
        at = processes.next_report(0)
        processes.start(1, member, keys, 1, at, 0.0, 2)
        processes.next_report(1)
        processes.send(0, step_s)
        assert processes.next_report(0) == (0, 1)
        processes.send(1, None)
        processes.results(LIMIT_S, [1])
        processes.start(1, member, keys, 1, at, 0.0, 2)
        processes.next_report(2)
        processes.send(0, 0.0)
        assert processes.next_report(0) == (0, 1)
