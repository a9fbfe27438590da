"""Networks of simulated ranks, and what must hold for the ranks that continue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from diloco.membership import Policy
from diloco.protocol import Effects, Rules, WireMessage
from tests.membership.network import Limits, Network, explore, wander
from tests.protocol.simulated_rank import LATE_S, TIMEOUT_S, Rank, weight_of

MOST_TICKS = 3 * 12 * 10  # of three view changes that take as long as they may


class Stranger:
    """A connected rank that is no member; the test sends its messages."""

    act = receive = lose = may = suffer = lambda *arguments, **more: False  # it does nothing


def instead(kind: type[WireMessage], to: Sequence[int] = range(99), **fields: Any) -> Callable[[int, Any], list[Any]]:
    """Return a `Rank.lie`: change these fields in each message of a type to the ranks ``to``."""
    return lambda receiver, message: [
        msgspec.structs.replace(message, **fields) if isinstance(message, kind) and receiver in to else message
    ]


def rules_of(policy: Policy | None = None, *, survive: bool = True) -> Rules:
    """Return the rules of a run; each rank puts in its own number."""
    policy = policy or Policy()
    return Rules(
        round_timeout_s=TIMEOUT_S,
        late_s=LATE_S,
        silence_s=LATE_S,
        min_replicas=policy.min_replicas,
        split=policy.split,
        continue_without_lost=survive,
        raise_on_loss=False,
    )


def simulated(
    replicas: int,
    limits: Limits | None = None,
    *,
    size: int = 1,
    strangers: int = 0,
    quorum: Policy | None = None,
    survive: bool = True,
    ready: bool = True,
    **kind: Any,
) -> Network:
    """Return a network of replicas that have done nothing yet; ``ready``: all begin before anything happens."""
    network, rules = Network(range(replicas * size + strangers), limits or Limits()), rules_of(quorum, survive=survive)
    network.make = lambda rank: Rank(network, rank, replicas, size, rules, joining=True, **kind)
    for rank in network.ranks:
        member = rank < replicas * size
        network.nodes[rank] = Rank(network, rank, replicas, size, rules, ready=ready, **kind) if member else Stranger()
    return network


def simulate(limits: Limits, numbers: Sequence[int], *, replicas: int, **kind: Any) -> list[Rank]:
    """Return the ranks that have not ended once nothing more happens."""
    network = simulated(replicas, limits, **kind)
    wander(network, numbers)
    finish(network)
    return [node for rank, node in network.nodes.items() if rank in network.alive and isinstance(node, Rank)]


def finish(network: Network) -> None:
    """Let everything that is under way finish, also view changes that take time.

    Raises:
        AssertionError: It does not come to an end.
    """
    for _ in range(MOST_TICKS):
        explore(network, [], 3000)
        nodes = [network.nodes[number] for number in sorted(network.alive)]
        changing = [node for node in nodes if isinstance(node, Rank) and not node.left and node.is_changing]
        if not changing:
            return
        for node in changing:
            node.settle()
    raise AssertionError("a view change takes longer than it may")


def assert_nothing(effects: Effects) -> None:
    assert vars(effects) == vars(Effects())


def check_agreement(ranks: Sequence[Rank], *, whole: bool = False) -> None:
    """Check what must hold whatever happened; ``whole``: nothing made a round void.

    Invariant 2: each round is committed by all that continue, from the same contributions, or void for all.
    """
    going_on = [rank for rank in ranks if not rank.left]
    assert len({rank.view for rank in going_on}) <= 1, "two histories"
    for rank in ranks:
        assert not rank.exchanging, "a thread waits for ever"
    planned: dict[object, object] = {}
    for rank in ranks:
        for what, shards in rank.shards.items():
            assert planned.setdefault(what, shards) == shards, "plans differ"
    adopted: dict[int, object] = {}
    for rank in going_on:
        for each in rank.changes:
            facts = (each.view, each.from_step, each.commits, each.joined)
            assert adopted.setdefault(each.previous.id, facts) == facts, "two histories"
        assert rank.step == rank.STEPS, "it never became a member"
        assert sorted(rank.outcomes) == list(range(rank.first_step, rank.STEPS + 1)), "a round was never decided"
        for step, committed in rank.outcomes.items():
            assert committed == going_on[0].outcomes.get(step, committed), "a round is applied by all or by none"
            assert committed or not whole, f"step {step}: {rank.errors[step]}"
        for step, average in rank.averages.items():
            others = going_on[0].averages.get(step, average)
            contributors = average.contributors
            assert (average.view, contributors) == (others.view, others.contributors)
            assert rank.weights[step] == sum(weight_of(replica, step) for replica in contributors)
            assert not whole or contributors == average.view.members


def rank(network: Network, number: int) -> Rank:
    node = network.nodes[number]
    assert isinstance(node, Rank)
    return node


def begin(network: Network, *numbers: int, deliver: bool = True) -> None:
    """Let these ranks send their first contribution, and deliver it; none exchanges payloads or votes yet."""
    for number in numbers:
        while rank(network, number).step == 0 or rank(network, number).has_to_do:
            assert rank(network, number).act()
    if deliver:
        settle(network)


def settle(network: Network) -> None:
    """Deliver everything that was sent, and let every lost connection be noticed."""
    while choices := network.choices():
        network.happen(*choices[0], 0)
