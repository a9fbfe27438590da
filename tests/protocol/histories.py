"""Histories: networks of state machines that are cut in two groups with one common member, or suffer any faults.

``python -m tests.protocol.histories SEEDS`` counts the outcomes; benchmarks/chaos has those of each version.
"""

from __future__ import annotations

import collections
import random
import sys

from tests.membership.network import Limits, Network, wander
from tests.protocol.simulated import check_agreement, finish, rank, simulated


def bridge(replicas: int, seed: int) -> Network:
    """Cut all links between two groups that share one member, and later those between this member and the first group.

    Each group may continue with that member, which can thus take part in two agreements. The larger group stays whole.
    """
    chance, middle = random.Random(seed), (replicas - 1) // 2
    network = simulated(replicas, Limits(cuts=replicas * replicas))
    for one in range(middle):
        for other in range(middle + 1, replicas):
            network.happen("cuts", one, other, 0)
    wander(network, (chance.randrange(1 << 16) for _ in range(chance.randrange(10, 80 * replicas))), trouble=False)
    for one in range(middle):
        network.happen("cuts", one, middle, chance.randrange(1 << 16))
    return network


def trouble(replicas: int, seed: int) -> Network:
    """Let ranks and machines end and return, links break in one direction or both, timers run out and members leave."""
    chance = random.Random(seed)
    limits = Limits(
        ends=chance.randrange(3),
        machines=chance.randrange(3),
        cuts=chance.choice([0, 2, 4, 9]),
        abrupt=chance.random() < 0.5,
        returns=chance.randrange(3),
        deaf=chance.choice([0, 0, 2, 5]),
        own={"timers": chance.choice([0, 3, 8]), "leaves": chance.randrange(2)},
    )
    network = simulated(replicas, limits, ready=chance.random() < 0.8)
    wander(network, [chance.randrange(1 << 16) for _ in range(chance.randrange(5, 200))])
    return network


def outcome(network: Network) -> str:
    """Let everything under way finish, also with time, and return how the run has ended."""
    finish(network)
    nodes = [rank(network, number) for number in sorted(network.alive)]
    going_on = [node for node in nodes if not node.left and node.machine.views.is_member]
    if not going_on:
        return "none"
    try:
        check_agreement(going_on)
    except AssertionError as error:
        return str(error).partition("\n")[0] or "other"
    return "one"


def main(seeds: int) -> None:
    """Print how many of ``seeds`` runs of three to seven members end with one history, with none, or wrongly."""
    for name, network in ("two groups", bridge), ("any faults", trouble):
        for replicas in range(3, 8):
            outcomes = collections.Counter(outcome(network(replicas, seed)) for seed in range(seeds))
            counts = ", ".join(f"{how} {count}" for how, count in outcomes.most_common())
            print(f"{name}, {replicas} members: {counts}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
