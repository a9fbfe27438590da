"""``python -m benchmarks.chaos.histories``: count the simulated runs that end in two histories, and in none.

The protocol's state machines run on the simulated network of their tests, under ``split="stop"``. A seed decides which
messages arrive when and what gets lost, so a run that ends badly can be repeated.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

from benchmarks.markdown import table
from diloco.membership import Policy
from diloco.protocol import Policies
from tests.membership.network import Limits, Network, explore, wander
from tests.protocol.simulated import check_agreement, rank, simulated
from tests.protocol.simulated_rank import Rank

__all__ = ["SCENARIOS", "bridge", "outcome", "random_churn", "random_trouble"]

_POLICIES = Policies(Policy(), continue_without_lost=True, raise_on_loss=False, streams=1, connect_timeout_s=1.0)


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


def random_trouble(replicas: int, seed: int, *, returns: bool = False) -> Network:
    """Let processes, machines and links fail and timers fire early, a few of each, at any moment.

    Args:
        replicas: the number of replicas.
        seed: decides everything.
        returns: whether replicas that have ended may be started again and join, and others leave.
    """
    chance = random.Random(seed)
    ends, machines, deaf = (chance.randrange(2) for _ in range(3))
    own = {"timers": chance.randrange(7), "breaks": chance.randrange(2)}
    own |= {"leaves": chance.randrange(2)} if returns else {}
    limits = Limits(ends, machines, chance.randrange(replicas), deaf=deaf, returns=3 * returns, own=own)
    network = simulated(replicas, limits)
    network.make = lambda number: Rank(network, number, replicas, 1, _POLICIES, joining=True)
    wander(network, (chance.randrange(1 << 16) for _ in range(chance.randrange(40 * replicas))))
    return network


def random_churn(replicas: int, seed: int) -> Network:
    """Random trouble in which replicas also leave, and are started again and join."""
    return random_trouble(replicas, seed, returns=True)


SCENARIOS: dict[str, Callable[[int, int], Network]] = {
    each.__name__: each for each in (bridge, random_trouble, random_churn)
}


def outcome(network: Network) -> str:
    """Let everything under way finish, also with time, and return how the run has ended."""
    for _ in range(6):
        explore(network, [], 3000)
        nodes = [rank(network, number) for number in sorted(network.alive)]
        waiting = [(node, settling) for node in nodes if (settling := _settling(node)) is not None and not node.left]
        if not waiting:
            break
        for node, number in waiting:
            node.suffer("timers", number)
    going_on = [node for node in nodes if not node.left and node.machine.views.is_member]
    if not going_on:
        return "none"
    try:
        check_agreement(going_on)
    except AssertionError as error:
        return str(error).partition("\n")[0] or "other"
    return "one"


def _settling(node: Rank) -> int | None:
    kinds = [timer.kind for _, timer in node.timers]
    return kinds.index("settle") if "settle" in kinds else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="runs of each scenario and number of replicas")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 3, 4, 5, 6, 7])
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=[*SCENARIOS])
    options = parser.parse_args()
    rows = []
    for scenario in options.scenarios:
        for replicas in options.replicas:
            ends: dict[str, list[int]] = {}
            for seed in range(options.first_seed, options.first_seed + options.runs):
                ends.setdefault(outcome(SCENARIOS[scenario](replicas, seed)), []).append(seed)
            bad = {end: seeds for end, seeds in ends.items() if end not in ("one", "none")}
            counts = [len(ends.get(end, [])) for end in ("one", "none")]
            rows.append([scenario, replicas, options.runs, *counts, sum(map(len, bad.values()))])
            for end, seeds in bad.items():
                print(f"{scenario}, {replicas} replicas, {end}: seeds {seeds[:10]}", flush=True)
    print(table(["scenario", "replicas", "runs", "one history", "nobody continues", "violations"], rows))


if __name__ == "__main__":
    main()
