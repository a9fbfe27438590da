"""Links that share one scheduler: each gets its share, and all together keep the pacing rate. On simulated time."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.transport import UTILIZATION, WINDOW, Part, PathSample, PayloadConnection, ReliableLink, SendScheduler

BITS_PER_S = 1e8


class Loop:
    """The part of an event loop that links use."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._calls: list[tuple[float, int, Callable[..., object], tuple[object, ...]]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, call: Callable[..., object], *arguments: object) -> None:
        heapq.heappush(self._calls, (self.now_s + max(delay_s, 1e-6), next(self._numbers), call, arguments))

    def call_soon(self, call: Callable[..., object], *arguments: object) -> None:
        self.call_later(0.0, call, *arguments)

    def run(self, until_s: float) -> None:
        while self._calls and self._calls[0][0] <= until_s:
            self.now_s, _, call, arguments = heapq.heappop(self._calls)
            call(*arguments)
        self.now_s = until_s


class Connection:
    """Writes one part, and is busy until the part has left at the connection's own rate."""

    def __init__(self, loop: Loop, link: ReliableLink, bits_per_s: float) -> None:
        self.link, self.sent_bytes = link, 0
        self._loop, self._bits_per_s, self._full = loop, bits_per_s, False

    def write_next(self) -> bool:
        if self._full or (part := self.link.take()) is None:
            return False
        self._full = True
        self.sent_bytes += len(part.data)
        self._loop.call_later(8 * len(part.data) / self._bits_per_s, self._has_left, part)
        return True

    def end(self) -> None:
        self._full = True

    def _has_left(self, part: Part) -> None:
        if not self.link.ended:
            self._full = False
            self.link.acknowledge(part)
            self.link.wake()


class Sender:
    """A host that knows the bandwidth ``BITS_PER_S`` of its uplink, and its links."""

    def __init__(self, *connections_bits_per_s: float) -> None:
        self.loop = Loop()
        scheduler = SendScheduler(cast("asyncio.AbstractEventLoop", self.loop))
        for n in range(WINDOW):
            scheduler.pace.observe(
                0.2 * (n - WINDOW), PathSample(0.2, int(BITS_PER_S * 0.2 / 8), round_trip_s=0.2, least_round_trip_s=0.1)
            )
        self.links = [ReliableLink(scheduler) for _ in connections_bits_per_s]
        self.connections = [
            Connection(self.loop, link, bits_per_s)
            for link, bits_per_s in zip(self.links, connections_bits_per_s, strict=True)
        ]
        for link, connection in zip(self.links, self.connections, strict=True):
            link.add(0, cast(PayloadConnection, connection))

    def send(self, number: int, num_bytes: int) -> Future[None]:
        sent = Future[None]()
        self.links[number].send(0, memoryview(bytes(num_bytes)), sent)
        return sent


@pytest.mark.parametrize("number", [1, 2, 3, 7])
def test_all_links_are_served_alike_and_together_keep_the_pace(number: int) -> None:
    sender = Sender(*[1e9] * number)
    works = [sender.send(n, 3_000_000) for n in range(number)]
    least_s = 8 * number * 3_000_000 / (UTILIZATION * BITS_PER_S)
    for share in range(1, 10):
        sender.loop.run(share / 10 * 0.75 * least_s)
        sent = [connection.sent_bytes for connection in sender.connections]
        assert max(sent) - min(sent) <= 200_000, "one or two parts, and the burst after a pause"
    sender.loop.run(0.95 * least_s)
    assert not any(work.done() for work in works)
    sender.loop.run(1.35 * least_s + 0.1)  # the path counts as full to the end, so three quarters of it are used
    assert all(work.done() for work in works)


def test_a_link_that_carries_little_does_not_hold_up_the_others() -> None:
    sender = Sender(1e9, 1e6, 1e9)
    for n in range(3):
        sender.send(n, 3_000_000)
    sender.loop.run(0.6)
    fast, slow, other = [connection.sent_bytes for connection in sender.connections]
    assert slow < 200_000
    assert fast + other == pytest.approx(0.75 * BITS_PER_S * 0.6 / 8, rel=0.1)


def test_who_has_most_to_send_is_next() -> None:
    sender = Sender(1e9, 1e9)
    long, short = sender.send(0, 4_000_000), sender.send(1, 2_000_000)
    sender.loop.run(0.2)
    assert sender.connections[1].sent_bytes <= 300_000
    sender.loop.run(0.6)
    assert sender.links[0].waiting_bytes == pytest.approx(sender.links[1].waiting_bytes, abs=200_000)
    sender.loop.run(1.0)
    assert long.done() is short.done() is True


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 500_000), st.floats(0.0, 0.1)), max_size=20), st.data())
def test_whatever_is_handed_over_and_when_all_of_it_leaves(messages: list[tuple[int, int, float]], data: Any) -> None:
    sender = Sender(1e9, 2e7, 1e8)
    works = []
    for number, num_bytes, pause_s in messages:
        works.append(sender.send(number, num_bytes))
        sender.loop.run(sender.loop.now_s + pause_s)
    if messages and data.draw(st.booleans()):
        sender.links[messages[0][0]].end("it was closed")
    sender.loop.run(sender.loop.now_s + 20.0)
    assert all(work.done() for work in works)
