"""What a rank no longer does once a view ends, and what its owner learns about rounds; on the simulated network."""

from __future__ import annotations

import pytest

from diloco.algorithm import RoundId
from diloco.membership import View
from diloco.protocol import Change, RoundVote, events
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


@pytest.mark.parametrize("peer_lost", [True, False])
def test_an_exchange_that_fails_makes_its_round_void_unless_the_view_ends_anyway(peer_lost: bool) -> None:
    network = simulated(2)
    begin(network, 0, 1)
    rank(network, 0).handle(events.ExchangeEnded(0, ROUND, "the payload was refused", peer_lost=peer_lost))
    assert bool(rank(network, 0).sent_of(RoundVote)) == (not peer_lost)


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
        each.handle(events.RoundsFailed(0, "why", frozenset(), frozenset(), anyway=True))
    explore(network, [])
    check_agreement([*behind, ahead], whole=True)
    assert {each.view for each in (*behind, ahead)} == {View(1, tuple(range(replicas)))}
