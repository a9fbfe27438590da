"""What a rank no longer does once a view ends, and what its owner learns about rounds; on the simulated network."""

from __future__ import annotations

import pytest

from diloco.algorithm import RoundId
from diloco.membership import View
from diloco.protocol import Change, RoundVote, actions, events
from tests.membership.network import Limits, explore
from tests.protocol.simulated import begin, check_agreement, rank, settle, simulated
from tests.protocol.simulated_rank import Rank

ROUND = RoundId(1, 0)


def test_who_has_reported_the_end_of_a_view_casts_no_vote_in_it() -> None:
    """A report lists the committed rounds, and is a promise to commit no more of them."""
    network = simulated(3)
    begin(network, 0, 1, 2)
    rank(network, 0).lose(2, gone=False)
    assert rank(network, 0).sent_of(Change)
    assert rank(network, 0).act(), "it holds the mean"
    assert not rank(network, 0).sent_of(RoundVote)


def test_an_exchange_that_waits_for_a_verdict_ends_with_its_view() -> None:
    """Another one begins in the next view."""
    network = simulated(3, Limits(ends=1))
    begin(network, 0)
    assert rank(network, 0).exchanging == {(0, ROUND)}
    network.happen("ends", 2, 0, 0)
    settle(network)
    assert rank(network, 0).act()
    assert rank(network, 0).exchanging == {(1, ROUND)}


@pytest.mark.parametrize("number", [0, 1])
def test_a_round_that_took_too_long_though_all_have_contributed_renews_the_view(number: int) -> None:
    """A payload connection is stalled: TCP may wait for minutes before it retries."""
    network = simulated(2)
    begin(network, 0, 1)
    mine = rank(network, number)
    mine.suffer("timers", next(i for i, (_, timer) in enumerate(mine.timers) if timer.kind == "expire"))
    settle(network)
    assert mine.act()
    assert "a payload connection of replica" in mine.sent_of(Change)[-1].why
    explore(network, [])
    assert [rank(network, number).view for number in (0, 1)] == [View(1, (0, 1))] * 2
    assert [rank(network, number).outcomes[1] for number in (0, 1)] == [False] * 2


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_view_changes_where_one_is_a_round_ahead(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others still remember a round that it has forgotten."""
    monkeypatch.setattr(Rank, "STEPS", 16)
    network = simulated(replicas)
    *behind, ahead = (rank(network, number) for number in range(replicas))
    while len(ahead.averages) <= max(10, *(len(each.averages) for each in behind)):
        deliveries = sorted(network.choices(), key=lambda choice: choice[2], reverse=True)
        if not (deliveries and deliveries[0][2] == ahead.rank) and any(each.act() for each in (ahead, *behind)):
            continue
        network.happen(*deliveries[0], 0)
    for each in (*behind, ahead):
        each.handle(events.TimerFired(actions.Timer("renew", 0)))
    explore(network, [])
    check_agreement([*behind, ahead], whole=True)
    assert {each.view for each in (*behind, ahead)} == {View(1, tuple(range(replicas)))}
