"""Properties of views, rounds and votes on an adversarial network: one history, and all who can go on do."""

import cProfile
import pstats
import random
from dataclasses import replace
from itertools import permutations, product
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.scale.messages import counted
from diloco.membership import View, yields
from diloco.protocol import Beat, Header, Machine, RoundVote
from tests.protocol.histories import KINDS, MOST_TURNS, outcome, reunited, wait_turns
from tests.protocol.network import LIMITS, NUMBERS, Limits, Network, explore, wander
from tests.protocol.simulated import RULES, Rank, check_agreement, finish, simulate, simulated

pytestmark = pytest.mark.no_cover  # directed tests reach the same lines, and tracing takes longer than the networks


@settings(max_examples=60, deadline=None)
# one learns of a leaver from another one before the leaver's own message arrives
@example([1504, 0, 0, 0, 12939, 0], 3, 0, 1, 1, False, True)
@given(
    NUMBERS,
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(1, 2),
    st.booleans(),
    st.booleans(),
)
def test_who_ends_or_leaves_is_missed_by_nobody(
    numbers: list[int], replicas: int, ends: int, leaves: int, size: int, gradients: bool, ready: bool
) -> None:
    """Property: all others continue, even if only one is left, and commit every round; they know who left.

    Wherever they end, also in the middle of a broadcast, or before they or others have begun.
    """
    kind = {"gradients": gradients, "ready": ready} if ends else {}  # who leaves has begun
    limits = Limits(ends=ends, own={} if ends else {"leaves": leaves})
    ranks = simulate(limits, numbers, replicas=replicas, size=size, **kind)
    check_agreement(ranks, whole=True)
    staying = [rank for rank in ranks if not rank.left]
    members = tuple(sorted({rank.replica for rank in staying}))
    leavers = {rank.replica for rank in ranks if " left after step " in rank.left}
    if size == 1 or not ends:  # live ranks that end with their replica look like cut-off ones
        assert all(rank.view.members == members for rank in staying)
        assert {rank.replica for rank in ranks if rank.left} == leavers
    if not ends:
        assert len(ranks) == size * replicas
        assert len(staying) == size * (replicas - len(leavers))
        assert all({each for change in rank.changes for each in change.left} == leavers for rank in staying)
    for here, each in product(staying, ranks if not ends else ()):
        for step, average in each.averages.items():
            theirs = here.averages[step].contributors if step in here.averages else "void"
            assert theirs == average.contributors, "all have applied what a leaver has applied"


FAULTS = st.fixed_dictionaries(
    {}, optional={"timers": st.integers(1, 6), "breaks": st.integers(1, 2), "leaves": st.just(1)}
)
"""Timers that run out at any moment, exchanges that fail, and replicas that leave."""


@settings(max_examples=80, deadline=None)
# it stops amid a round of gradients, which raises, and another round
@example([1, 15904], 2, Limits(1, 1), {"timers": 1}, 0, 1, True, True, "stop")
# one is started again, and once more, before the replica that it admitted has begun
@example([0, 171, 2118, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 14294], 2, Limits(2), {}, 2, 1, False, True, "stop")
# one is started again beside a member that waits for one whose leaving it has not heard
@example(
    [123, 943, 0, 0, 23794], 3, Limits(0, 1, 1, False, deaf=1), {"timers": 1, "leaves": 1}, 1, 1, False, False, "stop"
)
@given(
    NUMBERS,
    st.integers(2, 5),
    LIMITS,
    FAULTS,
    st.integers(0, 2),
    st.integers(1, 2),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["stop", "go-on"]),
)
def test_no_trouble_makes_two_histories(
    numbers: list[int],
    replicas: int,
    limits: Limits,
    own: dict[str, int],
    returns: int,
    size: int,
    gradients: bool,
    ready: bool,
    split: str,
) -> None:
    """Property: also for a round that times out, and a replica that counts as late, also if it isn't.

    A round that a rank has voted against is void for all, also if others learn of the vote in a later view. Lost ranks
    alone take no round along. Who is started again becomes a member, or waits with those that it asked. Of two sides
    that go on by themselves, one does where more than half are asked for.
    """
    # no replica joins while gradients are averaged
    limits = replace(limits, returns=0 if gradients or size > 1 else returns, own=own)
    rules = replace(RULES, split=split, min_replicas=1 if split == "stop" else replicas // 2 + 1)
    ranks = simulate(limits, numbers, replicas=replicas, size=size, gradients=gradients, ready=ready, rules=rules)
    check_agreement(ranks, whole=not own and not limits.returns)


@settings(max_examples=30, deadline=None)
@given(NUMBERS, st.integers(2, 4), st.builds(Limits, *[st.integers(0, 2)] * 2))
def test_where_survivors_are_to_stop_all_of_them_do_and_in_the_same_state(
    numbers: list[int], replicas: int, limits: Limits
) -> None:
    """Property: what one of them has committed, all have."""
    ranks = simulate(limits, numbers, replicas=replicas, rules=replace(RULES, continue_without_lost=False))
    assert {bool(rank.left) for rank in ranks} <= {len(ranks) < replicas}
    for each in ranks:
        both = each.outcomes.keys() & ranks[0].outcomes.keys()
        assert {step: each.outcomes[step] for step in both} == {step: ranks[0].outcomes[step] for step in both}
        assert each.outcomes.keys() == set(range(1, each.step + 1)), "every round gets an outcome"


@pytest.mark.parametrize("seed", range(40))
def test_two_sides_that_refuse_each_other_go_on_each_as_one_and_one_of_them_yields(seed: int) -> None:
    """Each takes the other's processes for ended, one after the other, while messages are on their way."""
    chance = random.Random(seed)
    network = simulated(replicas := chance.randrange(2, 7))
    numbers = [chance.randrange(1 << 16) for _ in range(100)]
    wander(network, numbers[: chance.randrange(50)], trouble=False)
    one = {*chance.sample(range(replicas), chance.randrange(1, replicas))}
    broken = [(a, b) for a, b in permutations(range(replicas), 2) if (a in one) != (b in one)]
    for a, b in broken:
        network.hang_up(a, b)
    for a, b in chance.sample(broken, len(broken)):
        network[a].lose(b, gone=True)
        wander(network, numbers[50 : 50 + chance.randrange(3)], trouble=False)
    finish(network)
    sides = {frozenset(one), frozenset(range(replicas)) - one}
    assert {frozenset(network[number].view.members) for number in range(replicas)} == sides
    for number in range(replicas):
        assert not network[number].left
        views = network[number].machine.views
        assert views.presumed_gone == {*range(replicas)}.difference(views.view.members)
    assert sorted(yields(mine, *sides - {mine}) for mine in sides) == [False, True]


def test_a_replica_that_has_lost_one_of_its_own_ranks_stops_and_says_so() -> None:
    """Also if no other replica is left that could report it."""
    network = simulated(1, Limits(ends=1), size=2)
    network.happen("ends", 0, 0, 0)
    explore(network)
    words = "rank 0 of replica 0 is lost: simulated. Replica 0 takes part in no more rounds;"
    assert network[1].left.startswith(words)


@pytest.mark.parametrize(("kind", "replicas"), [*product(KINDS, (3, 5, 7))])
def test_whatever_happens_there_is_one_history_and_nobody_waits_for_ever(kind: str, replicas: int) -> None:
    """20,000 of these are run by ``python -m tests.protocol.histories 1000``."""
    for seed in range(4):
        network = KINDS[kind](replicas, seed)
        assert outcome(network) in ("one", "waits", "none")
        assert wait_turns(network) <= MOST_TURNS
        assert reunited(network) in ("one", "none")


@pytest.mark.parametrize(("replicas", "seed"), [(5, 179), (5, 332), (7, 18), (7, 128), (7, 167)])
def test_two_sides_with_one_common_member_make_one_history(replicas: int, seed: int) -> None:
    """The common member was ready for the view of one side, and then loses that side."""
    assert outcome(KINDS["two groups"](replicas, seed)) in ("one", "waits", "none")


@pytest.mark.parametrize(("kind", "replicas", "seed"), [("sleep, flaps and joins", 6, 40257), ("any faults", 7, 40271)])
def test_members_that_hear_few_of_the_others_do_not_raise_ballots_for_ever(kind: str, replicas: int, seed: int) -> None:
    """They form a chain, in which each proposer is lost by some, whose neighbours have lost it, too."""
    network = KINDS[kind](replicas, seed)
    assert outcome(network) in ("one", "waits")
    assert reunited(network) == "one"


SO_MANY_GO_ON = "any faults, and so many go on"


@pytest.mark.parametrize(
    ("kind", "replicas", "seed"),
    [
        ("any faults", 7, 300010),  # who adopts a view lets it be known to those that nobody else can tell
        ("sleep, flaps and joins", 3, 310029),  # a member parts from one that does not know its process yet
        (SO_MANY_GO_ON, 4, 310208),  # a newcomer makes up for a loss, but only one of the members hears it
        (SO_MANY_GO_ON, 4, 310049),  # too few are left, and those that come make up for the loss together
        ("any faults", 6, 500446),  # 40 ballots have made turns longer, but nobody dials later for that
    ],
)
def test_who_can_decide_does_and_all_others_come_to_rest(kind: str, replicas: int, seed: int) -> None:
    network = KINDS[kind](replicas, seed)
    assert outcome(network) in ("one", "waits")
    assert wait_turns(network) <= MOST_TURNS
    assert reunited(network) == "one"


# What a bad link costs, and that all live ranks reunite once the network is whole.


def who_stays(network: Network, numbers: list[int]) -> tuple[int, ...]:
    """Return the ranks that have not ended once nothing more happens; all are in one view of these."""
    wander(network, numbers)
    finish(network)
    staying = tuple(number for number in network.ranks if not network[number].left)
    assert {network[number].view.members for number in staying} == {staying}
    return staying


@settings(max_examples=40, deadline=None)
@given(NUMBERS, st.integers(3, 5), st.data())
def test_a_bad_pair_costs_one_of_the_two_and_who_does_not_hear_two_is_the_one_to_go(
    numbers: list[int], replicas: int, data: st.DataObject
) -> None:
    """Property: whether nothing gets through in one direction or in both, and whichever notices first.

    Who does not hear two declares both lost at one heartbeat, and goes with whatever number.
    """
    one, *others = data.draw(st.permutations(range(replicas)))[: data.draw(st.integers(2, min(3, replicas - 1)))]
    kind = data.draw(st.sampled_from(["cuts", "deaf"]))
    network = simulated(replicas, Limits(**{kind: len(others)}))
    for other in others:
        network.happen(kind, one, other, 0)
    for other in others if len(others) > 1 else ():
        network.hang_up(one, other)
    for other in others if len(others) > 1 else ():
        network[one].lose(other, gone=False)
    staying = who_stays(network, numbers)
    (goes,) = {*range(replicas)}.difference(staying)
    assert goes == one or [goes] == others
    check_agreement([network[number] for number in staying], whole=True)


@settings(max_examples=20, deadline=None)
@given(NUMBERS, st.integers(4, 5), st.data())
def test_of_a_bad_pair_the_one_goes_whose_link_comes_and_goes(
    numbers: list[int], replicas: int, data: st.DataObject
) -> None:
    """Property: though it has been a member for longer, and itself has received nothing for a while."""
    flapping, other = data.draw(st.permutations(range(replicas)))[:2]
    network = simulated(replicas, Limits(cuts=1))
    explore(network)
    for now_s in (1.0, 2.0, 3.0, 4.0, 4.5):
        for number, sender in product(range(replicas), repeat=2):
            network[number].now_s = now_s
            if number != sender and (flapping in (sender, number)) == (now_s == 4.5):
                network[number].hear(sender, Beat())
    for number in range(replicas):  # a rank that has received nothing from all the others blames none of them
        unsteady = network[number].machine.roster.unsteady(View.of(replicas), 4.5)
        assert unsteady == ({flapping} if number != flapping else set())
    network.happen("cuts", flapping, other, 0)
    assert who_stays(network, numbers) == tuple(number for number in range(replicas) if number != flapping)


@settings(max_examples=30, deadline=None)
# one is left of three, which has accepted a view with one of the others
@example([0, 0, 10257, 515, 0, 32392], 3, Limits(0, 2, 2), 0, "go-on")
@given(NUMBERS, st.integers(2, 7), LIMITS, st.integers(0, 3), st.sampled_from(["stop", "go-on"]))
def test_once_the_network_is_whole_all_are_in_one_view_again(
    numbers: list[int], replicas: int, limits: Limits, timers: int, split: str
) -> None:
    """Property: who waits in its view goes on with the others, and those that have ended or stopped join again."""
    rules = replace(RULES, split=split, min_replicas=1 if split == "stop" else replicas // 2 + 1)
    network = simulated(replicas, replace(limits, own={"timers": timers}), rules)
    wander(network, numbers)
    finish(network)
    assert reunited(network) in ("one", "none")


# Sixteen and more members: the number of messages that each sends, and how much it does.

FEW = [1, 18, 25, 900, 77, 431, 1207]
"""A beginning in which something goes wrong; afterwards the simulated ranks take turns."""


def test_every_round_is_committed_with_one_header_and_one_vote_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rank, "STEPS", 2)
    ranks = simulate(Limits(), FEW, replicas=(replicas := 24))  # there are 1104 messages in each step
    check_agreement(ranks, whole=True)
    assert len(ranks) == replicas
    for each in ranks:
        for kind in (Header, RoundVote):
            # `sent` has a message once for each receiver
            assert len(each.sent_of(kind)) == each.STEPS * (replicas - 1), kind
        assert len(each.sent) == 2 * each.STEPS * (replicas - 1), "no other message is needed"


def calls(phase: str, members: int) -> float:
    """Return the mean number of function calls in a member's machine during a view change or a round."""
    profile, handle = cProfile.Profile(), Machine.handle

    def profiled(*arguments: Any, **more: Any) -> Any:
        with profile:
            return handle(*arguments, **more)

    with mock.patch.object(Machine, "handle", profiled):
        counted(phase, members)
    profile.create_stats()
    return float(pstats.Stats(profile).total_calls) / members  # type: ignore[attr-defined]  # typeshed's stub


@pytest.mark.parametrize("phase", ["join", "kill", "round"])
def test_what_a_member_does_for_a_change_of_views_or_a_round_grows_as_their_number(phase: str) -> None:
    """Not as its square or cube, as it would if each report led to an evaluation of all others."""
    assert calls(phase, 16) < 2.5 * calls(phase, 8)
