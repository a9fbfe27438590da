"""What single members do when a view ends, or others void a round, are late or leave; on the simulated network."""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.algorithm import RoundId
from diloco.errors import ConfigurationError, ViewChangedError
from diloco.membership import NextView, Report, View, names_of
from diloco.protocol import (
    REDIAL,
    Announced,
    Announcement,
    Beat,
    BeatDue,
    Begun,
    Change,
    ClosedToJoiners,
    Connected,
    Disconnected,
    Entered,
    Entry,
    Event,
    Exchanged,
    Excluded,
    Header,
    Join,
    Leaving,
    Left,
    Machine,
    Received,
    Refused,
    RoundVote,
    Rules,
    Welcome,
    tally,
)
from tests.protocol.broken import report, without
from tests.protocol.network import Limits, explore, settle
from tests.protocol.simulated import (
    LATE_S,
    RULES,
    TIMEOUT_S,
    TURN_TICKS,
    Rank,
    begin,
    check_agreement,
    finish,
    simulated,
)


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("views", [1, 2])
def test_a_round_that_somebody_gave_up_is_void_also_for_who_hears_of_it_by_a_report(begun: bool, views: int) -> None:
    """Invariant 2: also for a rank that begins the round only in the next view, or in the one after that."""
    network = simulated(2 + views, Limits(ends=views))
    begin(network, 0, *([1] if begun else []))
    network[0].now_s += TIMEOUT_S
    network[0].fire(of_round=True)  # its vote against the round is in transit
    for lost in range(2, 2 + views):
        network.happen("ends", lost, 0, 0)
        network.happen("notice", 1, lost, 0)  # before any vote has arrived
        settle(network)
    assert network[1].view == View(views, (0, 1))
    explore(network)
    for number in (0, 1):
        assert network[number].outcomes == {1: False} | dict.fromkeys(range(2, Rank.STEPS + 1), True)
    outcome = network[1].errors[1]
    assert not isinstance(outcome, ViewChangedError), "which would be submitted again"
    assert str(outcome) == "fragment 1, outer step 0 is void: a replica voted against it before the view changed."


def test_what_was_sent_before_somebody_joined_stays_void_in_all_later_views() -> None:
    """A rank that sends it later than the others does not wait for them, though no replica joined its own view."""
    network = simulated(3, Limits(ends=2, returns=1))
    begin(network, 0)
    network.happen("ends", 2, 0, 0)
    settle(network)
    network.happen("returns", 2, 0, 0)
    while network[2].view.id < 2:
        network[2].act()
        settle(network)
    assert [following.joined for following in network[1].changes] == [(), (2,)]
    network.happen("ends", 2, 0, 0)
    settle(network)
    assert network[1].view == View(3, (0, 1))
    explore(network)
    for number in (0, 1):
        assert network[number].outcomes == {1: False} | dict.fromkeys(range(2, Rank.STEPS + 1), True)


def test_nobody_waits_before_all_who_stay_know_the_same() -> None:
    network = simulated(3, Limits(ends=1), replace(RULES, min_replicas=3))
    begin(network, 0, 2)
    network.happen("ends", 1, 0, 0)
    network.happen("notice", 2, 1, 0)
    network.happen("deliver", 2, 0, 0)
    assert not network[0].waits, "it still hears the one that 2 reports as ended"
    settle(network)
    for number in (0, 2):
        assert network[number].waits == "2 of at least 3 replicas are left"
        assert not network[number].left


def test_fewer_than_the_least_number_go_on_once_one_is_started_again() -> None:
    """It joins right after the view in which they would be too few."""
    network = simulated(3, Limits(ends=1, returns=1), replace(RULES, min_replicas=3))
    begin(network, 0, 2)
    network.happen("ends", 1, 0, 0)
    settle(network)
    network.happen("returns", 1, 0, 0)
    explore(network)
    assert [network[number].view for number in range(3)] == [View(2, (0, 1, 2), (0, 2, 1))] * 3
    assert not any(network[number].left or network[number].waits for number in range(3))


@pytest.mark.parametrize("replicas", [3, 5])
def test_all_who_lose_each_other_go_on_as_they_were_once_they_hear_each_other(replicas: int) -> None:
    """A blip leaves nobody out, starts no process again, and makes no round void."""
    network = simulated(replicas, Limits(cuts=99))
    begin(network, *range(replicas), deliver=False)
    for pair in combinations(range(replicas), 2):
        network.happen("cuts", *pair, 0)
    finish(network)
    assert all(network[number].waits for number in range(replicas))
    network.heal_all()
    finish(network)
    assert {network[number].view.members for number in range(replicas)} == {tuple(range(replicas))}
    check_agreement([network[number] for number in range(replicas)], whole=True)


@pytest.mark.parametrize("replicas", [3, 5])
def test_one_that_is_back_later_than_the_others_is_waited_for_as_long_as_a_redial_takes(replicas: int) -> None:
    """Most had gone on without it after half of this time, so that it had to join them, with another state."""
    network, most = simulated(replicas, Limits(cuts=99)), range(replicas // 2 + 1)
    begin(network, *range(replicas))
    for pair in combinations(range(replicas), 2):
        network.happen("cuts", *pair, 0)
    finish(network)
    for pair in combinations(most, 2):
        network.heal(*pair)
    explore(network)
    for _ in range(int(REDIAL * TURN_TICKS / 2) - 1):  # a turn is two silences
        for number in most:
            network[number].fire(of_round=False)
        explore(network)
    network.heal_all()
    finish(network)
    assert {change.view.members for number in most for change in network[number].changes} == {tuple(range(replicas))}


def test_two_of_three_that_end_with_their_machines_and_start_again_join_the_one_that_waits() -> None:
    """Their new processes show that the old ones have ended, which silence does not."""
    network = simulated(3, Limits(machines=2, returns=2))
    begin(network, 0, 1, 2)
    for number in (0, 1):
        network.happen("machines", number, 0, 0)
    finish(network)
    assert "may be continuing without replica 2" in network[2].waits
    network.happen("returns", 0, 0, 0)
    explore(network)
    assert network[2].waits, "1 may be running"
    (told,) = network[2].sent_of(Refused)
    assert told.waits
    assert "the members wait: replica 1 can't be reached" in told.reason
    network.happen("returns", 1, 0, 0)
    finish(network)
    assert {network[number].view.members for number in range(3)} == {(0, 1, 2)}
    check_agreement([network[number] for number in range(3)])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 2, 0), (2, 3, 0, 1)])
def test_replicas_of_several_ranks_that_start_again_join_the_one_that_waits(order: tuple[int, ...]) -> None:
    """Their ranks come in any order; only a whole replica shows that the old one has ended."""
    network = simulated(3, Limits(machines=4), size=2)
    begin(network, *network.ranks)
    for rank in order:
        network.happen("machines", rank, 0, 0)
    finish(network)
    assert all("may be continuing without replica 2" in network[rank].waits for rank in (4, 5))
    for rank in order:
        network.return_whole(rank)
        finish(network)
    for rank in order:
        network[rank].ask_again()
        finish(network)
    assert {network[rank].view.members for rank in network.ranks} == {(0, 1, 2)}
    check_agreement([network[rank] for rank in network.ranks])


@pytest.mark.parametrize("newcomers", [1, 33])
def test_a_member_that_is_started_again_is_let_in_beside_any_number_of_newcomers(newcomers: int) -> None:
    """They are more than may join by one change, and the member that waits for it needs none of them."""
    network = simulated(3, Limits(machines=2), strangers=newcomers)
    for number in range(3, 3 + newcomers):
        network.end(number)
    begin(network, 0, 1, 2)
    for number in (0, 1):
        network.happen("machines", number, 0, 0)
    finish(network)
    for number in range(3, 3 + newcomers):
        network.return_whole(number)
        explore(network)
    assert "may be continuing without replica 2" in network[2].waits
    for number in (0, 1):
        network.return_whole(number)
        finish(network)
    assert not network[2].waits
    assert {0, 1, 2} <= {*network[2].view.members}


@pytest.mark.parametrize("replicas", range(2, 8))
def test_who_is_let_in_and_does_not_hear_of_it_keeps_nobody_busy_and_is_told_again(replicas: int) -> None:
    """It takes no part in a view that it does not know, so those that need it to decide wait, and come to rest."""
    network = simulated(replicas, Limits(ends=1, returns=1, flaps=99, cuts=99))
    begin(network, *range(replicas))
    network.happen("ends", 0, 0, 0)
    finish(network)
    members = range(1, replicas)
    for number in members:
        network[number].instead = without(Welcome)
    network.happen("returns", 0, 0, 0)
    finish(network)
    assert {network[number].view.members for number in members} == {tuple(range(replicas))}
    for one, other in combinations(members, 2):  # halves that don't hear each other
        if one <= replicas // 2 < other:
            network.happen("cuts", one, other, 0)
    for number in members:
        network.happen("flaps", 0, number, 0)
        network.dial(0, number)
    finish(network)
    assert all(network[number].waits for number in members)
    for number in members:
        network[number].instead = lambda receiver, message: (message,)
        network.happen("flaps", 0, number, 0)
        network.dial(0, number)
    finish(network)
    going_on = [network[number] for number in range(replicas) if not network[number].left]
    going_on = [each for each in going_on if not each.waits]
    assert {each.view.members for each in going_on} == {tuple(each.rank for each in going_on)}
    assert network[0] in going_on
    assert 2 * len(going_on) > replicas


def test_who_is_let_in_as_its_connection_breaks_hears_that_the_others_go_on_without_it() -> None:
    """It has connected again before it took the welcome, so it does not know which process the member is."""
    network = simulated(3, Limits(ends=1, returns=1, flaps=1))
    begin(network, 0, 1, 2)
    network.end(2)
    finish(network)
    network.happen("returns", 2, 0, 0)
    joiner = network[2]
    while joiner._answer is None:  # a welcome, which it has not taken yet
        joiner.act()
        settle(network)
    network.happen("flaps", 1, 2, 0)
    joiner.act()
    assert joiner.machine.views.is_member
    assert network.dial(2, 1)
    joiner.hear(1, Excluded(joiner.view.id, "replica 2 is lost"))
    assert "replica 2 is lost" in joiner.left


def test_a_report_from_a_process_that_has_ended_does_not_make_its_successor_a_member() -> None:
    """It came before the welcome was taken, and the new process is connected since, which asks to join."""
    joiner = Machine(replace(RULES, rank=2))
    view = View(0, (0, 1))
    following = NextView(view.followed_by((0, 1, 2)), view, 3, {})
    for rank in (0, 1):
        joiner.handle(0.0, Connected(rank, rank, str(rank), f"process {rank}"))
    joiner.handle(0.0, Begun(View(-1, (0, 1)), False))
    joiner.handle(0.0, Announced(Join(Entry(2, "2"))))
    connections = joiner.handle(0.0, Received(0, Welcome(following, b""))).answers[0][1]
    joiner.handle(0.0, Received(1, Change(Report(1, 1), "replica 0 is late", "late")))
    joiner.handle(0.0, Disconnected(1))
    joiner.handle(0.0, Connected(1, 3, "1", "another process"))
    joiner.handle(0.0, Entered(following, connections))
    joiner.handle(0.0, Received(1, Join(Entry(1, "1"), (0, 2))))
    assert joiner.views.joining == {1}


@pytest.mark.parametrize("returns", [0, 1])
def test_members_that_are_too_few_go_on_with_new_ones(returns: int) -> None:
    """They come one by one, and are told why they wait; one ends meanwhile and comes again."""
    network = simulated(4, Limits(ends=2), replace(RULES, min_replicas=4), strangers=2)
    for number in (4, 5):
        network.end(number)
    begin(network, 0, 1, 2, 3)
    for number in (0, 1):
        network.end(number)
    finish(network)
    assert network[2].waits == "2 of at least 4 replicas are left"
    for _ in range(1 + returns):
        network.end(4)
        finish(network)
        network.return_whole(4)
        finish(network)
        assert network[4].waits == "3 of at least 4 replicas are left"
    network.return_whole(5)
    finish(network)
    assert {network[number].view.members for number in (2, 3, 4, 5)} == {(2, 3, 4, 5)}


@pytest.mark.parametrize("returns", [0, 1])
@pytest.mark.parametrize("order", [(6, 7), (7, 6)])
def test_members_that_are_too_few_go_on_with_a_new_one_of_several_ranks(order: tuple[int, ...], returns: int) -> None:
    """Its first rank may end before the second one comes."""
    network = simulated(3, Limits(ends=2), replace(RULES, min_replicas=3), size=2, strangers=2)
    for rank in order:
        network.end(rank)
    begin(network, *range(6))
    for rank in (2, 3):
        network.end(rank)
    finish(network)
    for _ in range(returns):
        network.return_whole(order[0])
        finish(network)
        network.end(order[0])
        finish(network)
    for rank in order:
        assert network[0].waits == "2 of at least 3 replicas are left"
        network.return_whole(rank)
        finish(network)
    for rank in order:
        network[rank].ask_again()
        finish(network)
    assert {network[rank].view.members for rank in (0, 1, 4, 5, *order)} == {(0, 2, 3)}


@pytest.mark.parametrize("ended", [1, 33])
def test_newcomers_that_have_ended_keep_nobody_out_where_members_wait(ended: int) -> None:
    """They have come one after the other, each with another number, and nobody can be connected to them any more."""
    network = simulated(4, Limits(), replace(RULES, min_replicas=4), strangers=ended + 2)
    for number in range(4, 6 + ended):
        network.end(number)
    begin(network, 0, 1, 2, 3)
    for number in (0, 1):
        network.end(number)
    finish(network)
    for number in range(4, 4 + ended):
        network.return_whole(number)
        explore(network)
        assert network[number].waits
        network.end(number)
        explore(network)
    last = 4 + ended, 5 + ended
    for number in last:
        network.return_whole(number)
        finish(network)
    assert {network[number].view.members for number in (2, 3, *last)} == {(2, 3, *last)}


def test_members_wait_for_more_where_one_of_them_has_lost_a_newcomer() -> None:
    """Both have reported that it joins, and it is needed: no ballot can succeed until it asks again."""
    network = simulated(3, Limits(ends=1, cuts=1), replace(RULES, min_replicas=3), strangers=1)
    begin(network, 0, 1, 2)
    network.end(1)
    finish(network)
    for number in (0, 2):
        network[number].hear(3, Join(Entry(3, "simulated:3"), (0, 2)))
    network.happen("cuts", 2, 3, 0)
    network.happen("notice", 2, 3, 0)
    finish(network)
    assert network[0].machine.views.joining == network[2].machine.views.joining == {3}
    assert network[0].waits == network[2].waits == "2 of at least 3 replicas are left"


@pytest.mark.parametrize("replicas", [3, 4, 7])
def test_who_sees_the_new_process_of_a_member_goes_on_without_the_old_one_before_it_asks(replicas: int) -> None:
    """A new process may take long to fetch the state; until it asks, it takes no part in rounds."""
    network = simulated(replicas, Limits(ends=1, returns=1))
    begin(network, *range(replicas))
    network.end(1)
    network.happen("returns", 1, 0, 0)
    network[1].todo.clear()  # it does not ask yet
    others = [number for number in range(replicas) if number != 1]
    for number in others:
        network[number].look()
    settle(network)
    assert {network[number].view.members for number in others} == {tuple(others)}
    assert network[0].machine.rounds.reason.startswith("replica 1 was started again; replica 1 is lost")
    network[1].ask_again()
    finish(network)
    assert {network[number].view.members for number in range(replicas)} == {tuple(range(replicas))}


def test_a_process_that_was_started_again_and_goes_elsewhere_shows_nothing() -> None:
    """It may be a member of another view by the time at which the others would count."""
    network = simulated(3, Limits(machines=2, returns=2))
    begin(network, 0, 1, 2)
    for number in (0, 1):
        network.happen("machines", number, 0, 0)
    finish(network)
    network.happen("returns", 0, 0, 0)
    explore(network)
    assert network[2].machine.views.change.mine.gone == {0}
    network.end(0)
    network.hang_up(2, 0)
    network[2].lose(0, gone=True)
    assert network[2].machine.views.change.mine.apart == {0, 1}
    network.happen("returns", 1, 0, 0)
    finish(network)
    assert network[2].waits, "0 may be running"


def test_who_was_apart_and_ends_before_it_reports_again_may_have_decided() -> None:
    """Being connected again shows nothing: it has gone on with others, and one that has joined them may live."""
    network = simulated(3, Limits(cuts=2, ends=2))
    begin(network, 0, 1, 2)
    for number in (0, 1):
        network.happen("cuts", number, 2, 0)
    finish(network)
    assert [network[number].view.members for number in (0, 1)] == [(0, 1)] * 2
    network.heal_all()
    for number in (0, 1):
        assert network.dial(2, number)
        assert number not in network[2].machine.views.change.mine.lost
    for number in (0, 1):
        network.end(number)
        for pair in ((number, 2), (2, number)):
            network.on_the_way[pair].clear()
        network.hang_up(2, number)
        network[2].lose(number, gone=True)
    finish(network)
    assert network[2].machine.views.change.mine.apart == {0, 1}
    assert network[2].waits


@pytest.mark.parametrize("how", [Left(), Left(if_waiting=True), Announced(Announcement("stop", 0))], ids=str)
def test_who_is_to_stop_while_it_waits_leaves_at_once(how: Event) -> None:
    network = simulated(3, Limits(machines=2))
    begin(network, 0, 1, 2)
    for number in (0, 1):
        network.happen("machines", number, 0, 0)
    finish(network)
    assert network[2].waits
    network[2].handle(how)
    assert network[2].left.startswith("replica 2 left after step ")
    assert not any(network[2].outcomes.values())


def test_a_restarted_process_is_no_member_that_is_back() -> None:
    """Only the process that was the member is: another one knows nothing of what that one has accepted."""
    network = simulated(3, Limits(machines=1, returns=1), replace(RULES, min_replicas=3))
    begin(network, 0, 1, 2)
    network.happen("machines", 1, 0, 0)
    finish(network)
    assert network[0].machine.views.missing == network[2].machine.views.missing == {1}
    network.hang_up(0, 2)
    network[0].lose(2, gone=False)
    explore(network)
    assert network[0].machine.views.missing == {1}, "it has dialled"


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_the_half_with_the_lowest_number_goes_on_whoever_joined_first(order: tuple[int, ...]) -> None:
    """Regression: it stopped, and said that it could not be reached itself; of two, the survivor of a dead machine."""
    replicas = len(order)
    network = simulated(replicas, Limits(cuts=4), founded=View(0, tuple(range(replicas)), order))
    begin(network, *range(replicas))
    lower, higher = range(replicas // 2), range(replicas // 2, replicas)
    for pair in product(lower, higher):
        network.happen("cuts", *pair, 0)
    finish(network)
    assert {network[each].view.members for each in lower} == {(*lower,)}
    words = f"{names_of(lower)} can't be reached and may be continuing without {names_of(higher)}, which"
    assert not any(network[each].left or network[each].waits for each in lower)
    assert all(words in network[each].waits for each in higher)


def test_who_is_late_is_lost_and_told_so() -> None:
    network = simulated(3)
    begin(network, 0, 1)
    assert [delay_s for delay_s, _ in network[0].timers] == [LATE_S]
    for number in (0, 1):  # that it is late counts if half of all say so
        network[number].fire(of_round=True)
    explore(network)
    words = "replica 2 is late: no contribution to fragment 1, outer step 0 arrived within 5 s"
    assert network[2].left.startswith(f"the others continued without replica 2: {words}; replica 2 is lost")
    for number in (0, 1):
        assert not network[number].left
        assert network[number].averages[1].contributors == (0, 1)


def test_whoever_finds_most_of_the_others_late_does_not_go_on_without_them() -> None:
    network = simulated(4)
    begin(network, 0)
    network[0].fire(of_round=True)
    settle(network)
    assert not network[0].sent_of(Change)
    explore(network)
    assert [network[number].view.members for number in range(4)] == [(0, 1, 2, 3)] * 4


@pytest.mark.parametrize("changing_s", [0.0, 9.0])
def test_a_round_has_one_time_in_all_the_views_that_it_takes(changing_s: float) -> None:
    """Otherwise it might outlast any time-out of a waiting caller; lateness is timed anew in each view.

    The time of view changes does not count, as the round can't make progress then.
    """
    network = simulated(3, Limits(ends=1))
    begin(network, 0)
    network[0].now_s += 7.0
    network.happen("ends", 2, 0, 0)
    network.happen("notice", 0, 2, 0)
    network[0].now_s += changing_s
    settle(network)
    assert network[0].view.members == (0, 1)
    assert [delay_s for delay_s, _ in network[0].timers] == [TIMEOUT_S - 7.0]


def test_who_leaves_says_so_and_the_others_go_on_with_its_name_and_step() -> None:
    network = simulated(3)
    begin(network, 0, 1)
    network[2].suffer("leaves", 0)
    explore(network)
    assert network[2].left == "replica 2 left after step 0 and takes part in no more rounds."
    for number in (0, 1):
        (change,) = network[number].changes
        assert change.left == (2,)
        assert change.reason == "replica 2 has left; replicas 0, 1 continue"
        assert network[number].machine.rounds.reason.startswith("replica 2 left after step 0; ")
        assert network[number].averages[1].contributors == (0, 1)


def test_words_of_a_member_count_also_when_its_connection_has_ended_since() -> None:
    network = simulated(3)
    network.hang_up(0, 2)
    network[0].hear(2, Leaving(0, 3))
    assert network[0].sent_of(Change)[-1].report.left == {2}


def test_who_joins_has_a_say_about_a_fragment_once_its_state_is_the_others() -> None:
    network = simulated(3, Limits(ends=1, returns=1))
    network.happen("ends", 2, 0, 0)
    settle(network)
    network.happen("returns", 2, 0, 0)
    explore(network)
    said: dict[int, list[bool]] = {}
    for header in network[2].sent_of(Header)[::2]:  # one for each of the other two
        said.setdefault(header.round[0], []).append(header.taking_over)
    assert said
    assert all(each == [True] + [False] * (len(each) - 1) for each in said.values())
    assert any(len(each) > 1 for each in said.values())


ROUND = RoundId(1, 0)


def test_who_has_reported_the_end_of_a_view_casts_no_vote_in_it() -> None:
    """A report lists the committed rounds, and is a promise to commit no more of them."""
    network = simulated(3)
    begin(network, 0, 1, 2)
    network[0].lose(2, gone=False)
    assert network[0].sent_of(Change)
    assert network[0].act(), "it holds the mean"
    assert not network[0].sent_of(RoundVote)


@pytest.mark.parametrize("peer_lost", [True, False])
def test_an_exchange_that_fails_makes_its_round_void_unless_the_view_ends_anyway(peer_lost: bool) -> None:
    network = simulated(2)
    begin(network, 0, 1)
    first = network[0]
    first.handle(Exchanged(0, ROUND, "the payload was refused", peer_lost=peer_lost))
    assert bool(network[0].sent_of(RoundVote)) == (not peer_lost)


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_view_changes_where_one_is_a_round_ahead(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others still remember a round that it has forgotten."""
    monkeypatch.setattr(Rank, "STEPS", 16)
    network = simulated(replicas)
    *behind, ahead = (network[number] for number in range(replicas))
    while len(ahead.averages) <= max(10, *(len(each.averages) for each in behind)):
        deliveries = sorted(network.choices(), key=lambda choice: choice[2], reverse=True)
        if not (deliveries and deliveries[0][2] == ahead.rank) and any(each.act() for each in (ahead, *behind)):
            continue
        network.happen(*deliveries[0], 0)
    ahead.hear(0, report(0, number=0))  # the view changes
    explore(network)
    check_agreement([*behind, ahead], whole=True)
    assert {each.view for each in (*behind, ahead)} == {View(1, tuple(range(replicas)))}


@pytest.mark.parametrize("closed", [(1, 2), (0, 1, 2)])
def test_who_is_closed_to_joiners_lets_in_whom_another_admits(closed: tuple[int, ...]) -> None:
    """Replicas that begin open one after the other; where all are closed, they say why."""
    network = simulated(3, Limits(returns=1), strangers=1)
    network.end(3)
    for number in closed:
        network[number].handle(ClosedToJoiners("it is starting"))
    network.happen("returns", 3, 0, 0)
    explore(network)
    joiner = network[3]
    if len(closed) == 3:
        assert joiner.left == "refused: it is starting"
        assert not any(network[number].changes for number in closed)
    else:
        assert [network[number].view.members for number in network.ranks] == [(0, 1, 2, 3)] * 4
        check_agreement([network[number] for number in network.ranks])


# Votes: a round is applied by all or by none, in whatever order votes arrive.


def vote(digest: str, reason: str = "") -> RoundVote:
    return RoundVote(0, RoundId(0, 0), digest, reason)


VOTES = st.sampled_from([vote("a"), vote("b"), vote("", "was late"), vote("")])


@given(st.dictionaries(st.integers(0, 7), VOTES, min_size=1, max_size=6), st.data())
def test_no_two_members_decide_differently_whatever_order_votes_come_in(
    votes: dict[int, RoundVote], data: st.DataObject
) -> None:
    """Property: once all votes are in, each has a final decision, or knows that the round is disputed."""
    voters, taken = sorted(votes), set()
    for me in voters:
        order = data.draw(st.permutations(voters))
        seen = [tally(voters, {each: votes[each] for each in order[:count]}, me=me) for count in range(len(order) + 1)]
        taken |= {committed for committed, _ in seen if committed is not None}
        assert seen[-1] != (None, "")
    assert len(taken) <= 1
    assert taken <= {all(each.ok and each == votes[voters[0]] for each in votes.values())}


def test_digests_must_be_equal_at_a_position_and_only_there() -> None:
    """Two replicas of two ranks: ranks at the same position hold the same shard."""
    shards = dict(enumerate(map(vote, ("first", "second", "first", "second"))))
    assert tally(range(4), shards, me=0, size=2) == (True, "")
    assert tally(range(4), shards, me=0)[1]
    mixed = shards | {3: vote("odd")}
    assert tally(range(4), mixed, me=0, size=2) == (None, "rank 3 holds a different average than rank 1")


# Which silent ranks count as lost: a dead one soon, whoever else is quiet; and what a suspended process knows.

SILENCE = Rules(heartbeat_s=2.0, silence_s=15.0)
DEAD = 1


def detected_s(heard: dict[int, Callable[[float], float]], members: Iterable[int]) -> tuple[float, list[int]]:
    """Return when the first silent ranks are found after the last message of all at 0 s, and which.

    Args:
        heard: rank -> the time of its last message before a given time.
        members: the members among the ranks.
    """
    machine, now_s = Machine(SILENCE), 0.0
    for rank in heard:
        machine.handle(0.0, Connected(rank, rank, ""))
    machine.handle(0.0, Begun(View(0, (0, *sorted(members))), member=True))
    while now_s < 300:
        now_s += SILENCE.heartbeat_s
        for rank, last in heard.items():
            machine.handle(last(now_s), Received(rank, Beat()))
        if lost := machine.handle(now_s, BeatDue()).silent:
            return now_s, lost
    return now_s, []


def every(interval_s: float, first_s: float = 0.0) -> Callable[[float], float]:
    return lambda now_s: max(0.0, now_s - (now_s - first_s) % interval_s)


@pytest.mark.parametrize("replicas", [4, 64])
@pytest.mark.parametrize("are_members", [True, False])
def test_two_that_beat_every_eight_seconds_in_turn_hide_no_dead_one(replicas: int, are_members: bool) -> None:
    slow = (replicas, replicas + 1)
    members = {*range(1, replicas)} | ({*slow} if are_members else set())
    heard = dict.fromkeys(members, every(2.0)) | {DEAD: every(1e9), slow[0]: every(8.0, 1.0), slow[1]: every(8.0, 5.0)}
    assert detected_s(heard, members) == (16.0, [DEAD])


@pytest.mark.parametrize("interval_s", [8.0, 14.9])
@pytest.mark.parametrize("num_slow", [1, 2, 5])
def test_no_number_of_slow_members_hides_a_dead_one_for_longer_than_twice_the_limit(
    interval_s: float, num_slow: int
) -> None:
    """Also if they are all there are, and take turns."""
    slow = {2 + each: every(interval_s, each * interval_s / num_slow) for each in range(num_slow)}
    when_s, lost = detected_s({DEAD: every(1e9), **slow}, [DEAD, *slow])
    assert when_s <= 2 * SILENCE.silence_s + SILENCE.heartbeat_s
    assert lost == [DEAD]


@pytest.mark.parametrize("replicas", [2, 3, 64])
@given(st.randoms())
def test_who_hears_nobody_any_more_accuses_all_at_once(replicas: int, chance: random.Random) -> None:
    """Property: whatever the others sent last; strangers that it still hears change nothing."""
    last_s = {rank: chance.uniform(-SILENCE.heartbeat_s, 0.0) for rank in range(1, replicas)}
    heard = {rank: lambda now_s, each=each: each for rank, each in last_s.items()} | {99: every(2.0)}
    when_s, lost = detected_s(heard, range(1, replicas))
    assert sorted(lost) == [*range(1, replicas)]
    assert when_s <= SILENCE.silence_s + SILENCE.heartbeat_s


def test_two_silences_fit_into_the_time_after_which_somebody_is_late() -> None:
    """Otherwise a replica could be excluded as late that was only silent."""
    with pytest.raises(ConfigurationError, match=r"late_s=29.0 must be at least twice silence_s=15.0"):
        replace(SILENCE, late_s=29.0)


def test_a_process_that_was_suspended_gives_the_others_time_and_knows_it_for_a_silence() -> None:
    machine = Machine(SILENCE)
    roster = machine.roster
    machine.handle(0.0, Connected(1, 1, ""))

    def stalled(now_s: float) -> bool:
        effects = machine.handle(now_s, BeatDue())
        assert not effects.silent
        return effects.stalled

    assert not stalled(0.0)
    assert not stalled(2.1)
    assert (roster.was_suspended(15.0), roster.was_suspended(15.2)) == (False, True), "it should have beaten by then"
    assert stalled(22.1)
    assert (roster.was_suspended(30.0), roster.was_suspended(37.2)) == (True, True)
    assert [stalled(now_s) for now_s in (24.0, 26.0, 36.0, 38.0)] == [False, False, True, False]
    assert not roster.was_suspended(38.0), "ten seconds are no silence"
