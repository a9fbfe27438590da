"""Limits on what peers may take (the number of open connections, a rate), and pauses between attempts to reach them."""

from __future__ import annotations

import asyncio
import ipaddress
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
S = TypeVar("S")
R = TypeVar("R")


class ConnectionLimit(Generic[T]):
    """A limit on the number of connections, in total and for each origin (a peer or an address).

    A new connection is always let in. At a limit it replaces the oldest one of its own origin, or of the origin that
    has the most. A flood of idle connections from one origin therefore keeps nobody else out.

    >>> limit = ConnectionLimit[str](3, most_of_one=2)
    >>> [limit.enter(f"a{n}", ["peer a"]) for n in range(3)]  # peer a may have only two
    [None, None, 'a0']
    >>> limit.enter("b0", ["peer b"]), limit.enter("c0", ["peer c"])  # the oldest connection of peer a is evicted
    (None, 'a1')
    """

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._inside: dict[T, tuple[str, ...]] = {}

    def enter(self, connection: T, origins: Sequence[str]) -> T | None:
        """Let ``connection`` in, and return the one to close instead, if any."""
        self._inside[connection] = tuple(origins)
        counts = Counter(origin for theirs in self._inside.values() for origin in theirs)
        full = [origin for origin in origins if counts[origin] > self._most_of_one]
        if not full and len(self._inside) <= self._most:
            return None
        largest = max(counts.values())
        full = full or [origin for origin, count in counts.items() if count == largest]
        out = next(each for each, theirs in self._inside.items() if not {*theirs}.isdisjoint(full))
        self.leave(out)
        return out

    def is_full(self, origins: Sequence[str]) -> bool:
        """Return whether one more connection of these origins would replace one of their own."""
        counts = Counter(origin for theirs in self._inside.values() for origin in theirs)
        return any(counts[origin] >= self._most_of_one for origin in origins)

    def leave(self, connection: T) -> None:
        """Release the place of ``connection``, if it has one."""
        self._inside.pop(connection, None)


class ArrivalLimit:
    """A limit on how many connections each origin may open in a span: a handshake costs a millisecond of one thread.

    >>> limit = ArrivalLimit(most=2, span_s=16.0)
    >>> [limit.admits(["peer a"], now_s) for now_s in (0.0, 0.0, 0.0, 16.0)], limit.admits(["peer b"], 16.0)
    ([True, True, False, True], True)
    """

    def __init__(self, most: int, span_s: float) -> None:
        self._most, self._span_s = most, span_s
        self._began_s, self._counts = 0.0, Counter[str]()  # of the span of now

    def admits(self, origins: Sequence[str], now_s: float) -> bool:
        """Return whether a connection of these origins may go on."""
        if now_s - self._began_s >= self._span_s:
            self._began_s, self._counts = now_s, Counter()
        self._counts.update(origins)
        return all(self._counts[each] <= self._most for each in origins)


def origin_of(host: str) -> str:
    """Return the origin of a connection from an address: of IPv6 the network, as one machine has 2^64 addresses in it.

    >>> [origin_of(host) for host in ("10.0.0.7", "2001:db8::1:2:3", "::ffff:10.0.0.7", "fe80::1%eth0", "")]
    ['10.0.0.7', '2001:db8::/64', '10.0.0.7', 'fe80::/64', '']
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    return str(address.ipv4_mapped or ipaddress.ip_network((int(address), 64), strict=False))


async def few_at_once(ask: Callable[[S], Awaitable[R]], whom: Iterable[S]) -> list[R]:
    """Return what ``ask`` returns for each, in their order. No more than 64 calls run at a time.

    >>> async def half(number: int) -> int:
    ...     return 100 // number
    >>> asyncio.run(few_at_once(half, [50, 20]))
    [2, 5]
    """
    places = asyncio.Semaphore(64)

    async def one(item: S) -> R:
        async with places:
            return await ask(item)

    return await asyncio.gather(*map(one, whom))


def pauses(first_s: float, longest_s: float, seed: str) -> Iterator[float]:
    """Yield pauses in seconds that double up to a limit, each shortened by up to half so that peers do not act in step.

    They are a function of ``seed``; peers need different ones.

    >>> pauses_s = pauses(1.0, 4.0, seed="rank 0")
    >>> [0.5 * most_s <= next(pauses_s) <= most_s for most_s in (1.0, 2.0, 4.0, 4.0)]
    [True, True, True, True]
    """
    factors, most_s = random.Random(seed), first_s
    while True:
        yield most_s * factors.uniform(0.5, 1.0)
        most_s = min(2 * most_s, max(first_s, longest_s))
