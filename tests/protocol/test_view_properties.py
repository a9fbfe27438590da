"""Views, rounds and votes of ranks that exchange messages on an adversarial network."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diloco.membership import Policy
from tests.membership.network import LIMITS, NUMBERS, Limits, Network, explore
from tests.protocol.histories import KINDS, outcome
from tests.protocol.simulated import check_agreement, rules_of, simulate, simulated
from tests.protocol.simulated_rank import Rank

pytestmark = pytest.mark.no_cover  # directed tests reach the same lines, and tracing takes longer than the networks


@settings(max_examples=50, deadline=None)
@given(NUMBERS, st.integers(1, 4), st.integers(0, 3), st.integers(1, 2), st.booleans(), st.booleans())
def test_processes_that_end_leave_survivors_that_agree_and_commit_every_round(
    numbers: list[int], replicas: int, ends: int, size: int, gradients: bool, ready: bool
) -> None:
    """Property: wherever they end, also in the middle of a broadcast, or before they or others have begun.

    Every survivor knows that they have ended.
    """
    survivors = simulate(Limits(ends=ends), numbers, replicas=replicas, size=size, gradients=gradients, ready=ready)
    check_agreement(survivors, whole=True)
    assert ends or [rank.left for rank in survivors] == [""] * replicas * size
    for rank in survivors if size == 1 else ():  # live ranks that leave with their replica look like cut-off ones
        assert not rank.left
        assert rank.view.members == tuple(sorted(each.rank for each in survivors))


FAULTS = st.fixed_dictionaries(
    {}, optional={"timers": st.integers(1, 6), "breaks": st.integers(1, 2), "leaves": st.just(1)}
)
"""Timers that run out at any moment, exchanges that fail, and replicas that leave."""


@settings(max_examples=60, deadline=None)
# it stops amid a round of gradients, which raises, and another round
@example([1, 15904], 2, Limits(1, 1), {"timers": 1}, 0, 1, True, True)
@given(NUMBERS, st.integers(2, 7), LIMITS, FAULTS, st.integers(0, 2), st.integers(1, 2), st.booleans(), st.booleans())
def test_no_trouble_makes_two_histories(
    numbers: list[int],
    replicas: int,
    limits: Limits,
    own: dict[str, int],
    returns: int,
    size: int,
    gradients: bool,
    ready: bool,
) -> None:
    """Property: also for a round that times out, and a replica that counts as late, also if it isn't.

    A round that a rank has voted against is void for all, also if others learn of the vote in a later view. Lost ranks
    alone take no round along.
    """
    # no replica joins while gradients are averaged
    limits = replace(limits, returns=0 if gradients or size > 1 else returns, own=own)
    ranks = simulate(limits, numbers, replicas=replicas, size=size, gradients=gradients, ready=ready)
    check_agreement(ranks, whole=not own and not limits.returns)


@settings(max_examples=50, deadline=None)
# one learns of it from another one before the leaver's own message arrives
@example(numbers=[1504, 0, 0, 0, 12939, 0], replicas=3, leaves=1, size=1)
@given(NUMBERS, st.integers(2, 4), st.integers(1, 3), st.integers(1, 2))
def test_who_leaves_is_missed_by_nobody(numbers: list[int], replicas: int, leaves: int, size: int) -> None:
    """Property: all others continue, even if only one is left, and commit every round; they know who left."""
    ranks = simulate(Limits(own={"leaves": leaves}), numbers, replicas=replicas, size=size)
    check_agreement(ranks, whole=True)
    stay = [rank for rank in ranks if not rank.left]
    gone = {rank.replica for rank in ranks if rank.left}
    assert all(" left after step " in rank.left for rank in ranks if rank.left)
    assert len(stay) == size * (replicas - len(gone))
    for rank in stay:
        assert rank.view.members == tuple(sorted({each.replica for each in stay}))
        assert {replica for change in rank.changes for replica in change.left} == gone
        for each in ranks:
            for step, average in each.averages.items():
                theirs = rank.averages[step].contributors if step in rank.averages else "void"
                assert theirs == average.contributors, "all have applied what a leaver has applied"


@settings(max_examples=50, deadline=None)
@given(NUMBERS, st.integers(2, 4), st.builds(Limits, *[st.integers(0, 2)] * 2))
def test_where_survivors_are_to_stop_all_of_them_do_and_in_the_same_state(
    numbers: list[int], replicas: int, limits: Limits
) -> None:
    """Property: what one of them has committed, all have."""
    ranks = simulate(limits, numbers, replicas=replicas, survive=False)
    assert {bool(rank.left) for rank in ranks} <= {len(ranks) < replicas}
    for rank in ranks:
        both = rank.outcomes.keys() & ranks[0].outcomes.keys()
        assert {step: rank.outcomes[step] for step in both} == {step: ranks[0].outcomes[step] for step in both}
        assert rank.outcomes.keys() == set(range(1, rank.step + 1)), "every round gets an outcome"


@settings(max_examples=50, deadline=None)
@given(NUMBERS, st.integers(2, 4))
def test_fewer_than_asked_for_never_go_on(numbers: list[int], least: int) -> None:
    ranks = simulate(Limits(ends=2), numbers, replicas=4, quorum=Policy(least))
    check_agreement(ranks)
    assert {bool(rank.left) for rank in ranks} == {len(ranks) < least}


@settings(max_examples=50, deadline=None)
@given(NUMBERS, st.integers(2, 4), LIMITS, st.integers(0, 2))
def test_sides_that_go_on_make_one_history_where_more_than_half_are_asked_for(
    numbers: list[int], replicas: int, limits: Limits, returns: int
) -> None:
    """Property: also if others join one of the sides."""
    limits = replace(limits, returns=returns)
    quorum = Policy(replicas // 2 + 1, split="go-on")
    check_agreement(simulate(limits, numbers, replicas=replicas, quorum=quorum))


def test_a_side_goes_on_alone_where_that_is_wanted() -> None:
    network = simulated(2, Limits(cuts=1), quorum=Policy(split="go-on"))
    network.happen("cuts", 0, 1, 0)
    explore(network, [])
    for rank, node in network.nodes.items():
        assert isinstance(node, Rank)
        assert not node.left
        assert node.view.members == (rank,)


@settings(max_examples=50, deadline=None)
# A replica that is restarted twice may wait until the members drop its earlier process, which takes a timeout.
@given(NUMBERS, st.integers(2, 4), st.just(1), st.booleans())
# once more, before the replica that it admitted has begun
@example([0, 171, 2118, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 14294], 2, 2, True)
def test_who_is_started_again_becomes_a_member_or_is_told_why_not(
    numbers: list[int], replicas: int, returns: int, ready: bool
) -> None:
    """Property: also before any rank has noticed that it had ended, or has begun, and while others end."""
    check_agreement(simulate(Limits(ends=2, returns=returns), numbers, replicas=replicas, ready=ready))


def test_a_replica_that_has_lost_one_of_its_own_ranks_stops_and_says_so() -> None:
    """Also if no other replica is left that could report it."""
    network = Network(range(2), Limits(ends=1))
    rules = rules_of()
    for rank in range(2):
        network.nodes[rank] = Rank(network, rank, 1, 2, rules)
    network.happen("ends", 0, 0, 0)
    explore(network, [])
    (left,) = [node for rank, node in network.nodes.items() if rank in network.alive]
    assert isinstance(left, Rank)
    assert left.left.startswith("rank 0 of replica 0 is lost: simulated. Replica 0 takes part in no more rounds;")


@pytest.mark.parametrize(("kind", "replicas"), [*product(KINDS, (3, 5, 7))])
def test_whatever_happens_there_is_one_history_or_none(kind: str, replicas: int) -> None:
    """20,000 of these are run by ``python -m tests.protocol.histories 1000``."""
    assert {outcome(KINDS[kind](replicas, seed)) for seed in range(4)} <= {"one", "none"}


@pytest.mark.parametrize(("replicas", "seed"), [(5, 179), (5, 332), (7, 18), (7, 128), (7, 167)])
def test_two_sides_with_one_common_member_make_one_history(replicas: int, seed: int) -> None:
    """The common member was ready for the view of one side, and then loses that side."""
    assert outcome(KINDS["two groups"](replicas, seed)) in ("one", "none")
