"""Histories: networks of state machines with faults of all kinds, and what has become of them.

``python -m tests.protocol.histories SEEDS [FIRST]`` counts the outcomes; benchmarks/chaos has those of each version. It
names each seed that ends as none may, and then exits with 1.
"""

import collections
import contextlib
import random
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import permutations

from diloco.membership import NextView
from diloco.protocol import Accept, Adopted, Change, Propose, WireMessage
from tests.protocol.network import Limits, Network, wander
from tests.protocol.simulated import LATE_S, RULES, Rank, check_agreement, finish, simulated

TURN_S = 2 * RULES.silence_s  # the time of a ballot
MOST_TURNS = 3.0  # within so many, those that run have decided what they can once all links are whole


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
    "heals": (0, 1, 4),
    "timers": (0, 3, 8, 30),
}
"""Fewer of these, and ranks that are suspended, and links that flap."""


def trouble(
    replicas: int, seed: int, faults: Mapping[str, Sequence[int]] = FAULTS, joiners: int = 0, split: str = "stop"
) -> Network:
    """Let ranks and machines end and return, links break in one direction or both, timers run out and members leave.

    Where a side of a split network may go on (``split="go-on"``), the least number of members makes it one side only.
    """
    chance = random.Random(seed)
    limits = {fault: chance.choice(numbers) for fault, numbers in faults.items()}
    own = {fault: limits.pop(fault) for fault in ("timers", "leaves")}
    ready = bool(joiners) or chance.random() < 0.8
    rules = RULES if split == "stop" else replace(RULES, split=split, min_replicas=replicas // 2 + 1)
    network = simulated(replicas, Limits(**limits, own=own), rules, strangers=joiners, ready=ready)
    for number in range(replicas, replicas + joiners):
        network.end(number)
    wander(network, [chance.randrange(1 << 16) for _ in range(chance.randrange(5, 400 if joiners else 200))])
    return network


PHASES = (Change, Propose, Accept, Adopted)
"""What a proposer sends, in this order: its report, what it proposes, that it accepts this, that it has adopted it."""


def proposer_ends(replicas: int, seed: int) -> Network:
    """Let a proposer end as it sends what one of `PHASES` is, to none, some or all; others may be in trouble, too."""
    chance = random.Random(seed)
    phase: tuple[type[WireMessage], ...] = (chance.choice(PHASES),)
    sends, passed = chance.randrange(6), chance.randrange(4)
    faults = {"flaps": 1 + chance.randrange(3), "cuts": chance.randrange(3), "deaf": chance.randrange(2)}
    limits = Limits(**faults, returns=chance.randrange(3), own={"timers": chance.choice((3, 8, 30))})
    network, seen = simulated(replicas, limits), 0

    def send(node: Rank, message: WireMessage) -> Sequence[WireMessage]:
        nonlocal seen
        proposes = isinstance(message, Propose) or bool(node.sent_of(Propose))
        if isinstance(message, Change):
            proposes = node.view.order[message.report.ballot % len(node.view.order)] == node.rank
        if proposes and isinstance(message, phase):
            seen += 1
            if seen == passed + 1:
                network.end_soon(node.rank, sends)
        return (message,)

    for node in network.nodes.values():
        node.instead = lambda receiver, message, node=node: send(node, message)
    network.happen("flaps", *sorted(chance.sample(range(replicas), 2)), 0)
    wander(network, [chance.randrange(1 << 16) for _ in range(chance.randrange(20, 200))])
    phase = ()  # nobody else ends later
    return network


KINDS: dict[str, Callable[[int, int], Network]] = {
    "two groups": bridge,
    "any faults": trouble,
    "sleep, flaps and joins": partial(trouble, faults=MORE_FAULTS, joiners=2),
    "a proposer ends": proposer_ends,
    "any faults, and so many go on": partial(trouble, split="go-on"),
}


def may_differ(network: Network, value: NextView, others: Set[int]) -> bool:
    """Return whether those that stay by ``value`` may differ from ``others``, which have adopted another one.

    They may once all other members have ended, of which one may have gone on without them just before.
    """
    left_out = {*value.previous.members}.difference(value.staying)
    return network.alive.isdisjoint(left_out | others)


def outcome(network: Network) -> str:
    """Let everything under way finish, also with time, and return how the run has ended."""
    why = ""
    try:
        finish(network)
    except AssertionError as error:
        why = str(error)
    nodes = [node for node in network.nodes.values() if isinstance(node, Rank)]
    there = [node for node in nodes if node.rank in network.alive and not node.left]
    going_on = [node for node in there if node.machine.views.is_member and not node.waits]
    adopted = [(node.rank, following) for node in nodes for following in node.changes]
    for (_, one), (_, other) in permutations(adopted, 2):
        if one.previous == other.previous and one != other:
            here, there = ({rank for rank, following in adopted if following == each} for each in (one, other))
            if not (may_differ(network, one, there) or may_differ(network, other, here)):
                return "two values"
    if why:
        return why
    if len({each.view for each in going_on}) > 1:
        return "two histories"
    if any(len({each.outcomes.get(step) for each in going_on} - {None}) > 1 for step in range(1, Rank.STEPS + 1)):
        return "a round is applied by some"
    try:
        check_agreement(going_on)
    except AssertionError as error:
        return str(error).partition("\n")[0] or "other"
    if going_on:
        return "one"
    return "waits" if any(node.waits for node in there) else "none"


def reunited(network: Network) -> str:
    """Mend all links, start all again that have ended or stopped, and return what has become of the run then."""
    wait_turns(network)
    for _ in range(6):  # one that finds only others which join stops, and comes again
        nodes = {number: node for number, node in network.nodes.items() if isinstance(node, Rank)}
        absent = [number for number, node in nodes.items() if number not in network.alive or node.left]
        there = sorted(nodes.keys() - absent)
        if not there:
            return "none"  # nobody is left that was a member: a cold start
        for number in there:
            nodes[number].now_s += 4 * LATE_S  # who was lost by silence keeps others from joining for a while
            nodes[number].ask_again()
        for number in absent:
            network.return_whole(number)
        try:
            finish(network)
        except AssertionError as error:
            return str(error)
        members = [node for node in network.nodes.values() if isinstance(node, Rank) and not node.left]
        if not members:
            return "none"  # the last one has adopted a view without it, whose members have all ended
        if len({node.view for node in members}) == 1 and len(members) == len(members[0].view.members) == len(nodes):
            break
    views = {node.view for node in members}
    if len(views) > 1 or any(node.waits for node in members):
        return "apart for ever"
    return "one" if len(members) == len(views.pop().members) else "not all"


def wait_turns(network: Network) -> float:
    """Mend all links, wake all, and return after how many turns those that run have decided what they can."""
    network.heal_all()
    network.asleep.clear()
    there = [network.nodes[number] for number in network.alive]
    before_s = [node.now_s for node in there if isinstance(node, Rank)]
    with contextlib.suppress(AssertionError):  # which comes again
        finish(network)
    idle_s = TURN_S if any(node.waits for node in there if isinstance(node, Rank)) else 0.0
    after_s = [node.now_s for node in there if isinstance(node, Rank)]
    return max((after - before - idle_s for after, before in zip(after_s, before_s, strict=True)), default=0.0) / TURN_S


def main(seeds: int, first: int = 0) -> int:
    """Print how ``seeds`` runs of three to seven members end, and how once all links are whole and all are back.

    With it goes the longest time until those that run have decided what they can, in turns of a view change. Return 1
    if a run ends as none may.
    """
    faults = 0
    for name, kind in KINDS.items():
        for replicas in range(3, 8):
            outcomes, longest = collections.Counter[str](), 0.0
            for seed in range(first, first + seeds):
                network = kind(replicas, seed)
                how, turns, then = outcome(network), wait_turns(network), reunited(network)
                longest = max(longest, turns)
                outcomes[f"{how}, then {then}"] += 1
                if how not in ("one", "waits", "none") or then not in ("one", "none") or turns > MOST_TURNS:
                    faults += 1
                    print(f"{name}, {replicas} members, seed {seed}: {how}, then {then}; {turns:.2f} turns", flush=True)
            counts = "; ".join(f"{how}: {count}" for how, count in outcomes.most_common())
            print(f"{name}, {replicas} members: {counts}; longest {longest:.2f} turns", flush=True)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
