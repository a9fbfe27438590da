"""Sixteen and more members: the same rounds, views and votes, and the number of messages that each rank sends."""

from __future__ import annotations

import cProfile
import pstats
import random
from typing import Any
from unittest import mock

import pytest

from benchmarks.scale.messages import Counted, counted
from diloco.protocol import Machine, Timer, TimerFired
from tests.membership.network import Limits
from tests.protocol.simulated import check_agreement, simulate
from tests.protocol.simulated_rank import LATE_S, Rank

FEW = [1, 18, 25, 900, 77, 431, 1207]
"""A beginning in which something goes wrong; afterwards the simulated ranks take turns."""


@pytest.mark.parametrize("replicas", [16, 32])
def test_every_round_is_committed_with_one_header_and_one_vote_to_each_other(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rank, "STEPS", 2)  # with 32 replicas there are 1984 messages in each
    ranks = simulate(Limits(), FEW, replicas=replicas)
    check_agreement(ranks, whole=True)
    assert len(ranks) == replicas
    for rank in ranks:
        for kind in ("header", "vote"):
            # `sent` has a message once for each receiver
            assert len(rank.sent_of(kind)) == rank.STEPS * (replicas - 1), kind
        assert len(rank.sent) == 2 * rank.STEPS * (replicas - 1), "no other message is needed"


def test_sixteen_lose_some_and_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rank, "STEPS", 2)
    survivors = simulate(Limits(ends=3), FEW, replicas=16)
    check_agreement(survivors, whole=True)
    assert 13 <= len(survivors) < 16, "no replica was lost"
    assert {rank.view.members for rank in survivors} == {tuple(sorted(rank.rank for rank in survivors))}


def calls(phase: str, members: int) -> float:
    """Return the mean number of function calls in a member's machine during a view change or a round."""
    profile, handle = cProfile.Profile(), Machine.handle

    def profiled(*arguments: Any) -> Any:
        profile.enable()
        try:
            return handle(*arguments)
        finally:
            profile.disable()

    with mock.patch.object(Machine, "handle", profiled):
        counted(phase, members)
    profile.create_stats()
    return float(pstats.Stats(profile).total_calls) / members  # type: ignore[attr-defined]  # typeshed's stub


@pytest.mark.parametrize("phase", ["join", "kill", "round"])
def test_what_a_member_does_for_a_change_of_views_or_a_round_grows_as_their_number(phase: str) -> None:
    """Not as its square or cube, as it would if each report led to an evaluation of all others."""
    assert calls(phase, 16) < 2.5 * calls(phase, 8)


def pass_time(network: Counted, due_s: dict[tuple[int, Timer], float], chance: random.Random, seconds: float) -> None:
    """Deliver on half of the links, and fire the timers that are due."""
    arriving = [pair for pair, waiting in network.on_the_way.items() if waiting and chance.random() < 0.5]
    for number in network.alive:
        network.rank(number).now_s += seconds
    for pair in arriving:
        while network.can("deliver", *pair):
            network.happen("deliver", *pair, 0)
    for kind, one, other in network.choices():
        if kind == "notice":
            network.happen(kind, one, other, 0)
    for number in sorted(network.alive):
        mine = network.rank(number)
        for delay_s, timer in list(mine.timers):
            if (
                due_s.setdefault((number, timer), mine.now_s + delay_s) <= mine.now_s
                and (delay_s, timer) in mine.timers
            ):
                mine.timers.remove((delay_s, timer))
                del due_s[number, timer]
                mine.handle(TimerFired(timer))


def test_nobody_loses_its_place_since_many_join_while_the_members_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further joiner prolongs the change."""
    monkeypatch.setattr(Rank, "STEPS", 0)
    network, due_s, chance = Counted(4, 12), dict[tuple[int, Timer], float](), random.Random(1)
    network.settle()
    coming = list(network.ranks[4:])
    for trip in range(100):
        if coming and trip % 3 == 0:
            network.return_whole(coming.pop(0))
            network.rank(max(network.alive)).now_s = network.rank(0).now_s
        for number in sorted(network.alive):
            while (trip % 3 == 0 or network.rank(number).may("leaves")) and network.rank(number).act():
                pass  # a joiner asks again after a while
        pass_time(network, due_s, chance, LATE_S / 25)
    assert [network.rank(number).left for number in network.ranks] == [""] * 16
    network.check(16)
