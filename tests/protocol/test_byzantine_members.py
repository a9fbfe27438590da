"""What a Byzantine member can do to the others: each attack on the simulated network, from any member's place.

A liar is a rank made of the package's own classes, which also sends what the test wants. Of n members f lie, n > 2 f.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.algorithm import Uplink
from diloco.errors import DivergedError
from diloco.membership import NextView, Report, View
from diloco.protocol import (
    MOST_SPOILT,
    Adopted,
    Change,
    Excluded,
    Header,
    RoundVote,
    WireMessage,
    encode,
)
from tests.membership.network import NUMBERS, Network, explore
from tests.protocol.simulated import begin, finish, instead, rank, settle, simulated
from tests.protocol.simulated_rank import TIMEOUT_S, Rank

pytestmark = pytest.mark.no_cover  # directed tests reach the same lines, and tracing takes longer than the networks

LATE = Excluded(0, "late")


def send(network: Network, liar: int, *messages: WireMessage, to: Sequence[int] = ()) -> None:
    """Send messages from the liar to all others, or to some of them."""
    for other in to or [each for each in network.ranks if each != liar]:
        for message in messages:
            network.send(liar, other, encode(message))


def honest(network: Network, *liars: int) -> list[Rank]:
    return [rank(network, number) for number in network.ranks if number not in liars]


def check_honest(network: Network, *liars: int) -> None:
    """Check that no honest rank has ended, that all are in one view, and that they agree on every round."""
    others = honest(network, *liars)
    assert [each.left for each in others] == [""] * len(others)
    assert len({each.view for each in others}) == 1
    assert {each.rank for each in others} <= {*others[0].view.members}
    for each in others:
        assert each.step == Rank.STEPS
        assert not each.exchanging
        for step, committed in each.outcomes.items():
            assert committed == others[0].outcomes.get(step, committed)


def change(liar: int, **said: Any) -> WireMessage:
    return Change(Report(liar, 0, **{"number": 1, **said}), "because I say so")


@pytest.mark.parametrize(("replicas", "told"), [(2, 0), (3, 1), (4, 1), (5, 2)])
def test_as_many_as_could_lie_exclude_nobody_and_one_more_does(replicas: int, told: int) -> None:
    """Of two members each has to believe the other: it could end the run by leaving as well."""
    network = simulated(replicas)
    begin(network, *range(replicas))
    for liar in range(1, told + 1):
        send(network, liar, LATE, to=[0])
    settle(network)
    assert not rank(network, 0).left
    send(network, told + 1, LATE, to=[0])
    settle(network)
    assert rank(network, 0).left.startswith("the others continued without replica 0: late.")


HEADERS_FIRST = ((0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (0, 1))
"""Finally rank 1 receives the vote of 0 while the header of 2 is in transit."""

SECOND_HAND = ((1, 0), (2, 0), (2, 1), (0, 2), (0, 2), (2, 1))
"""Finally rank 2, which has the vote of 0 and no header of 1, follows that vote, while the header of 0 is in transit to
1."""


@pytest.mark.parametrize("deliveries", [HEADERS_FIRST, SECOND_HAND])
def test_a_vote_that_names_who_has_diverged_waits_for_the_headers_that_show_it(
    deliveries: Sequence[tuple[int, int]],
) -> None:
    """The vote may arrive before the headers; meanwhile the round must not become void for another reason."""
    network = simulated(3)
    rank(network, 1).digest = "another state"
    begin(network, 0, 1, 2, deliver=False)
    for sender, receiver in deliveries:
        deliver(network, sender, receiver)
    assert not rank(network, 1).errors
    explore(network, [])
    error = rank(network, 1).errors[1]
    assert isinstance(error, DivergedError)
    assert (error.donor, error.replicas) == (0, (1,))


def test_no_state_is_the_majoritys_where_no_two_of_three_hold_it() -> None:
    """Otherwise all would adopt the state of the lowest-numbered replica, which may be the liar."""
    network = simulated(3)
    for number in range(3):
        rank(network, number).digest = f"state of {number}"
    explore(network, [])
    for number in range(3):
        error = rank(network, number).errors[1]
        assert not isinstance(error, DivergedError)
        assert "replicas 0, 1, 2 differ, and no 2 of them hold the same" in str(error)


def withholds_votes(of: Sequence[int]) -> Callable[[int, Any], list[Any]]:
    """Send no votes to the ranks ``of``."""
    return lambda receiver, message: [] if receiver in of and isinstance(message, RoundVote) else [message]


@pytest.mark.parametrize(("replicas", "liar"), [(2, 1), (3, 0), (5, 4)])
def test_who_beats_and_never_votes_goes_after_a_rounds_time(replicas: int, liar: int) -> None:
    network = simulated(replicas)
    rank(network, liar).lie = withholds_votes(range(replicas))
    explore(network, [])
    others = honest(network, liar)
    assert not any(each.outcomes for each in others)
    let_time_pass(others)
    finish(network)
    check_honest(network, liar)
    for each in others:
        assert liar not in each.view.members
        assert set(each.outcomes.values()) == {True}
        why = each.machine.rounds.reason
        assert why.startswith(f"replica {liar} has not voted on fragment 1, outer step 0 within 10 s; ")


@pytest.mark.parametrize("replicas", [3, 4, 5])
def test_whose_vote_only_one_misses_stays_and_the_round_is_what_the_others_say(replicas: int) -> None:
    """As many members as could lie exclude no member."""
    network = simulated(replicas)
    rank(network, 1).lie = withholds_votes([0])
    explore(network, [])
    assert not rank(network, 0).outcomes
    rank(network, 1).lie = lambda receiver, message: [message]
    let_time_pass([rank(network, 0)])
    explore(network, [])
    check_honest(network)
    assert rank(network, 0).view == View(1, tuple(range(replicas)))
    assert all(set(each.outcomes.values()) == {True} for each in honest(network))


def test_who_has_waited_less_than_half_of_a_rounds_time_puts_nobody_out() -> None:
    """Votes are in transit, and a liar reports one as late."""
    network = simulated(3)
    rank(network, 1).lie = withholds_votes([0, 2])
    explore(network, [])
    rank(network, 0).now_s = TIMEOUT_S / 2 - 1
    send(network, 2, change(2, behind=frozenset({1})))
    explore(network, [])
    assert all(each.view.members == (0, 1, 2) for each in honest(network))


@pytest.mark.parametrize(("replicas", "liar"), [(2, 1), (3, 0), (5, 4)])
@pytest.mark.parametrize("fault", [{"weight": float("nan")}, {"numel": 3}, {}], ids=["weight", "size", "values"])
def test_who_spoils_three_rounds_is_put_out(replicas: int, liar: int, fault: dict[str, Any]) -> None:
    """By its headers, or by values that make the mean infinite, which each of the others finds by itself."""
    network = simulated(replicas)
    rank(network, liar).lie = instead(Header, **fault)
    for each in honest(network, liar):
        each.finds_unusable = None if fault else liar
    explore(network, [])
    check_honest(network, liar)
    for each in honest(network, liar):
        assert liar not in each.view.members
        assert sum(not committed for committed in each.outcomes.values()) == MOST_SPOILT
        words = "" if fault else "the mean is not finite; replica"
        why = each.machine.rounds.reason
        assert why.startswith(f"replica {liar} has spoilt at least 3 recent rounds: {words}")


@pytest.mark.parametrize(("replicas", "finders"), [(3, 1), (4, 1), (5, 2)])
def test_whose_values_only_as_many_find_unusable_as_could_lie_stays(replicas: int, finders: int) -> None:
    network = simulated(replicas)
    for each in honest(network)[:finders]:
        each.finds_unusable = replicas - 1
    explore(network, [])
    check_honest(network)
    assert all(each.view.members == tuple(range(replicas)) for each in honest(network))


@settings(max_examples=40, deadline=None)
@given(NUMBERS, st.integers(3, 5), st.data())
def test_who_spoils_rounds_is_put_out_whatever_comes_first(numbers: list[int], replicas: int, data: Any) -> None:
    """Property: also if the others are a round apart, and whether the header or the values are at fault."""
    liar = data.draw(st.integers(0, replicas - 1))
    network = simulated(replicas)
    for each in honest(network):
        each.STEPS = 12
    if data.draw(st.booleans()):
        for each in honest(network, liar):
            each.finds_unusable = liar
    else:
        rank(network, liar).lie = instead(Header, weight=float("nan"))
    explore(network, numbers)
    others = honest(network, liar)
    assert [each.left for each in others] == [""] * len(others)
    assert {each.view.members for each in others} == {tuple(each.rank for each in others)}
    assert all(each.outcomes == others[0].outcomes and len(each.outcomes) == 12 for each in others)
    assert sum(not committed for committed in others[0].outcomes.values()) <= 2 * MOST_SPOILT


def test_a_rank_that_names_two_uplinks_can_not_make_plans_differ() -> None:
    """Votes cover the uplinks, from which the plan follows: a round in which they differ is not committed."""
    network = simulated(3)
    rank(network, 1).lie = instead(Header, [0], uplink=Uplink(7))
    explore(network, [])
    check_honest(network, 1)
    plans: dict[object, object] = {}
    for each in honest(network, 1):
        committed = {average.round for average in each.averages.values()}
        for what, shards in each.shards.items():
            assert what[1] not in committed or plans.setdefault(what, shards) == shards
    assert len({shards for each in honest(network, 1) for shards in each.shards.values()}) > 1


@settings(max_examples=30, deadline=None)
@given(NUMBERS, st.integers(3, 5), st.data())
def test_no_votes_of_liars_make_two_histories(numbers: list[int], replicas: int, data: st.DataObject) -> None:
    """Property: with f liars, n > 2 f, that vote differently. Their reports say how they voted, as all others' do."""
    liars = data.draw(st.lists(st.integers(0, replicas - 1), min_size=1, max_size=(replicas - 1) // 2, unique=True))
    network = simulated(replicas)
    for liar in liars:
        to = data.draw(st.lists(st.integers(0, replicas - 1), min_size=1, unique=True))
        rank(network, liar).lie = instead(RoundVote, to, digest=data.draw(st.sampled_from(["", "another"])))
    explore(network, numbers)
    finish(network)
    others = [each for each in honest(network, *liars) if not each.left]
    assert len({each.view for each in others}) <= 1
    assert len(others) == replicas - len(liars)
    for each in others:
        for step, committed in each.outcomes.items():
            assert committed == others[0].outcomes.get(step, committed)


def test_a_round_that_only_one_has_voted_for_is_judged_alike_by_all() -> None:
    """No claim of a commit counts before all who stay have voted for the round."""
    network = simulated(4)
    begin(network, 0, 1, 2, 3)
    while not rank(network, 0).sent_of(RoundVote):
        assert rank(network, 0).act()
    send(network, 3, change(3, commits={(1, 0): "x"}))
    finish(network)
    check_honest(network, 3)
    assert all(set(each.outcomes.values()) == {True} for each in honest(network, 3))


@pytest.mark.parametrize("replicas", [3, 5])
def test_what_one_says_it_has_adopted_puts_nobody_out(replicas: int) -> None:
    """The liar does not hear a member, is to go for it, and says that the next view is without that member instead."""
    network, liar, victim = simulated(replicas), replicas - 1, 1
    begin(network, *range(replicas))
    rest = tuple(each for each in range(replicas) if each != victim)
    following = NextView(View(1, rest), View.of(replicas), 2, {}, f"replica {victim} is lost")
    send(network, liar, change(liar, apart=frozenset({victim})))
    send(network, liar, Adopted(following), to=[0])
    send(network, liar, LATE, to=[victim])
    finish(network)
    check_honest(network, liar)


@pytest.mark.parametrize("replicas", [3, 5])
def test_what_one_says_it_has_adopted_splits_no_round(replicas: int) -> None:
    """The liar says to one that the round is committed, and to another one that it is void."""
    network, liar = simulated(replicas), replicas - 1
    begin(network, *range(replicas))
    while not (voted := rank(network, 0).sent_of(RoundVote)):
        assert rank(network, 0).act()
    key, digest, before = voted[0].round, voted[0].digest, View.of(replicas)
    committed = NextView(View(1, before.members), before, 2, {key: (digest,)}, "")
    void = NextView(View(1, before.members), before, 2, {}, "", void=frozenset({key}))
    send(network, liar, change(liar))
    send(network, liar, Adopted(committed), to=[0])
    send(network, liar, Adopted(void), to=[1])
    finish(network)
    check_honest(network, liar)


def let_time_pass(ranks: Sequence[Rank]) -> None:
    """Let a round's time pass for these ranks, and fire all timers of their rounds."""
    for each in ranks:
        each.now_s += TIMEOUT_S
    for each in ranks:
        for timer in [timer for _, timer in each.timers if timer.round is not None]:
            if timer in (timers := [still for _, still in each.timers]):
                each.suffer("timers", timers.index(timer))


def deliver(network: Network, sender: int, receiver: int) -> None:
    assert network.can("deliver", sender, receiver)
    network.happen("deliver", sender, receiver, 0)
