"""An asynchronous network in plain data: a list of numbers decides what happens next, and what gets lost.

Ranks send each other messages over connections that keep their order, as TCP does. A rank may end at any moment, also
when a broadcast has reached only some receivers, and a connection may go silent. A prefix of the messages in transit
then still arrives. Both ends notice, each in its own time.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import permutations
from typing import Any

from hypothesis import strategies as st


@dataclass(frozen=True)
class Limits:
    """The faults that may happen, and how often at most."""

    ends: int = 0
    machines: int = 0  # ranks that end with their machine, so that others can't tell them from silent ones
    cuts: int = 0
    abrupt: bool = False  # whether a rank that hangs up loses what it had sent before
    returns: int = 0  # ranks that are restarted after they have ended; `Network.make` makes their nodes
    deaf: int = 0  # links between two ranks on which, in one direction, nothing arrives any more
    sleeps: int = 0  # ranks that are suspended, so that others may take them for silent ones; they wake by themselves
    flaps: int = 0  # links that break and work again at once
    heals: int = 0  # broken links over which ranks can connect again
    own: Mapping[str, int] = field(default_factory=dict)  # of a node, by the name that its ``may`` and ``suffer`` use


NUMBERS = st.lists(st.integers(0, 1 << 16), max_size=200)
"""The numbers for `explore`."""

LIMITS = st.builds(
    Limits, st.integers(0, 2), st.integers(0, 2), st.integers(0, 3), st.booleans(), deaf=st.integers(0, 3)
)


class Network:
    """The connections between ``ranks``, and a node for each, with the methods of `tests.protocol.simulated.Rank`."""

    make: Callable[[int], Any]  # returns the node of a restarted rank

    def __init__(self, ranks: Iterable[int], limits: Limits) -> None:
        self.nodes: dict[int, Any] = {}
        self.ranks = tuple(ranks)
        self.alive = set(self.ranks)  # the ranks that have not ended
        self.asleep: set[int] = set()  # those of them that are suspended
        self._abrupt, self._own = limits.abrupt, tuple(limits.own)
        self._left = {**asdict(limits), **limits.own}
        self.on_the_way: dict[tuple[int, int], deque[Any]] = {pair: deque() for pair in permutations(self.ranks, 2)}
        self._ends_up = set(self.on_the_way)
        self._connections = dict.fromkeys(self.on_the_way, 0)
        self._starts = dict.fromkeys(self.ranks, 0)  # how often a rank was started again
        self._cut: set[tuple[int, int]] = set()
        self._unheard: set[tuple[int, int]] = set()  # (a, b): nothing from b reaches a any more
        self._unreachable: set[int] = set()
        self._sends_left: dict[int, int] = {}
        self._number = 0

    def __getitem__(self, rank: int) -> Any:
        return self.nodes[rank]

    # For the nodes.

    def send(self, sender: int, receiver: int, message: Any) -> None:
        """Send a message; a rank that is to end in the middle of a broadcast ends here."""
        if sender not in self.alive:
            return
        if self._sends_left.get(sender) == 0:
            self.end(sender)
            return
        if sender in self._sends_left:
            self._sends_left[sender] -= 1
        if (sender, receiver) in self._ends_up and (receiver, sender) not in self._unheard:
            self.on_the_way[sender, receiver].append(message)

    def hang_up(self, rank: int, other: int) -> None:
        """End the connection of ``rank`` to ``other``, which notices in its own time."""
        if (rank, other) in self._ends_up:
            self._ends_up.remove((rank, other))
            self.on_the_way[other, rank].clear()

    def connection(self, rank: int, other: int) -> int | None:
        """Return the unique number of the connection of ``rank`` to ``other``, or None if there is none."""
        return self._connections[rank, other] if (rank, other) in self._ends_up else None

    def process(self, rank: int) -> str:
        """Return the name of the process of a rank."""
        return f"{rank}.{self._starts[rank]}"

    def dial(self, rank: int, other: int) -> bool:
        """Let ``rank`` connect to ``other`` again, if it can reach it. Return whether it has."""
        there = self.alive - self.asleep
        pair, back = (rank, other), (other, rank)
        if not {*pair} <= there or pair in self._ends_up or {pair, back} & (self._cut | self._unheard):
            return False
        if self.nodes[other].left:  # its transport is closed
            return False
        self._renew([pair, back])
        self._ends_up |= {pair, back}
        self.nodes[other].look()
        self.nodes[rank].look()
        return True

    # For the code that decides what happens next.

    def can(self, what: str, a: int, b: int) -> bool:
        """Return whether a message can be delivered, or the end of a connection can be noticed."""
        if what == "deliver":
            return bool(self.on_the_way[a, b]) and b in self.alive - self.asleep and (b, a) in self._ends_up
        if a not in self.alive - self.asleep or (a, b) not in self._ends_up:
            return False
        hung_up = (b, a) not in self._ends_up and (self._abrupt or not self.on_the_way[b, a])
        return b not in self.alive or b in self.asleep or hung_up or (a, b) in self._unheard

    def choices(self) -> list[tuple[str, int, int]]:
        """Return what can happen next without a fault."""
        some = [pair for pair, messages in self.on_the_way.items() if messages]
        found = [("deliver", a, b) for a, b in some if self.can("deliver", a, b)]
        found += [("notice", a, b) for a, b in self.on_the_way if self.can("notice", a, b)]
        return found + [("wakes", rank, 0) for rank in sorted(self.asleep)]

    def trouble(self) -> list[tuple[str, int, int]]:
        """Return the faults that can happen next."""
        alive, left = sorted(self.alive), self._left
        of_ranks: dict[str, Callable[[int], bool]] = {
            "ends": lambda rank: True,
            "machines": lambda rank: True,
            "sleeps": lambda rank: rank not in self.asleep,
        }
        of_links: dict[str, Callable[[int, int], bool]] = {
            "flaps": lambda a, b: a < b and (b, a) in self._ends_up,
            "cuts": lambda a, b: a < b and (a, b) not in self._cut,
            "deaf": lambda a, b: (a, b) not in self._unheard,
        }
        broken = sorted(self._cut | self._unheard)
        found = [(kind, rank, 0) for kind, may in of_ranks.items() if left[kind] for rank in alive if may(rank)]
        for kind, may_break in of_links.items():
            found += [(kind, *link) for link in sorted(self._ends_up) if may_break(*link)] if left[kind] else []
        found += [("heals", *link) for link in broken] if left["heals"] else []
        if left["returns"]:
            found += [("returns", rank, 0) for rank in sorted(self.nodes) if rank not in self.alive]
        own = [kind for kind in self._own if left[kind]]
        return found + [(kind, rank, 0) for kind in own for rank in alive if self[rank].may(kind)]

    def happen(self, what: str, a: int, b: int, number: int) -> None:
        """Let one of the choices happen; ``number`` decides open details."""
        if what in self._left:
            self._left[what] -= 1
        if what == "deliver":
            self[b].receive(a, self.on_the_way[a, b].popleft())
        elif what == "notice":
            self.hang_up(a, b)
            self.nodes[a].lose(b, gone=b not in self.alive and b not in self._unreachable)
        elif what == "wakes":
            self.asleep.discard(a)
        elif what == "sleeps":
            self.asleep.add(a)
        elif what == "flaps":
            self._flap(a, b)
        elif what == "heals":
            self.heal(a, b)
        elif what == "cuts":
            self._cut |= {(a, b), (b, a)}
            self._unheard |= {(a, b), (b, a)}
            self._lose_some(a, b, number)
            self._lose_some(b, a, number // 4)
        elif what == "deaf":
            self._unheard.add((a, b))
            self._lose_some(b, a, number)
        elif what == "returns":
            self._return(a)
        elif what in self._own:
            self.nodes[a].suffer(what, number)
        else:
            if what == "machines":
                self._unreachable.add(a)
            self.end_soon(a, number)

    def return_whole(self, rank: int) -> None:
        """Restart ``rank`` with intact links to all live ranks, and let no rank end any more."""
        self._return(rank)
        self._sends_left.clear()

    def end_soon(self, rank: int, number: int) -> None:
        """Let a rank end once it has sent so many more messages, modulo six."""
        self._sends_left[rank], self._number = number % 6, number // 6
        if number % 6 == 0:
            self.end(rank)

    def end(self, rank: int) -> None:
        self.alive.discard(rank)
        self.asleep.discard(rank)
        for a, b in self.on_the_way:
            if a == rank:
                self._lose_some(a, b, self._number)

    def heal(self, a: int, b: int) -> None:
        """Mend a link. What was sent over it meanwhile is lost, so that its connection ends."""
        for pair in ((a, b), (b, a)):
            self._cut.discard(pair)
            self._unheard.discard(pair)
        self._flap(a, b)

    def heal_all(self) -> None:
        """Mend all links, and let no further rank end."""
        self._sends_left.clear()
        for pair in sorted(self._cut | self._unheard):
            self.heal(*pair)

    def _flap(self, a: int, b: int) -> None:
        """End a connection, and what is on its way over it; the two learn of it one after the other."""
        for one, other in ((a, b), (b, a)):
            if one in self.alive and not (one in self._sends_left and self._sends_left[one] == 0):
                was_up = (one, other) in self._ends_up
                self.hang_up(one, other)
                if was_up:
                    self.nodes[one].lose(other, gone=False)
            else:
                self.hang_up(one, other)

    def _return(self, rank: int) -> None:
        """Start a new process in the place of the one that ended; its connections are new."""
        self.alive.add(rank)
        self._starts[rank] += 1
        self._sends_left.pop(rank, None)
        self._unreachable.discard(rank)
        self.asleep.discard(rank)
        pairs = [pair for pair in self.on_the_way if rank in pair]
        self._renew(pairs)
        self._ends_up.difference_update(pairs)
        self._ends_up.update(filter(self.alive.issuperset, pairs))
        self.nodes[rank] = self.make(rank)

    def _renew(self, pairs: Iterable[tuple[int, int]]) -> None:
        for pair in pairs:
            self.on_the_way[pair].clear()
            self._cut.discard(pair)
            self._unheard.discard(pair)
            self._connections[pair] += 1

    def _lose_some(self, sender: int, receiver: int, number: int) -> None:
        messages = self.on_the_way[sender, receiver]
        for _ in range(number % (len(messages) + 1)):
            messages.pop()


def explore(network: Network, numbers: Sequence[int] = (), most: int = 1000) -> None:
    """Let things happen as ``numbers`` say, and then let everything that is under way finish.

    Raises:
        AssertionError: it does not come to an end.
    """

    wander(network, numbers)
    for _ in range(most):
        if not any([_take(network, *choice, 0) for choice in _options(network)]):
            return
    raise AssertionError("it goes on and on")


def wander(network: Network, numbers: Iterable[int], *, trouble: bool = True) -> None:
    """Let things happen as ``numbers`` say; without ``trouble``, no further fault."""
    for number in numbers:
        possible = _options(network) + (network.trouble() if trouble else [])
        if possible:
            _take(network, *possible[number % len(possible)], number // len(possible))


def settle(network: Network) -> None:
    """Deliver everything that was sent, and let every lost connection be noticed."""
    while choices := network.choices():
        network.happen(*choices[0], 0)


def _options(network: Network) -> list[tuple[str, int, int]]:
    return [*network.choices(), *(("act", rank, 0) for rank in sorted(network.alive - network.asleep))]


def _take(network: Network, what: str, a: int, b: int, number: int) -> bool:
    if what == "act":
        return a in network.alive - network.asleep and network.nodes[a].act()
    if what in ("deliver", "notice") and not network.can(what, a, b):
        return False
    network.happen(what, a, b, number)
    return True
