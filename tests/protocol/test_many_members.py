"""Sixteen and more members: the same rounds, views and votes, and what each rank has to say."""

from __future__ import annotations

import cProfile
import pstats
from typing import Any
from unittest import mock

import pytest

from benchmarks.scale.messages import counted
from diloco.protocol.machine import Machine
from tests.membership.network import Limits
from tests.protocol.simulated import check_agreement, simulate
from tests.protocol.simulated_rank import Rank

FEW = [1, 18, 25, 900, 77, 431, 1207]
"""A beginning in which something goes wrong; the simulated network goes on in turn."""


@pytest.mark.parametrize("replicas", [16, 32])
def test_every_round_is_committed_with_one_header_and_one_vote_to_each_other(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rank, "STEPS", 2)  # of 32 there are 1984 messages in each
    ranks = simulate(Limits(), FEW, replicas=replicas)
    check_agreement(ranks, whole=True)
    assert len(ranks) == replicas
    for rank in ranks:
        for kind in ("header", "vote"):
            # `sent` has a message once for each receiver
            assert len(rank.said(kind)) == rank.STEPS * (replicas - 1), kind
        assert len(rank.sent) == 2 * rank.STEPS * (replicas - 1), "nothing else needs to be said"


def test_sixteen_lose_some_and_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rank, "STEPS", 2)
    survivors = simulate(Limits(ends=3), FEW, replicas=16)
    check_agreement(survivors, whole=True)
    assert 13 <= len(survivors) < 16, "nobody was lost"
    assert {rank.view.members for rank in survivors} == {tuple(sorted(rank.rank for rank in survivors))}


def calls(phase: str, members: int) -> float:
    """Functions that the machine of a member calls, in the mean, while its view changes."""
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
    """And not as its square or cube, by weighing all reports again with each of them."""
    assert calls(phase, 16) < 2.5 * calls(phase, 8)
