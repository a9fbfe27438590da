"""What a bad link costs, and that all live ranks reunite once the network is whole; on simulated networks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.membership import BootstrapElection, LastViews, Policy, View
from diloco.protocol import Beat
from tests.membership.network import LIMITS, NUMBERS, Limits, Network, explore, wander
from tests.protocol.simulated import check_agreement, finish, rank, rules_of, simulated
from tests.protocol.simulated_rank import LATE_S, Rank

pytestmark = pytest.mark.no_cover  # directed tests reach the same lines, and tracing takes longer than the networks


def members(network: Network) -> list[tuple[int, ...]]:
    """Return the members of each view that a running rank is in."""
    return [rank(network, number).view.members for number in sorted(network.alive) if not rank(network, number).left]


@settings(max_examples=30, deadline=None)
@given(NUMBERS, st.integers(3, 5), st.data())
def test_a_bad_pair_costs_one_of_the_two(numbers: list[int], replicas: int, data: st.DataObject) -> None:
    """Property: whether nothing gets through in one direction or in both, and whichever notices first."""
    one, other = data.draw(st.permutations(range(replicas)))[:2]
    kind = data.draw(st.sampled_from(["cuts", "deaf"]))
    network = simulated(replicas, Limits(cuts=1) if kind == "cuts" else Limits(deaf=1))
    network.happen(kind, one, other, 0)
    wander(network, numbers)
    finish(network)
    stays = [number for number in range(replicas) if not rank(network, number).left]
    assert len(stays) == replicas - 1
    assert {one, other} - set(stays)
    assert members(network) == [tuple(stays)] * len(stays)


@settings(max_examples=30, deadline=None)
@given(NUMBERS, st.integers(4, 5), st.data())
def test_of_a_bad_pair_the_one_goes_whose_link_comes_and_goes(
    numbers: list[int], replicas: int, data: st.DataObject
) -> None:
    """Property: though it has been a member for longer, and itself has received nothing for a while."""
    flapping, other = data.draw(st.permutations(range(replicas)))[:2]
    network = simulated(replicas, Limits(cuts=1))
    explore(network, [])
    for now_s in (2.0, 4.0, 4.5):
        for hearing in map(lambda number: rank(network, number), range(replicas)):
            hearing.now_s = now_s
            for sender in set(range(replicas)) - {hearing.machine.rules.rank}:
                if (flapping in (sender, hearing.machine.rules.rank)) == (now_s == 4.5):
                    hearing.hear(sender, Beat())
    for number in range(replicas):  # a rank that has received nothing from all the others blames none of them
        found = rank(network, number).machine.roster.unsteady(View.of(replicas), 4.5)
        assert found == ({flapping} if number != flapping else set())
    network.happen("cuts", flapping, other, 0)
    wander(network, numbers)
    finish(network)
    assert rank(network, flapping).left
    stays = tuple(number for number in range(replicas) if number != flapping)
    assert members(network) == [stays] * len(stays)


@settings(max_examples=30, deadline=None)
@given(NUMBERS, st.integers(4, 5), st.data())
def test_one_that_does_not_hear_two_others_is_the_one_to_go(
    numbers: list[int], replicas: int, data: st.DataObject
) -> None:
    """Property: with whatever number, if the others hear each other. It declares both lost at one heartbeat."""
    deaf, *others = data.draw(st.permutations(range(replicas)))[:3]
    network = simulated(replicas, Limits(deaf=2))
    for number in others:
        network.happen("deaf", deaf, number, 0)
        network.hang_up(deaf, number)
    for number in others:
        rank(network, deaf).lose(number, gone=False)
    wander(network, numbers)
    finish(network)
    stays = tuple(number for number in range(replicas) if number != deaf)
    assert members(network) == [stays] * len(stays)
    check_agreement([rank(network, number) for number in stays], whole=True)


@settings(max_examples=50, deadline=None)
@given(NUMBERS, st.integers(2, 7), LIMITS, st.integers(0, 3), st.sampled_from(["stop", "go-on"]))
def test_once_the_network_is_whole_all_who_live_are_in_one_view_again(
    numbers: list[int], replicas: int, limits: Limits, timers: int, split: str
) -> None:
    """Property: ranks that lost the others join those that continue, or one founds another view, in as many turns.

    Under ``split="stop"``, a rank that has ended for good may be needed. Then none continues, as that rank might.
    """
    least = replicas // 2 + 1 if split == "go-on" else 1
    quorum = Policy(least, split)  # type: ignore[arg-type]  # one of the two
    network = simulated(replicas, replace(limits, own={"timers": timers}), quorum=quorum)
    wander(network, numbers)
    finish(network)
    candidates = {number for number in network.alive if rank(network, number).left}
    views = {number: rank(network, number).machine.views for number in candidates}
    last = {
        number: None if each.last_view is None else LastViews(each.last_view, each.agreed_view)
        for number, each in views.items()
    }
    network.alive -= candidates  # their transports are closed
    finish(network)
    steps = {number: rank(network, number).step for number in candidates}
    rules = rules_of(quorum)

    def rejoin(number: int, founded: View | None) -> None:
        network.make = lambda each: Rank(
            network, each, replicas, 1, rules, joining=founded is None, founded=founded, step=steps[each]
        )
        for each in network.alive:  # who was lost by silence keeps others from joining for a while
            rank(network, each).now_s += 4 * LATE_S
        network.return_whole(number)
        finish(network)

    for _ in range(len(candidates)):
        going_on = [number for number in network.alive if not rank(network, number).left]
        waiting = sorted(candidates - network.alive)
        if going_on:
            rejoin(waiting[0], None)
            continue
        elections = [
            BootstrapElection(
                number=each, held_step=steps[each], views=last[each], alone=False, window_s=1.0, policy=quorum
            )
            for each in waiting
        ]
        for _ in range(2):  # all vote, and see the votes
            founded = {
                each.number: each.founds([other.me for other in elections if other is not each], 2.0)
                for each in elections
            }
        founders = [number for number, view in founded.items() if view is not None]
        if not founders:  # the ended ranks may be continuing, as far as is known
            assert len(candidates) < replicas
            return
        (founder,) = founders
        rejoin(founder, founded[founder])
    there = sorted(network.alive)
    assert set(there) >= candidates
    views = {rank(network, number).view for number in there}
    assert len(views) <= 1
    assert all(view.members == tuple(there) for view in views)
