"""Sixteen and more members: the same rounds, views and votes, and the number of messages that each rank sends."""

from __future__ import annotations

import cProfile
import pstats
from typing import Any
from unittest import mock

import pytest

from benchmarks.scale.messages import counted
from diloco.protocol import Header, Machine, RoundVote
from tests.membership.network import Limits
from tests.protocol.simulated import check_agreement, simulate
from tests.protocol.simulated_rank import Rank

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
        for kind in (Header, RoundVote):
            # `sent` has a message once for each receiver
            assert len(rank.sent_of(kind)) == rank.STEPS * (replicas - 1), kind
        assert len(rank.sent) == 2 * rank.STEPS * (replicas - 1), "no other message is needed"


def calls(phase: str, members: int) -> float:
    """Return the mean number of function calls in a member's machine during a view change or a round."""
    profile, handle = cProfile.Profile(), Machine.handle

    def profiled(*arguments: Any, **more: Any) -> Any:
        with profile:
            return handle(*arguments, **more)

    with mock.patch.object(Machine, "handle", profiled):
        counted(phase, members)
    profile.create_stats()
    return float(pstats.Stats(profile).total_calls) / members  # type: ignore[attr-defined]  # typeshed's stub


@pytest.mark.parametrize("phase", ["join", "kill", "round"])
def test_what_a_member_does_for_a_change_of_views_or_a_round_grows_as_their_number(phase: str) -> None:
    """Not as its square or cube, as it would if each report led to an evaluation of all others."""
    assert calls(phase, 16) < 2.5 * calls(phase, 8)
