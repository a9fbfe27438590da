"""An order to eject a member passes through a view, whose members go on without it."""

import random

import pytest

from diloco.protocol import Ejected, Message, Store, decode
from tests.protocol.network import Limits, Network, wander
from tests.protocol.simulated import Rank, check_agreement, finish, simulated

ORDER, WHY = Store("order", b""), "the founder has ejected it"


def tell(node: Rank, ejected: int, by: int | None = None) -> None:
    """Do what `SwarmDirectory` does with an order: pass it on, if it is new, and tell the machine."""
    if not any(message == ORDER for message in node.sent):
        for member in node.view.members:
            if member != node.rank:
                node.send(member, ORDER)
    node.handle(Ejected(frozenset({ejected}), by, WHY))


def with_order(size: int, ejected: int, silent: int | None, limits: Limits) -> Network:
    """Return a network whose members follow an order once they get it, but for the ejected one and a silent one."""
    network = simulated(size, limits)
    for node in [network[number] for number in range(size) if number not in (ejected, silent)]:

        def receive(sender: int, data: bytes, node: Rank = node) -> None:
            tell(node, ejected, sender) if decode(data, Message) == ORDER else Rank.receive(node, sender, data)

        node.receive = receive  # type: ignore[method-assign]  # of one node
    return network


@pytest.mark.parametrize("seed", range(12))
def test_whoever_is_ejected_goes_and_nobody_else(seed: int) -> None:
    """Property: also while rounds are in flight, if it proposes itself, and if a member passes no order on.

    Where the network splits meanwhile, one side at most goes on, also with the ejected one where no order has come.
    """
    numbers = random.Random(seed)
    size, splits = numbers.choice((3, 4, 5, 7)), seed % 3 == 0
    ejected, silent, *others = numbers.sample(range(size), size)
    network = with_order(size, ejected, silent if size > 3 and seed % 2 else None, Limits(cuts=4 if splits else 0))
    wander(network, [numbers.randrange(1 << 16) for _ in range(numbers.randrange(200))], trouble=False)
    for knows in others[: 1 + seed % 2]:
        tell(network[knows], ejected)
    wander(network, [numbers.randrange(1 << 16) for _ in range(numbers.randrange(200))])
    finish(network)
    staying = [network[each] for each in range(size) if each != ejected]
    if splits:
        check_agreement([each for each in [*staying, network[ejected]] if each.rank != silent])
        return
    assert all(not node.left for node in staying if node.rank != silent), [node.left for node in staying]
    check_agreement(staying)
    assert staying[0].view.members == tuple(node.rank for node in staying)
    assert network[ejected].left, "it hears too few to go on"


def test_who_ends_because_it_is_ejected_is_lost_for_that_reason() -> None:
    network = with_order(3, 2, None, Limits())
    tell(network[0], 2)
    network.end(2)
    network.happen("notice", 0, 2, 0)
    finish(network)
    assert [network[number].machine.rounds.reason.partition(";")[0] for number in (0, 1)] == [WHY] * 2


def test_who_repeats_the_order_does_not_delay_its_end() -> None:
    """One that keeps the order to itself has another one repeat it; the silence counts from the first."""
    node = with_order(5, 4, None, Limits())[0]
    timers = [node.machine.handle(0.0, Ejected(frozenset({4}), by, WHY)).timers for by in (1, 1, None)]
    assert [len(each) for each in timers] == [1, 0, 0]


def test_another_process_may_join_with_the_number_of_the_ejected_one() -> None:
    network = with_order(4, 3, None, Limits(returns=1))
    tell(network[0], 3)
    finish(network)
    network.end(3)
    network.happen("returns", 3, 0, 0)
    finish(network)
    assert [network[number].view.members for number in range(4)] == [(0, 1, 2, 3)] * 4
