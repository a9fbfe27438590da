"""``python -m benchmarks.scale.messages``: count the messages between members when views begin, last and end.

The protocol's state machines run on the simulated network of their tests. All messages in transit arrive in one trip,
and the replies travel in the next one, so the counts are the same in every run.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from benchmarks.markdown import table
from diloco.membership import View
from diloco.protocol import Effects, Event, Left, Machine, Rules
from tests.protocol.network import Limits, Network
from tests.protocol.simulated import Rank

_RULES = Rules(continue_without_lost=True, raise_on_loss=False)
_MOST_TRIPS = 10_000


class Counted(Network):
    """Members of a view, and ranks that join it; one trip delivers all messages in transit.

    Args:
        members: the number of members of the view.
        outside: the number of further ranks, which have not started.

    Attributes:
        messages, num_bytes: the messages and bytes sent so far by all ranks.
        trips: the number of trips so far.
        cpu_s: the CPU seconds of all state machines in a phase, without encoding.
    """

    def __init__(self, members: int, outside: int = 0) -> None:
        super().__init__(range(members + outside), Limits(ends=1, machines=1))
        self.messages = self.num_bytes = self.trips = 0
        self.cpu_s = 0.0
        for number in range(members, members + outside):
            self.end(number)
        for number in range(members):
            view = View(0, tuple(range(members)))
            self.nodes[number] = Rank(self, number, len(self.ranks), 1, _RULES, founded=view)
        self.make = lambda number: Rank(self, number, len(self.ranks), 1, _RULES, joining=True)

    def send(self, sender: int, receiver: int, message: bytes) -> None:
        self.messages += 1
        self.num_bytes += len(message)
        super().send(sender, receiver, message)

    def rank(self, number: int) -> Rank:
        """Return a rank's node."""
        node = self.nodes[number]
        assert isinstance(node, Rank)
        return node

    def settle(self) -> None:
        """Make trips until no message is left.

        Raises:
            AssertionError: if messages are still sent after `_MOST_TRIPS`.
        """
        for _ in range(_MOST_TRIPS):
            while any([self.nodes[number].act() for number in sorted(self.alive)]):
                pass
            arriving = {pair: len(waiting) for pair, waiting in self.on_the_way.items() if self.can("deliver", *pair)}
            noticed = [choice for choice in self.choices() if choice[0] == "notice"]
            if not arriving and not noticed:
                return
            self.trips += 1
            for pair, number in arriving.items():
                for _ in range(number):
                    if self.can("deliver", *pair):
                        self.happen("deliver", *pair, 0)
            for choice in noticed:
                if self.can(*choice):
                    self.happen(*choice, 0)
        raise AssertionError(f"Messages are still sent after {_MOST_TRIPS} trips.")

    def join(self, number: int) -> None:
        """Let one more rank join."""
        self.return_whole(number)
        self.settle()
        self.check(number + 1)

    def check(self, members: int) -> None:
        """Assert that all living ranks are in one view of ``members``."""
        (view,) = {self.rank(number).view for number in self.alive}
        assert view.members == tuple(sorted(self.alive))
        assert len(view.members) == members


def _start(network: Counted) -> None:
    for number in network.ranks[1:]:
        network.join(number)


def _start_at_once(network: Counted) -> None:
    for number in network.ranks[1:]:
        network.return_whole(number)
    network.settle()
    network.check(len(network.ranks))


def _join(network: Counted) -> None:
    network.join(network.ranks[-1])


def _round(network: Counted) -> None:
    for number in network.alive:
        network.rank(number).STEPS = 1
    network.settle()
    assert all(network.rank(number).outcomes == {1: True} for number in network.alive)


def _leave(network: Counted) -> None:
    network.rank(1).handle(Left())
    network.alive.discard(1)
    _check_without_one(network)


def _kill(network: Counted) -> None:
    network.happen("ends", 1, 0, 0)
    _check_without_one(network)


def _lose_machine(network: Counted) -> None:
    network.happen("machines", 1, 0, 0)
    _check_without_one(network)


def _check_without_one(network: Counted) -> None:
    network.settle()
    network.check(len(network.ranks) - 1)


PHASES: dict[str, tuple[bool, Callable[[Counted], None]]] = {
    "start, one after the other": (True, _start),
    "start, all at once": (True, _start_at_once),
    "round": (False, _round),
    "join": (False, _join),
    "leave": (False, _leave),
    "kill": (False, _kill),
    "machine lost": (False, _lose_machine),
}
"""By name: whether only one rank is a member at first, and what happens."""


@contextmanager
def _no_training() -> Iterator[None]:
    steps, Rank.STEPS = Rank.STEPS, 0
    try:
        yield
    finally:
        Rank.STEPS = steps


@contextmanager
def _timed(network: Counted) -> Iterator[None]:
    handle = Machine.handle

    def timed(machine: Machine, now_s: float, event: Event) -> Effects:
        begun_s = time.process_time()
        wanted = handle(machine, now_s, event)
        network.cpu_s += time.process_time() - begun_s
        return wanted

    with mock.patch.object(Machine, "handle", timed):
        yield


def counted(phase: str, members: int) -> Counted:
    """Return the network after a phase; it has ``members`` before it, or after it if ranks join."""
    alone, happens = PHASES[phase]
    outside = members - 1 if alone else int(happens is _join)
    with _no_training():
        network = Counted(members - outside, outside)
        network.settle()
        network.messages = network.num_bytes = network.trips = 0
        with _timed(network):
            happens(network)
    return network


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.messages", description=__doc__)
    parser.add_argument("--members", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--phases", nargs="+", default=list(PHASES), choices=PHASES)
    given = parser.parse_args()
    rows = []
    for phase in given.phases:
        cells = []
        for members in given.members:
            begun_s = time.perf_counter()
            network = counted(phase, members)
            cells.append(
                f"{network.messages / members:,.0f} ({network.trips}, {network.num_bytes / members / 1e3:,.0f}; "
                f"{1e3 * network.cpu_s / members:,.0f} ms)"
            )
            print(phase, members, cells[-1], f"{time.perf_counter() - begun_s:.1f} s", flush=True)
        rows.append([phase, *cells])
    print(table(["", *(f"M = {members}" for members in given.members)], rows))


if __name__ == "__main__":
    main()
