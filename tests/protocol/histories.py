"""Histories: networks of state machines with faults of all kinds, and what has become of them.

``python -m tests.protocol.histories SEEDS [FIRST]`` counts the outcomes; benchmarks/chaos has those of each version.
"""

from __future__ import annotations

import collections
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import msgspec

from diloco.membership import Accepted, NextView, View
from diloco.protocol import Accept, Adopted, Change, Propose
from tests.membership.network import Limits, Network, wander
from tests.protocol.simulated import check_agreement, finish, rank, simulated
from tests.protocol.simulated_rank import Rank


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


def more_trouble(replicas: int, seed: int) -> Network:
    """The same with ranks that are suspended, links that flap, and replicas that join; few of each."""
    chance = random.Random(seed)
    limits = Limits(
        ends=chance.randrange(2),
        machines=chance.randrange(2),
        cuts=chance.choice([0, 0, 1, 2]),
        abrupt=chance.random() < 0.5,
        returns=chance.randrange(4),
        deaf=chance.choice([0, 0, 1, 2]),
        sleeps=chance.randrange(4),
        flaps=chance.choice([0, 0, 1, 3]),
        own={"timers": chance.choice([0, 3, 8, 30]), "leaves": chance.randrange(2)},
    )
    network = simulated(replicas, limits, strangers=2)
    for number in (replicas, replicas + 1):
        network.end(number)
    wander(network, [chance.randrange(1 << 16) for _ in range(chance.randrange(5, 400))])
    return network


def with_liar(replicas: int, seed: int) -> Network:
    """Let one member lie in a view change; nothing else happens meanwhile but slow messages."""
    chance = random.Random(seed)
    network = simulated(replicas)
    liar = rank(network, chance.randrange(replicas))
    network.liar = liar.rank
    liar.lie = lies_of(liar, chance)
    numbers = [chance.randrange(1 << 16) for _ in range(chance.randrange(5, 200))]
    wander(network, numbers[:50], trouble=False)
    if not liar.left:
        liar.machine.views.end("a lie")
        liar.act()
    wander(network, numbers)
    return network


def lies_of(liar: Rank, chance: random.Random) -> Callable[[int, Any], Iterable[Any]]:
    """Return what the liar sends instead of its messages about a view change: something else to each of the others."""

    def some(members: Iterable[int]) -> frozenset[int]:
        return frozenset(each for each in members if chance.random() < 0.4)

    def made_up(view: View) -> NextView:
        members = tuple(each for each in view.members if each == liar.replica or chance.random() < 0.6)
        return NextView(view.followed_by(members), view, 1, {}, "a lie")

    def lie(receiver: int, message: Any) -> Iterable[Any]:
        if chance.random() < 0.5 or liar.view.id > 0:  # each lie can end an honest member, too
            return [message]
        if isinstance(message, Change):
            view, report = liar.view, message.report
            field = chance.choice(
                ["apart", "gone", "left", "behind", "void", "voted", "commits", "joining", "accepted", "ballot"]
            )
            rounds = [(1, 0), (2, 0), (0, 1)]
            value: Any = some(view.members)
            if field == "void":
                value = frozenset(rounds)
            elif field in ("voted", "commits"):
                value = dict.fromkeys(rounds, "a lie")
            elif field == "joining":
                value = frozenset({9})
            elif field == "accepted":
                value = Accepted(chance.randrange(4), made_up(view), again=chance.random() < 0.5)
            elif field == "ballot":
                value = report.ballot + chance.randrange(3)
            return [Change(replace(report, **{field: value}), message.why)]
        if isinstance(message, Propose):
            following = made_up(message.following.previous)
            return [
                msgspec.structs.replace(
                    message, following=following, reports=message.reports if chance.random() < 0.7 else {}
                )
            ]
        if isinstance(message, Accept):
            return [msgspec.structs.replace(message, digest="a lie")] if chance.random() < 0.5 else []
        return [Adopted(made_up(message.following.previous))] if isinstance(message, Adopted) else [message]

    return lie


KINDS = {"two groups": bridge, "any faults": trouble, "sleep, flaps and joins": more_trouble, "a liar": with_liar}


def outcome(network: Network) -> str:
    """Let everything under way finish, also with time, and return how the run has ended."""
    try:
        finish(network)
    except AssertionError as error:
        return str(error)
    nodes = [node for node in network.nodes.values() if isinstance(node, Rank) and node.rank != network.liar]
    going_on = [node for node in nodes if node.rank in network.alive and not node.left and node.machine.views.is_member]
    adopted: dict[View, NextView] = {}
    if any(adopted.setdefault(each.previous, each) != each for node in nodes for each in node.changes):
        return "two values"
    if len({each.view for each in going_on}) > 1:
        return "two histories"
    if any(len({each.outcomes.get(step) for each in going_on} - {None}) > 1 for step in range(1, Rank.STEPS + 1)):
        return "a round is applied by some"
    if network.liar is None:  # which may keep rounds from being decided
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
