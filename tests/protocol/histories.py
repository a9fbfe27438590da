"""Histories: networks of state machines with faults of all kinds, and what has become of them.

``python -m tests.protocol.histories SEEDS [FIRST]`` counts the outcomes; benchmarks/chaos has those of each version.
"""

import collections
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from diloco.membership import Accepted, NextView, Report, View
from diloco.protocol import Accept, Adopted, Change, Propose, RoundVote, WireMessage
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


# Liars.

Lie = Callable[[int, Any], Iterable[Any]]
"""(receiver, message) -> the messages that a liar sends instead."""


def instead(kind: type[WireMessage], to: Sequence[int] = range(99), **fields: Any) -> Lie:
    """Return a `Rank.lie`: change these fields in each message of a type to the ranks ``to``."""
    return lambda receiver, message: [
        msgspec.structs.replace(message, **fields) if isinstance(message, kind) and receiver in to else message
    ]


def report(liar: int, **facts: Any) -> Change:
    """Return a report that begins a view change."""
    return Change(Report(liar, facts.pop("view_id", 0), **{"number": 1, **facts}), "a lie")


def without(kind: type[WireMessage], to: Sequence[int] = range(99)) -> Lie:
    """Send no messages of a type to the ranks ``to``."""
    return lambda receiver, message: [] if isinstance(message, kind) and receiver in to else [message]


def with_liar(replicas: int, seed: int) -> Network:
    """Let one member lie in votes and a view change; nothing else happens meanwhile but slow messages."""
    chance = random.Random(seed)
    network = simulated(replicas)
    liar = network[chance.randrange(replicas)]
    network.liar = liar.rank
    liar.lie = lies_of(liar, chance)
    numbers = [chance.randrange(1 << 16) for _ in range(chance.randrange(5, 200))]
    wander(network, numbers[:50], trouble=False)
    if not liar.left:
        liar.machine.views.end("a lie")
        liar.act()
    wander(network, numbers)
    return network


def lies_of(liar: Rank, chance: random.Random) -> Lie:
    """Return what the liar sends instead of its votes, and messages about a view change: to each something else."""

    def some(members: Iterable[int]) -> frozenset[int]:
        return frozenset(each for each in members if chance.random() < 0.4)

    def made_up(view: View) -> NextView:
        members = tuple(each for each in view.members if each == liar.replica or chance.random() < 0.6)
        return NextView(view.followed_by(members), view, 1, {})

    def lie(receiver: int, message: Any) -> Iterable[Any]:
        if chance.random() < 0.5 or liar.view.id > 0:  # each lie can end an honest member, too
            return [message]
        if isinstance(message, Change):
            view, mine = liar.view, message.report
            rounds = [(1, 0), (2, 0), (0, 1)]
            values: dict[str, Any] = {name: some(view.members) for name in ("apart", "gone", "left", "behind")}
            values |= {name: dict.fromkeys(rounds, "a lie") for name in ("voted", "commits")}
            values |= {"void": frozenset(rounds), "joining": frozenset({9})}
            values["ballot"] = mine.ballot + chance.randrange(3)
            values["accepted"] = Accepted(chance.randrange(4), made_up(view), again=chance.random() < 0.5)
            field = chance.choice(list(values))
            return [Change(replace(mine, **{field: values[field]}), message.why)]
        if isinstance(message, Propose):
            following = made_up(message.following.previous)
            reports = message.reports if chance.random() < 0.7 else {}
            return [msgspec.structs.replace(message, following=following, reports=reports)]
        if isinstance(message, RoundVote):
            return [msgspec.structs.replace(message, digest=chance.choice(["", "another"]))]
        if isinstance(message, Accept):
            return [msgspec.structs.replace(message, digest="a lie")] if chance.random() < 0.5 else []
        return [Adopted(made_up(message.following.previous))] if isinstance(message, Adopted) else [message]

    return lie


KINDS: dict[str, Callable[[int, int], Network]] = {
    "two groups": bridge,
    "any faults": trouble,
    "sleep, flaps and joins": partial(trouble, faults=MORE_FAULTS, joiners=2),
    "a liar": with_liar,
}


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


def check_honest(honest: Sequence[Rank]) -> None:
    """Check that no honest rank has ended, that all are in one view, and that they agree on every round."""
    assert {each.left for each in honest} == {""}
    (view,) = {each.view for each in honest}
    assert {each.replica for each in honest} <= {*view.members}
    for each in honest:
        assert each.step == each.STEPS
        for step, committed in each.outcomes.items():
            assert committed == honest[0].outcomes.get(step, committed), "a round is applied by some"
        for step, average in each.averages.items():
            assert average.contributors == honest[0].averages.get(step, average).contributors


def main(seeds: int, first: int = 0) -> None:
    """Print how many of ``seeds`` runs of three to seven members end with one history, with none, or wrongly."""
    for name, kind in KINDS.items():
        for replicas in range(3, 8):
            outcomes = collections.Counter(outcome(kind(replicas, seed)) for seed in range(first, first + seeds))
            counts = ", ".join(f"{how} {count}" for how, count in outcomes.most_common())
            print(f"{name}, {replicas} members: {counts}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
