"""Messages to one other rank over any number of connections: each part of a message takes the next one that is free.

A connection that loss slows down holds up no more than the parts that it has; those of one that breaks are sent again
over the others, or over the next one. Every part carries a checksum and is acknowledged; the sender keeps a message
until all its parts are. This module knows messages, `PayloadConnection` the bytes.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from diloco.errors import TransportError
from diloco.transport.path import Pace
from diloco.transport.peers.inbox import Inbox, Receive
from diloco.transport.peers.payload_connection import MOST_PART_BYTES, Head, Part, PayloadConnection

__all__ = ["ReliableLink", "part_bytes"]

_LEAST_PART_BYTES = 12 << 10  # less than TCP sends at once after a pause
_MOST_PART_S = 0.02  # where the pace is known: what leaves at once queues up


def part_bytes(waiting_bytes: int, connections: int, bits_per_s: float = math.inf) -> int:
    """How much a connection that is free gets: the less is left, the smaller, so that all are done at about one time.

    Args:
        waiting_bytes: that no connection has taken yet.
        bits_per_s: at which payloads are to leave.

    >>> part_bytes(1 << 30, 4), part_bytes(3_200_000, 16), part_bytes(50_000, 16), part_bytes(1 << 30, 4, 1e7)
    (262144, 100000, 12288, 25000)
    >>> part_bytes(50_000, 1)  # there is no other one to be done with
    262144
    """
    share = waiting_bytes // (2 * connections) if connections > 1 else MOST_PART_BYTES
    most = min(MOST_PART_BYTES, share, bits_per_s / 8 * _MOST_PART_S)
    return max(_LEAST_PART_BYTES, int(most))


@dataclass(eq=False)
class _Outgoing:
    number: int
    tag: int
    data: memoryview
    sent: Future[None]
    cut: int = 0  # bytes that parts were made of
    missing: int = 0  # bytes that the other side has not acknowledged


class ReliableLink:
    """Payload messages to one other rank, both ways; those of one tag arrive in the order sent.

    All but `send`, `receive` and `close` runs in the loop's thread.

    Args:
        loop: whose thread does everything.
        pace: of all links of this rank together.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, pace: Pace, way: str = "TCP") -> None:
        self.connections: dict[int, PayloadConnection] = {}  # by number, those that stand
        self.waiting_bytes = 0  # that no connection has taken yet
        self.acknowledged_bytes = 0  # that the other side has, so far
        self.wanted = 0  # connections that the other side wants the link to have; 0: it did not say
        self.over = asyncio.Event()  # set once the link has ended
        self.settled = asyncio.Event()  # set once a connection has stood, or the link has ended
        self.uses = 0  # connections that have stood so far
        self.why = "the other side did not come"  # the latest reason for which one ended, or could not be made
        self._loop = loop
        self.words = way  # what carries it, for people
        self._pace = pace
        self._numbers = 0
        self._fresh: deque[_Outgoing] = deque()  # not cut to the end yet
        self._again: deque[Part] = deque()  # of connections that broke
        self._on_their_way: dict[int, _Outgoing] = {}
        self._tags: dict[int, deque[_Outgoing]] = {}  # tag on its way -> messages that wait for that
        self.inbox = Inbox()
        self._wakes = False  # whether `wake` is about to be called for what was handed over
        self._waking: asyncio.TimerHandle | None = None
        self._error: TransportError | None = None

    # For any thread.

    def send(self, values: Tensor, tag: int) -> Future[None]:
        """Start sending a contiguous CPU tensor, which must stay as it is until the other side has it.

        The future, as that of `receive`, gets a `TransportError` if the link ends before.

        Raises:
            TransportError: the loop is closed.
        """
        return self._in_loop(self._push, values, tag)

    def receive(self, values: Tensor, tag: int) -> Future[None]:
        """Start receiving into a contiguous CPU tensor what the other side sends with the same tag; else as `send`."""
        return self._in_loop(self._expect, values, tag)

    def close(self) -> None:
        """End the link; whoever waits gets an error at once."""
        try:
            self._loop.call_soon_threadsafe(self.end, "it was closed")
        except RuntimeError:  # the loop is closed, and all connections with it
            self.end("it was closed")

    # In the loop's thread.

    @property
    def ended(self) -> bool:
        """Whether nothing is sent or received any more."""
        return self._error is not None

    @property
    def active(self) -> bool:
        """Whether something was handed over that the other side does not have yet."""
        return bool(self._on_their_way)

    def end(self, why: str) -> None:
        """For good: an error for all that wait now or later. Only the first call counts."""
        if self._error is not None:
            return
        self.why = why
        self._error = error = TransportError(f"a payload connection ended: {why}")
        for message in (*self._on_their_way.values(), *(each for held in self._tags.values() for each in held)):
            message.sent.set_exception(error)
        self.inbox.close(error)
        for connection in list(self.connections.values()):
            connection.end()
        self.settled.set()
        self.over.set()

    def add(self, number: int, connection: PayloadConnection) -> None:
        """Use a connection, in the place of the one of that number."""
        if before := self.connections.get(number):
            before.end()
        self.connections[number] = connection
        self.uses += 1
        self.settled.set()
        self.wake()

    def drop(self, connection: PayloadConnection, unfinished: list[Part], why: str) -> None:
        """A connection has ended; what it had is sent again."""
        for number, each in list(self.connections.items()):
            if each is connection:
                del self.connections[number]
        if self._error is None:
            self.why = why
        again = [part for part in unfinished if not part.acknowledged]
        self.waiting_bytes += sum(len(part.data) for part in again)
        self._again.extend(again)
        self.wake()

    def wake(self) -> None:
        """Give every connection that is free something to do, one part to each in turn."""
        self._wakes = False
        free = list(self.connections.values())
        while free and (self._fresh or self._again):
            free = [each for each in free if each.write_next()]

    def take(self) -> Part | None:
        """The next part to send, for a connection that is free; where none may leave now, they are woken later."""
        now_s = self._loop.time()
        if not (self._fresh or self._again):
            return None
        if (wait_s := self._pace.wait_s(now_s)) > 0:
            if self._waking is None or self._waking.when() <= now_s:
                self._waking = self._loop.call_later(wait_s, self.wake)
            return None
        if self._again:
            part = self._again.popleft()
            self.waiting_bytes -= len(part.data)
            self._pace.spend(now_s, len(part.data))
            return part
        message = self._fresh[0]
        share = part_bytes(self.waiting_bytes, len(self.connections), self._pace.bits_per_s)
        size = min(share, len(message.data) - message.cut)
        head = Head(b"D", message.number, message.tag, len(message.data), message.cut, size)
        part = Part(head, message.data[message.cut : message.cut + size])
        message.cut += size
        self.waiting_bytes -= size
        self._pace.spend(now_s, size)
        if message.cut == len(message.data):
            self._fresh.popleft()
        return part

    def acknowledge(self, part: Part) -> None:
        """The other side has a part."""
        if part.acknowledged or self._error is not None:
            return
        part.acknowledged, message = True, self._on_their_way[part.head.number]
        message.missing -= part.head.size
        self.acknowledged_bytes += part.head.size
        if message.missing == 0:
            del self._on_their_way[message.number]
            message.sent.set_result(None)
            if held := self._tags[message.tag]:
                self._begin(held.popleft())
                self.wake()
            else:
                del self._tags[message.tag]

    def _in_loop(self, act: Callable[[int, memoryview, Future[None]], None], values: Tensor, tag: int) -> Future[None]:
        """Have ``act`` called in the loop's thread: now, where this is it."""
        data = values.detach().view(-1).numpy().data.cast("B") if values.numel() else memoryview(bytearray())
        done: Future[None] = Future()
        if asyncio._get_running_loop() is self._loop:
            act(tag, data, done)
            return done
        try:
            self._loop.call_soon_threadsafe(act, tag, data, done)
        except RuntimeError as error:  # the loop is closed
            raise TransportError("a payload connection ended: the transport was closed") from error
        return done

    def _push(self, tag: int, data: memoryview, sent: Future[None]) -> None:
        if self._error is not None:
            sent.set_exception(self._error)
            return
        message = _Outgoing(0, tag, data, sent, missing=len(data))
        if tag in self._tags:  # so that messages of one tag arrive in the order sent
            self._tags[tag].append(message)
            return
        self._tags[tag] = deque()
        self._begin(message)
        if not self._wakes:  # once all that is handed over now is here, as parts are the larger then
            self._wakes = True
            self._loop.call_soon(self.wake)

    def _begin(self, message: _Outgoing) -> None:
        self._numbers += 1
        message.number = self._numbers
        self._on_their_way[message.number] = message
        self._fresh.append(message)
        self.waiting_bytes += len(message.data)

    def _expect(self, tag: int, data: memoryview, come: Future[None]) -> None:
        if self._error is not None:
            come.set_exception(self._error)
            return
        self.inbox.expect(tag, Receive(data, come))
        for connection in list(self.connections.values()):
            connection.go_on_reading()
