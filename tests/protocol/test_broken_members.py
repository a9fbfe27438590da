"""What a member that is broken or damaged costs the others, from any member's place; on the simulated network."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.errors import DivergedError
from diloco.protocol import MOST_SPOILT, Header, RoundVote, WireMessage, encode
from tests.protocol.broken import changed, check_whole, report, without
from tests.protocol.network import NUMBERS, Network, explore
from tests.protocol.simulated import RULES, TIMEOUT_S, Rank, begin, finish, simulated

pytestmark = pytest.mark.no_cover  # directed tests reach the same lines, and tracing takes longer than the networks


def send(network: Network, broken: int, *messages: WireMessage, to: Sequence[int] = ()) -> None:
    """Send messages from one rank to all others, or to some of them."""
    for other in to or [each for each in network.ranks if each != broken]:
        for message in messages:
            network.send(broken, other, encode(message))


def all_but(network: Network, *out: int) -> list[Rank]:
    return [network[number] for number in network.ranks if number not in out]


def finished(network: Network, *out: int) -> list[Rank]:
    """Return the other ranks once nothing more happens, also with time; they agree."""
    finish(network)
    ranks = all_but(network, *out)
    check_whole(ranks)
    assert not any(each.exchanges for each in ranks)
    return ranks


def let_time_pass(ranks: Sequence[Rank]) -> None:
    """Let a round's time pass for these ranks, and fire all timers of their rounds."""
    for each in ranks:
        each.now_s += TIMEOUT_S
    for each in ranks:
        for _ in [timer for _, timer in each.timers if timer is not None]:
            each.fire(of_round=True)


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
    """Otherwise all would adopt the state of the lowest-numbered replica, which may be the damaged one."""
    network = simulated(3)
    for number in range(3):
        network[number].digest = f"state of {number}"
    explore(network)
    for number in range(3):
        error = network[number].errors[1]
        assert not isinstance(error, DivergedError)
        assert "replicas 0, 1, 2 differ, and less than half of them hold the same" in str(error)


@pytest.mark.parametrize(("replicas", "broken"), [(2, 1), (3, 0), (5, 4)])
def test_who_beats_and_never_votes_goes_after_a_rounds_time(replicas: int, broken: int) -> None:
    network = simulated(replicas)
    network[broken].instead = without(RoundVote)
    explore(network)
    assert not any(each.outcomes for each in all_but(network, broken))
    let_time_pass(all_but(network, broken))
    for each in finished(network, broken):
        assert broken not in each.view.members
        assert set(each.outcomes.values()) == {True}
        why = each.machine.rounds.reason
        assert why.startswith(f"replica {broken} has not voted on fragment 1, outer step 0 within 10 s; ")


def test_who_has_waited_less_than_half_of_a_rounds_time_puts_nobody_out() -> None:
    """Votes are in transit, and one member reports another one as late."""
    network = simulated(3)
    network[1].instead = without(RoundVote)
    explore(network)
    network[0].now_s = TIMEOUT_S / 2 - 1
    send(network, 2, report(2, late=frozenset({1})))
    explore(network)
    assert all(each.view.members == (0, 1, 2) for each in all_but(network))


@pytest.mark.parametrize(
    ("replicas", "broken", "fault"), [(2, 1, {"weight": float("nan")}), (3, 0, {"numel": 3}), (5, 4, {})]
)
def test_who_spoils_three_rounds_is_put_out(replicas: int, broken: int, fault: dict[str, Any]) -> None:
    """By its headers, or by values that make the mean infinite, which each of the others finds by itself."""
    network = simulated(replicas)
    network[broken].instead = changed(Header, **fault)
    for each in all_but(network, broken):
        each.finds_unusable = None if fault else broken
    explore(network)
    for each in finished(network, broken):
        assert broken not in each.view.members
        assert sum(not committed for committed in each.outcomes.values()) == MOST_SPOILT
        words = "" if fault else "the mean is not finite; replica"
        why = each.machine.rounds.reason
        assert why.startswith(f"replica {broken} has spoilt at least 3 recent rounds: {words}")


@settings(max_examples=15, deadline=None)
@given(NUMBERS, st.integers(3, 5), st.data())
def test_who_spoils_rounds_is_put_out_whatever_comes_first(numbers: list[int], replicas: int, data: Any) -> None:
    """Property: also if the others are a round apart, and whether the header or the values are at fault."""
    broken = data.draw(st.integers(0, replicas - 1))
    network = simulated(replicas)
    for each in all_but(network):
        each.STEPS = 12
    if data.draw(st.booleans()):
        for each in all_but(network, broken):
            each.finds_unusable = broken
    else:
        network[broken].instead = changed(Header, weight=float("nan"))
    explore(network, numbers)
    others = finished(network, broken)
    assert {each.view.members for each in others} == {tuple(each.rank for each in others)}
    assert all(each.outcomes == others[0].outcomes and len(each.outcomes) == 12 for each in others)
    views = max(2, others[0].view.id)  # who comes back in another view, as its messages were late, is counted anew
    assert sum(not committed for committed in others[0].outcomes.values()) <= views * MOST_SPOILT


def test_who_gives_up_a_view_change_says_why_its_last_ballot_failed() -> None:
    first = simulated(3, rules=replace(RULES, continue_without_lost=False))[0]
    for each in (1, 2):  # the proposer of this ballot proposes nothing
        first.hear(each, report(each, ballot=1))
    first.now_s += 20 * RULES.silence_s
    first.fire(of_round=False)
    words = "the members did not agree on the next view within 50 s (the last ballot failed: it took 5 s)"
    assert words in first.left
