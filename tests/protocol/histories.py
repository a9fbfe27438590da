"""Histories: networks of state machines with faults of all kinds, and what has become of them.

``python -m tests.protocol.histories SEEDS [FIRST]`` counts the outcomes; benchmarks/chaos has those of each version.
"""

import collections
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from diloco.membership import NextView, View
from tests.protocol.network import Limits, Network, wander
from tests.protocol.simulated import Rank, check_agreement, finish, simulated


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


FAULTS: dict[str, Sequence[int]] = {
    "ends": range(3),
    "machines": range(3),
    "cuts": (0, 2, 4, 9),
    "abrupt": range(2),
    "returns": range(3),
    "deaf": (0, 0, 2, 5),
    "timers": (0, 3, 8),
    "leaves": range(2),
}
"""How many there may be of each fault: one of these numbers."""

MORE_FAULTS = FAULTS | {
    "ends": range(2),
    "machines": range(2),
    "cuts": (0, 0, 1, 2),
    "returns": range(4),
    "deaf": (0, 0, 1, 2),
    "sleeps": range(4),
    "flaps": (0, 0, 1, 3),
    "timers": (0, 3, 8, 30),
}
"""Fewer of these, and ranks that are suspended, and links that flap."""


def trouble(replicas: int, seed: int, faults: Mapping[str, Sequence[int]] = FAULTS, joiners: int = 0) -> Network:
    """Let ranks and machines end and return, links break in one direction or both, timers run out and members leave."""
    chance = random.Random(seed)
    limits = {fault: chance.choice(numbers) for fault, numbers in faults.items()}
    own = {fault: limits.pop(fault) for fault in ("timers", "leaves")}
    ready = bool(joiners) or chance.random() < 0.8
    network = simulated(replicas, Limits(**limits, own=own), strangers=joiners, ready=ready)
    for number in range(replicas, replicas + joiners):
        network.end(number)
    wander(network, [chance.randrange(1 << 16) for _ in range(chance.randrange(5, 400 if joiners else 200))])
    return network


KINDS: dict[str, Callable[[int, int], Network]] = {
    "two groups": bridge,
    "any faults": trouble,
    "sleep, flaps and joins": partial(trouble, faults=MORE_FAULTS, joiners=2),
}


def outcome(network: Network) -> str:
    """Let everything under way finish, also with time, and return how the run has ended."""
    try:
        finish(network)
    except AssertionError as error:
        return str(error)
    nodes = [node for node in network.nodes.values() if isinstance(node, Rank)]
    going_on = [node for node in nodes if node.rank in network.alive and not node.left and node.machine.views.is_member]
    adopted: dict[View, NextView] = {}
    if any(adopted.setdefault(each.previous, each) != each for node in nodes for each in node.changes):
        return "two values"
    if len({each.view for each in going_on}) > 1:
        return "two histories"
    if any(len({each.outcomes.get(step) for each in going_on} - {None}) > 1 for step in range(1, Rank.STEPS + 1)):
        return "a round is applied by some"
    try:
        check_agreement(going_on)
    except AssertionError as error:
        return str(error).partition("\n")[0] or "other"
    return "one" if going_on else "none"


def main(seeds: int, first: int = 0) -> None:
    """Print how many of ``seeds`` runs of three to seven members end with one history, with none, or wrongly."""
    for name, kind in KINDS.items():
        for replicas in range(3, 8):
            outcomes = collections.Counter(outcome(kind(replicas, seed)) for seed in range(first, first + seeds))
            counts = ", ".join(f"{how} {count}" for how, count in outcomes.most_common())
            print(f"{name}, {replicas} members: {counts}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
