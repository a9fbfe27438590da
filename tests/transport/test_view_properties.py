"""Views, rounds and votes of the torch.distributed transport on a network that does what it likes.

The same properties as in ``tests/membership/test_change.py``, of the code that runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.membership.quorum import Policy
from diloco.transport.peers.views import Policies
from tests.membership.network import Limits, Network, explore
from tests.transport.simulated import Rank, simulate, without_threads

NUMBERS = st.lists(st.integers(0, 1 << 16), max_size=200)
LIMITS = st.builds(Limits, st.integers(0, 2), st.integers(0, 2), st.integers(0, 3), st.booleans())


def check_agreement(ranks: Sequence[Rank]) -> None:
    """What must hold whatever happened."""
    going_on = [rank for rank in ranks if not rank.left]
    assert len({rank.view for rank in going_on}) <= 1, "two histories"
    for rank in going_on:
        assert rank.transport.step == rank.STEPS, "it never became a member"
        assert sorted(rank.outcomes) == list(range(rank.first_step, rank.STEPS + 1)), "a round was never decided"
        for step, committed in rank.outcomes.items():
            assert committed == going_on[0].outcomes.get(step, committed), "a round is applied by all or by none"


@settings(max_examples=20, deadline=None)
@given(NUMBERS, st.integers(1, 4), st.integers(1, 2))
def test_with_nothing_lost_every_round_is_committed(numbers: list[int], replicas: int, size: int) -> None:
    ranks = simulate(Limits(), numbers, replicas=replicas, size=size)
    check_agreement(ranks)
    assert len(ranks) == replicas * size
    assert all(not rank.left and set(rank.outcomes.values()) == {True} for rank in ranks)


@settings(max_examples=200, deadline=None)
@given(NUMBERS, st.integers(2, 4), st.integers(1, 3), st.integers(1, 2))
def test_processes_that_end_leave_survivors_that_agree_and_go_on(
    numbers: list[int], replicas: int, ends: int, size: int
) -> None:
    """Property: wherever they end, also in the middle of a broadcast; everybody knows that they have ended."""
    survivors = simulate(Limits(ends=ends), numbers, replicas=replicas, size=size)
    check_agreement(survivors)
    for rank in survivors if size == 1 else ():  # ranks that live and leave with their replica look like cut ones
        assert not rank.left
        assert rank.view.members == tuple(sorted(each.rank for each in survivors))


@settings(max_examples=200, deadline=None)
@given(NUMBERS, st.integers(2, 4), LIMITS, st.integers(1, 2))
def test_silent_machines_and_cut_connections_never_make_two_histories(
    numbers: list[int], replicas: int, limits: Limits, size: int
) -> None:
    """Property: who goes on agrees on the view and on every round."""
    check_agreement(simulate(limits, numbers, replicas=replicas, size=size))


@settings(max_examples=100, deadline=None)
@given(NUMBERS, st.integers(2, 4), st.builds(Limits, *[st.integers(0, 2)] * 2))
def test_where_survivors_are_to_stop_all_of_them_do_and_in_the_same_state(
    numbers: list[int], replicas: int, limits: Limits
) -> None:
    """Property: what one of them committed, all have."""
    ranks = simulate(limits, numbers, replicas=replicas, go_on=False)
    assert {bool(rank.left) for rank in ranks} <= {len(ranks) < replicas}
    for rank in ranks:
        both = rank.outcomes.keys() & ranks[0].outcomes.keys()
        assert {step: rank.outcomes[step] for step in both} == {step: ranks[0].outcomes[step] for step in both}


@settings(max_examples=50, deadline=None)
@given(NUMBERS, st.integers(2, 4))
def test_fewer_than_asked_for_never_go_on(numbers: list[int], least: int) -> None:
    ranks = simulate(Limits(ends=2), numbers, replicas=4, least=least)
    check_agreement(ranks)
    assert {bool(rank.left) for rank in ranks} == {len(ranks) < least}


@settings(max_examples=200, deadline=None)
@given(NUMBERS, st.integers(2, 4), st.integers(1, 3))
def test_who_is_started_again_becomes_a_member_or_is_told_why_not(
    numbers: list[int], replicas: int, returns: int
) -> None:
    """Property: also before anybody has noticed that it had ended, and while others end."""
    check_agreement(simulate(Limits(ends=2, returns=returns), numbers, replicas=replicas))


def test_a_replica_that_has_lost_one_of_its_own_ranks_stops_and_says_so() -> None:
    """Also where nobody is left who could tell it."""
    network = Network(range(2), Limits(ends=1))
    with without_threads():
        policies = Policies(Policy(), go_on=True, raise_on_loss=False, streams=1, connect_timeout_s=1.0)
        for rank in range(2):
            network.nodes[rank] = Rank(network, rank, 1, 2, policies)
        network.happen("ends", 0, 0, 0)
        explore(network, [])
    (left,) = [node for rank, node in network.nodes.items() if rank in network.alive]
    assert isinstance(left, Rank)
    assert left.left.startswith("rank 0 of replica 0 is lost: simulated. Starting the replica again would work.")
