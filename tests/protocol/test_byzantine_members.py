"""What a Byzantine member can do to the others: each attack on the simulated network, from any member's place.

A liar is a rank made of the package's own classes, which also sends what the test wants. Of n members f lie, n > 2 f.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.algorithm import Uplink
from diloco.errors import DivergedError
from diloco.membership import NextView, View
from diloco.protocol import MOST_SPOILT, Adopted, Excluded, Header, RoundVote, WireMessage, encode
from tests.protocol.histories import check_honest, instead, report, without
from tests.protocol.network import NUMBERS, Network, explore, settle
from tests.protocol.simulated import TIMEOUT_S, Rank, begin, finish, simulated

pytestmark = pytest.mark.no_cover  # directed tests reach the same lines, and tracing takes longer than the networks

LATE = Excluded(0, "late")


def send(network: Network, liar: int, *messages: WireMessage, to: Sequence[int] = ()) -> None:
    """Send messages from the liar to all others, or to some of them."""
    for other in to or [each for each in network.ranks if each != liar]:
        for message in messages:
            network.send(liar, other, encode(message))


def honest(network: Network, *liars: int) -> list[Rank]:
    return [network[number] for number in network.ranks if number not in liars]


def finished(network: Network, *liars: int) -> list[Rank]:
    """Return the honest ranks once nothing more happens, also with time; they agree."""
    finish(network)
    others = honest(network, *liars)
    check_honest(others)
    assert not any(each.exchanges for each in others)
    return others


def let_time_pass(ranks: Sequence[Rank]) -> None:
    """Let a round's time pass for these ranks, and fire all timers of their rounds."""
    for each in ranks:
        each.now_s += TIMEOUT_S
    for each in ranks:
        for _ in [timer for _, timer in each.timers if timer is not None]:
            each.fire(of_round=True)


@pytest.mark.parametrize(("replicas", "told"), [(2, 0), (3, 1), (4, 1), (5, 2)])
def test_as_many_as_could_lie_exclude_nobody_and_one_more_does(replicas: int, told: int) -> None:
    """Of two members each has to believe the other: it could end the run by leaving as well."""
    network = simulated(replicas)
    begin(network, *range(replicas))
    for liar in range(1, told + 1):
        send(network, liar, LATE, to=[0])
    settle(network)
    assert not network[0].left
    send(network, told + 1, LATE, to=[0])
    settle(network)
    assert network[0].left.startswith("the others continued without replica 0: late.")


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
    network[1].digest = "another state"
    begin(network, 0, 1, 2, deliver=False)
    for sender, receiver in deliveries:
        network.happen("deliver", sender, receiver, 0)
    assert not network[1].errors
    explore(network)
    error = network[1].errors[1]
    assert isinstance(error, DivergedError)
    assert (error.donor, error.replicas) == (0, (1,))


def test_no_state_is_the_majoritys_where_no_two_of_three_hold_it() -> None:
    """Otherwise all would adopt the state of the lowest-numbered replica, which may be the liar."""
    network = simulated(3)
    for number in range(3):
        network[number].digest = f"state of {number}"
    explore(network)
    for number in range(3):
        error = network[number].errors[1]
        assert not isinstance(error, DivergedError)
        assert "replicas 0, 1, 2 differ, and no 2 of them hold the same" in str(error)


@pytest.mark.parametrize(("replicas", "liar"), [(2, 1), (3, 0), (5, 4)])
def test_who_beats_and_never_votes_goes_after_a_rounds_time(replicas: int, liar: int) -> None:
    network = simulated(replicas)
    network[liar].lie = without(RoundVote)
    explore(network)
    assert not any(each.outcomes for each in honest(network, liar))
    let_time_pass(honest(network, liar))
    for each in finished(network, liar):
        assert liar not in each.view.members
        assert set(each.outcomes.values()) == {True}
        why = each.machine.rounds.reason
        assert why.startswith(f"replica {liar} has not voted on fragment 1, outer step 0 within 10 s; ")


@pytest.mark.parametrize("replicas", [3, 4, 5])
def test_whose_vote_only_one_misses_stays_and_the_round_is_what_the_others_say(replicas: int) -> None:
    """As many members as could lie exclude no member."""
    network = simulated(replicas)
    network[1].lie = without(RoundVote, [0])
    explore(network)
    assert not network[0].outcomes
    network[1].lie = lambda receiver, message: [message]
    let_time_pass([network[0]])
    explore(network)
    for each in finished(network):
        assert each.view == View(1, tuple(range(replicas)))
        assert set(each.outcomes.values()) == {True}


def test_who_has_waited_less_than_half_of_a_rounds_time_puts_nobody_out() -> None:
    """Votes are in transit, and a liar reports one as late."""
    network = simulated(3)
    network[1].lie = without(RoundVote)
    explore(network)
    network[0].now_s = TIMEOUT_S / 2 - 1
    send(network, 2, report(2, behind=frozenset({1})))
    explore(network)
    assert all(each.view.members == (0, 1, 2) for each in honest(network))


@pytest.mark.parametrize(
    ("replicas", "liar", "fault"), [(2, 1, {"weight": float("nan")}), (3, 0, {"numel": 3}), (5, 4, {})]
)
def test_who_spoils_three_rounds_is_put_out(replicas: int, liar: int, fault: dict[str, Any]) -> None:
    """By its headers, or by values that make the mean infinite, which each of the others finds by itself."""
    network = simulated(replicas)
    network[liar].lie = instead(Header, **fault)
    for each in honest(network, liar):
        each.finds_unusable = None if fault else liar
    explore(network)
    for each in finished(network, liar):
        assert liar not in each.view.members
        assert sum(not committed for committed in each.outcomes.values()) == MOST_SPOILT
        words = "" if fault else "the mean is not finite; replica"
        why = each.machine.rounds.reason
        assert why.startswith(f"replica {liar} has spoilt at least 3 recent rounds: {words}")


@settings(max_examples=15, deadline=None)
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
        network[liar].lie = instead(Header, weight=float("nan"))
    explore(network, numbers)
    others = finished(network, liar)
    assert {each.view.members for each in others} == {tuple(each.rank for each in others)}
    assert all(each.outcomes == others[0].outcomes and len(each.outcomes) == 12 for each in others)
    assert sum(not committed for committed in others[0].outcomes.values()) <= 2 * MOST_SPOILT


def test_a_rank_that_names_two_uplinks_can_not_make_plans_differ() -> None:
    """Votes cover the uplinks, from which the plan follows: a round in which they differ is not committed."""
    network = simulated(3)
    network[1].lie = instead(Header, [0], uplink=Uplink(7))
    explore(network)
    plans: dict[object, object] = {}
    for each in finished(network, 1):
        committed = {average.round for average in each.averages.values()}
        for what, shards in each.shards.items():
            assert what[1] not in committed or plans.setdefault(what, shards) == shards
    assert len({shards for each in honest(network, 1) for shards in each.shards.values()}) > 1


@pytest.mark.parametrize("replicas", [3, 5])
@pytest.mark.parametrize("of_a_round", [False, True])
def test_what_one_says_it_has_adopted_puts_nobody_out_and_splits_no_round(replicas: int, of_a_round: bool) -> None:
    """The liar says that a member has gone, which it does not hear; or to each of two another outcome of a round."""
    network, liar, before = simulated(replicas), replicas - 1, View.of(replicas)
    begin(network, *range(replicas))
    if of_a_round:
        while not (voted := network[0].sent_of(RoundVote)):
            assert network[0].act()
        key, digest = voted[0].round, voted[0].digest
        committed = NextView(View(1, before.members), before, 2, {key: (digest,)})
        void = NextView(View(1, before.members), before, 2, {}, void=frozenset({key}))
        reported, to_zero, to_one = report(liar), Adopted(committed), Adopted(void)
    else:
        rest = tuple(each for each in range(replicas) if each != 1)
        reported = report(liar, apart=frozenset({1}))
        to_zero, to_one = Adopted(NextView(View(1, rest), before, 2, {})), LATE
    send(network, liar, reported)
    send(network, liar, to_zero, to=[0])
    send(network, liar, to_one, to=[1])
    finished(network, liar)
