"""How often a peer that can't be reached is dialled again."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diloco.errors import TransportError
from diloco.transport import Backoff, ConnectionManager, LinkManager, LinkRequest, OpenedLink, Route, Stream

PATIENCE_S = 16.0
CONNECTIONS = 64


class Jumping(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer instead of waiting for it."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        loop = cast(Any, self)
        if not loop._ready and loop._scheduled:
            self.now_s = max(self.now_s, loop._scheduled[0]._when)
        super()._run_once()  # type: ignore[misc]  # private


def dials(
    seconds: float, open_connection: Callable[[int, float], Coroutine[Any, Any, Stream]], count: int = CONNECTIONS
) -> list[float]:
    """Return when the ``count`` connections of a link are dialled; ``open_connection`` gets attempt and time."""
    loop, times = Jumping(), list[float]()

    class Counting(LinkManager):
        async def open_connection(self, opened: OpenedLink) -> Stream:
            times.append(loop.time())
            return await open_connection(len(times), loop.time())

    async def run() -> None:
        connections = SimpleNamespace(loop=loop, services={}, rank=0, begin=loop.create_task, entries={})
        manager = Counting(cast(ConnectionManager, connections), PATIENCE_S)
        request = LinkRequest("0/0-1", 1, first=True, streams=count, chosen=True, timeout_s=seconds)
        with suppress(TransportError):
            await manager._open(request, Route("TCP"))

    try:
        loop.run_until_complete(run())
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    finally:
        loop.close()
    return times


async def refuse(number: int, now_s: float) -> Stream:
    raise ConnectionRefusedError("nothing listens there")


def test_a_peer_that_refuses_is_dialled_less_and_less_often() -> None:
    """Before, all connections were dialled once a second."""
    times = dials(120.0, refuse)
    per_second = [sum(second <= each < second + 1 for each in times) for second in range(120)]
    assert per_second[0] >= CONNECTIONS  # at first everything is tried at once
    assert max(per_second[10:]) < CONNECTIONS // 2
    assert sum(per_second[60:]) <= 60 * 4
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert max(gaps) <= PATIENCE_S / 4  # so that the link is made again well within its patience


def test_the_times_are_the_same_in_each_run() -> None:
    assert dials(60.0, refuse) == dials(60.0, refuse)


def test_a_connection_that_was_open_for_a_while_is_dialled_again_at_once() -> None:
    async def refuse_then_hold(attempt: int, now_s: float) -> Stream:
        await asyncio.sleep(50.0 if attempt == 8 else 0.0)
        raise ConnectionResetError("it ended")

    times = dials(100.0, refuse_then_hold, count=1)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert gaps[6] >= PATIENCE_S / 8
    assert 50.0 < gaps[7] <= 50.2


@pytest.mark.parametrize(("first_s", "longest_s"), [(0.2, 4.0), (1.0, 30.0), (1.0, 0.1)])
def test_pauses_grow_to_a_limit_and_differ_between_peers(first_s: float, longest_s: float) -> None:
    backoffs = [Backoff(first_s, longest_s, seed=f"rank {rank}") for rank in range(20)]
    first = [each.next_s() for each in backoffs]
    assert len(set(first)) == 20
    assert all(first_s / 2 <= each <= first_s for each in first)
    later = [backoffs[0].next_s() for _ in range(20)]
    assert all(max(first_s, longest_s) / 2 <= each <= max(first_s, longest_s) for each in later[10:])
    backoffs[0].reset()
    assert backoffs[0].next_s() <= first_s
