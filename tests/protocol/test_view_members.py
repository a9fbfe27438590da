"""What single members do when a view ends, or others void a round, are late or leave; on the simulated network."""

from __future__ import annotations

import pytest

from diloco.algorithm import RoundId
from diloco.errors import ViewChangedError
from diloco.membership import Policy, View
from diloco.protocol import Change, Header, Leaving, RoundVote
from tests.membership.network import Limits, explore
from tests.protocol.simulated import begin, check_agreement, rank, settle, simulated
from tests.protocol.simulated_rank import LATE_S, TIMEOUT_S, Rank


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("views", [1, 2])
def test_a_round_that_somebody_gave_up_is_void_also_for_who_hears_of_it_by_a_report(begun: bool, views: int) -> None:
    """Invariant 2: also for a rank that begins the round only in the next view, or in the one after that."""
    network = simulated(2 + views, Limits(ends=views))
    begin(network, 0, *([1] if begun else []))
    rank(network, 0).now_s += TIMEOUT_S
    rank(network, 0).look()  # its vote against the round is in transit
    for lost in range(2, 2 + views):
        network.happen("ends", lost, 0, 0)
        network.happen("notice", 1, lost, 0)  # before any vote has arrived
        settle(network)
    assert rank(network, 1).view == View(views, (0, 1))
    explore(network, [])
    for number in (0, 1):
        assert rank(network, number).outcomes == {1: False} | dict.fromkeys(range(2, Rank.STEPS + 1), True)
    outcome = rank(network, 1).errors[1]
    assert not isinstance(outcome, ViewChangedError), "which would be submitted again"
    assert str(outcome) == "fragment 1, outer step 0 is void: a replica voted against it before the view changed."


def test_what_was_sent_before_somebody_joined_stays_void_in_all_later_views() -> None:
    """A rank that sends it later than the others does not wait for them, though no replica joined its own view."""
    network = simulated(3, Limits(ends=2, returns=1))
    begin(network, 0)
    network.happen("ends", 2, 0, 0)
    settle(network)
    network.happen("returns", 2, 0, 0)
    while rank(network, 2).view.id < 2:
        rank(network, 2).act()
        settle(network)
    assert [following.joined for following in rank(network, 1).changes] == [(), (2,)]
    network.happen("ends", 2, 0, 0)
    settle(network)
    assert rank(network, 1).view == View(3, (0, 1))
    explore(network, [])
    for number in (0, 1):
        assert rank(network, number).outcomes == {1: False} | dict.fromkeys(range(2, Rank.STEPS + 1), True)


def test_nobody_stops_before_all_who_stay_know_the_same() -> None:
    """The first one to stop sends nothing more, so the others would wait for a report that it has not made yet."""
    network = simulated(3, Limits(ends=1), quorum=Policy(3))
    begin(network, 0, 2)
    network.happen("ends", 1, 0, 0)
    network.happen("notice", 2, 1, 0)
    network.happen("deliver", 2, 0, 0)
    assert not rank(network, 0).left, "it still hears the one that 2 reports as ended"
    settle(network)
    for number in (0, 2):
        assert "2 of at least 3 replicas are left" in rank(network, number).left


def test_who_is_late_is_lost_and_told_so() -> None:
    network = simulated(3)
    begin(network, 0, 1)
    assert [delay_s for delay_s, _ in rank(network, 0).timers] == [LATE_S]
    rank(network, 1).now_s += LATE_S  # that it is late counts if more say so than could lie
    rank(network, 0).look()
    explore(network, [])
    words = "replica 2 is late: no contribution to fragment 1, outer step 0 arrived within 5 s"
    assert rank(network, 2).left.startswith(f"the others continued without replica 2: {words}; replica 2 is lost")
    for number in (0, 1):
        assert not rank(network, number).left
        assert rank(network, number).averages[1].contributors == (0, 1)


def test_whoever_finds_most_of_the_others_late_does_not_go_on_without_them() -> None:
    network = simulated(4)
    begin(network, 0)
    rank(network, 0).look()
    settle(network)
    assert not rank(network, 0).sent_of(Change)
    explore(network, [])
    assert [rank(network, number).view.members for number in range(4)] == [(0, 1, 2, 3)] * 4


def test_what_a_leaver_has_applied_is_applied_by_all() -> None:
    """Also by a rank that had not received the others' votes when the leaver left."""
    network = simulated(3)
    begin(network, 0, 1, 2)
    for number in network.ranks:
        assert rank(network, number).act(), "it votes"
    for sender in (0, 1):
        while network.can("deliver", sender, 2):
            network.happen("deliver", sender, 2, 0)
    assert rank(network, 2).averages[1].contributors == (0, 1, 2)
    assert not rank(network, 0).averages
    rank(network, 2).suffer("leaves", 0)
    for number in (0, 1):
        while network.can("deliver", 2, number):
            network.happen("deliver", 2, number, 0)
    explore(network, [])
    for number in (0, 1):
        assert rank(network, number).averages[1].contributors == (0, 1, 2)


@pytest.mark.parametrize("changing_s", [0.0, 9.0])
def test_a_round_has_one_time_in_all_the_views_that_it_takes(changing_s: float) -> None:
    """Otherwise it might outlast any time-out of a waiting caller; lateness is timed anew in each view.

    The time of view changes does not count, as the round can't make progress then.
    """
    network = simulated(3, Limits(ends=1))
    begin(network, 0)
    rank(network, 0).now_s += 7.0
    network.happen("ends", 2, 0, 0)
    network.happen("notice", 0, 2, 0)
    rank(network, 0).now_s += changing_s
    settle(network)
    assert rank(network, 0).view.members == (0, 1)
    assert [delay_s for delay_s, _ in rank(network, 0).timers] == [TIMEOUT_S - 7.0]


def test_who_leaves_says_so_and_the_others_go_on_with_its_name_and_step() -> None:
    network = simulated(3)
    begin(network, 0, 1)
    rank(network, 2).suffer("leaves", 0)
    explore(network, [])
    assert rank(network, 2).left == "replica 2 left after step 0 and takes part in no more rounds."
    for number in (0, 1):
        (change,) = rank(network, number).changes
        assert change.left == (2,)
        assert change.reason == "replica 2 has left; replicas 0, 1 continue"
        assert rank(network, number).machine.rounds.reason.startswith("replica 2 left after step 0; ")
        assert rank(network, number).averages[1].contributors == (0, 1)


def test_words_of_a_member_count_also_when_its_connection_has_ended_since() -> None:
    network = simulated(3)
    network.hang_up(0, 2)
    rank(network, 0).hear(2, Leaving(0, 3))
    assert rank(network, 0).sent_of(Change)[-1].report.left == {2}


def test_who_joins_has_a_say_about_a_fragment_once_its_state_is_the_others() -> None:
    network = simulated(3, Limits(ends=1, returns=1))
    network.happen("ends", 2, 0, 0)
    settle(network)
    network.happen("returns", 2, 0, 0)
    explore(network, [])
    said: dict[int, list[bool]] = {}
    for header in rank(network, 2).sent_of(Header)[::2]:  # one for each of the other two
        said.setdefault(header.round[0], []).append(header.taking_over)
    assert said
    assert all(each == [True] + [False] * (len(each) - 1) for each in said.values())
    assert any(len(each) > 1 for each in said.values())


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
    first = rank(network, 0)
    first.handle(first.machine.rounds.end_exchange, 0, ROUND, "the payload was refused", peer_lost=peer_lost)
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
        each.handle(each.machine.views.handle_failure, 0, "why", frozenset(), anyway=True)
    explore(network, [])
    check_agreement([*behind, ahead], whole=True)
    assert {each.view for each in (*behind, ahead)} == {View(1, tuple(range(replicas)))}


@pytest.mark.parametrize("closed", [(1, 2), (0, 1, 2)])
def test_who_is_closed_to_joiners_lets_in_whom_another_admits(closed: tuple[int, ...]) -> None:
    """Replicas that begin open one after the other; where all are closed, they say why."""
    network = simulated(3, Limits(returns=1), strangers=1)
    network.end(3)
    for number in closed:
        rank(network, number).machine.views.closed_to_joiners = "it is starting"
    network.happen("returns", 3, 0, 0)
    explore(network, [])
    joiner = rank(network, 3)
    if len(closed) == 3:
        assert joiner.left == "refused: it is starting"
        assert not any(rank(network, number).changes for number in closed)
    else:
        assert [rank(network, number).view.members for number in network.ranks] == [(0, 1, 2, 3)] * 4
        check_agreement([rank(network, number) for number in network.ranks])
