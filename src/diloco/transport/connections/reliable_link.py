"""Messages from and to one other rank over any number of connections: each part of one takes the next that is free.

A connection that loss slows down holds up no more than the parts that it has; those of one that breaks are sent again
over the others, or over the next one. Every part carries a checksum and is acknowledged; the sender keeps a message
until all its parts are. Memory for what nobody waits for yet is limited. This module knows messages,
`PayloadConnection` the bytes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from diloco.errors import TransportError
from diloco.transport.connections.outlet import Outlet
from diloco.transport.connections.payload_connection import Head, Outgoing, Part, PayloadConnection, part_bytes
from diloco.transport.shaping import Pacer

__all__ = ["ReliableLink"]

_MOST_EARLY_BYTES = 64 << 20
_EARLY_OVERHEAD_BYTES = 256  # of a message that nobody waits for yet, beside its own
_NOTHING = memoryview(b"")


@dataclass(eq=False)
class _Incoming:
    """A message that somebody waits for, or of which parts have come, or both."""

    tag: int
    come: Future[None] | None = None  # None: nobody waits for it yet
    room: memoryview = _NOTHING  # of who waits for it
    data: memoryview = _NOTHING  # where its parts go: there, or to memory of its own
    missing: int = 0  # bytes of them
    starts: set[int] = field(default_factory=set)  # of parts that have come


class ReliableLink:
    """Payload messages to one other rank, both ways; those of one tag arrive in the order sent.

    All but `close` runs in the loop's thread.

    Args:
        outlet: of all links of this rank together.
        pacer: says when an emulated link of this rank lets a message go; None: it is not emulated.
    """

    def __init__(self, outlet: Outlet, way: str = "TCP", pacer: Pacer | None = None) -> None:
        self.connections: dict[int, PayloadConnection] = {}  # by number, those that stand
        self.waiting_bytes = 0  # that no connection has taken yet
        self.acknowledged_bytes = 0  # that the other side has, so far
        self.wanted = 0  # connections that the other side wants the link to have; 0: it did not say
        self.over = asyncio.Event()  # set once the link has ended
        self.settled = asyncio.Event()  # set once a connection has stood, or the link has ended
        self.uses = 0  # connections that have stood so far
        self.why = "the other side did not come"  # the latest reason for which one ended, or could not be made
        self._loop = outlet.loop
        self.words = way  # what carries it, for people
        self._outlet = outlet
        self._pacer = pacer
        self._numbers = 0
        self._fresh: deque[Outgoing] = deque()  # not cut to the end yet
        self._again: deque[Part] = deque()  # of connections that broke
        self._on_their_way: set[Outgoing] = set()
        self._tags: dict[int, deque[Outgoing]] = {}  # tag on its way -> messages that wait for that, or for their time
        self._incoming: dict[int, _Incoming] = {}  # by number, those of which parts have come, and not all
        self._halves: dict[int, deque[_Incoming]] = {}  # by tag, those that one of the two ends has not begun
        self._early_bytes = 0
        self._received_through = 0
        self._received: set[int] = set()  # numbers after that one
        self._wakes = False  # whether `wake` is about to be called for what was handed over
        self._error: TransportError | None = None

    def close(self) -> None:
        """End the link, from any thread; whoever waits gets an error at once."""
        try:
            self._loop.call_soon_threadsafe(self.end, "it was closed")
        except RuntimeError:  # the loop is closed, and all connections with it
            self.end("it was closed")

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
        for message in (*self._on_their_way, *(each for held in self._tags.values() for each in held)):
            message.sent.set_exception(error)
        for half in (*self._incoming.values(), *(each for halves in self._halves.values() for each in halves)):
            if half.come is not None:
                half.come.set_exception(error)
        self._incoming.clear()
        self._halves.clear()
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

    # What goes out.

    def send(self, tag: int, data: memoryview, sent: Future[None]) -> None:
        """Send ``data``, which must stay as it is until ``sent`` is done: then the other side has it.

        If the link ends before, ``sent`` gets a `TransportError`.
        """
        if self._error is not None:
            sent.set_exception(self._error)
            return
        due_s = self._pacer.arrival_s(self._loop.time(), len(data)) if self._pacer else 0.0
        message = Outgoing(tag, data, sent, due_s, missing=len(data))
        if tag in self._tags:  # so that messages of one tag arrive in the order sent
            self._tags[tag].append(message)
            return
        self._tags[tag] = deque([message])
        self._begin_next(tag)

    def _begin_next(self, tag: int) -> None:
        """With the next message of a tag, of which none is on its way."""
        if self._error is not None:
            return
        if not (held := self._tags[tag]):
            del self._tags[tag]
            return
        if held[0].due_s > self._loop.time():
            self._loop.call_at(held[0].due_s, self._begin_next, tag)
            return
        message = held.popleft()
        self._numbers += 1
        message.number = self._numbers
        self._on_their_way.add(message)
        self._fresh.append(message)
        self.waiting_bytes += len(message.data)
        if not self._wakes:  # once all that is handed over now is here, as parts are the larger then
            self._wakes = True
            self._loop.call_soon(self.wake)

    def wake(self) -> None:
        """Give every connection that is free something to do, one part to each in turn."""
        self._wakes = False
        free = list(self.connections.values())
        while free and (self._fresh or self._again):
            free = [each for each in free if each.write_next()]

    def take(self) -> Part | None:
        """The next part to send, for a connection that is free; where none may leave now, they are woken later."""
        pace = self._outlet.pace
        if not (self._fresh or self._again) or not self._outlet.may_send(self):
            return None
        if self._again:
            part = self._again.popleft()
        else:
            message = self._fresh[0]
            size = part_bytes(self.waiting_bytes, len(self.connections), pace.bits_per_s)
            part = Part(message, message.cut, message.data[message.cut : message.cut + size])
            message.cut += len(part.data)
            if message.cut == len(message.data):
                self._fresh.popleft()
        self.waiting_bytes -= len(part.data)
        pace.spend(self._loop.time(), len(part.data))
        return part

    def acknowledge(self, part: Part) -> None:
        """The other side has a part."""
        if part.acknowledged or self._error is not None:
            return
        part.acknowledged, message = True, part.message
        message.missing -= len(part.data)
        self.acknowledged_bytes += len(part.data)
        if message.missing == 0:
            self._on_their_way.remove(message)
            message.sent.set_result(None)
            self._begin_next(message.tag)

    # What comes in.

    def receive(self, tag: int, room: memoryview, come: Future[None]) -> None:
        """Fill ``room`` with the next message of ``tag``, now or when it comes; ``come`` is as ``sent`` of `send`."""
        if self._error is not None:
            come.set_exception(self._error)
            return
        halves = self._halves.setdefault(tag, deque())
        if halves and halves[0].come is None:
            message = halves.popleft()
            message.room, message.come = room, come
            if message.missing == 0:
                self._hand_over(message, come)
        else:
            halves.append(_Incoming(tag, come, room))
        if not halves:
            del self._halves[tag]
        for connection in [each for each in self.connections.values() if each.waits]:
            connection.go_on_reading()

    def has_room(self, head: Head) -> bool:
        """Whether a part may come now, or has to wait until messages were taken; of the first, room is made for all.

        Raises:
            TransportError: if no such part can come.
        """
        message = self._incoming.get(head.number)
        if message is None:
            if head.number <= self._received_through or head.number in self._received:  # it has come
                return True
            halves = self._halves.get(head.tag, deque())
            waited_for = bool(halves) and halves[0].come is not None
            if waited_for and len(halves[0].room) == head.total:
                data = halves[0].room
            else:
                size = head.total + _EARLY_OVERHEAD_BYTES
                if self._early_bytes and self._early_bytes + size > _MOST_EARLY_BYTES:
                    return False
                self._early_bytes += size
                data = memoryview(bytearray(head.total))
            if not waited_for:
                self._halves.setdefault(head.tag, halves).append(message := _Incoming(head.tag))
            else:
                message = halves.popleft()
                if not halves:
                    del self._halves[head.tag]
            message.data, message.missing = data, head.total
            self._incoming[head.number] = message
        if (message.tag, len(message.data)) != (head.tag, head.total):
            raise TransportError(f"message {head.number} of {len(message.data)} bytes went on as one of {head.total}")
        return True

    def arrived(self, head: Head, data: memoryview) -> None:
        """A part has come whole; it may have come before, over a connection that broke."""
        message = self._incoming.get(head.number)
        if message is None or head.start in message.starts:
            return
        message.data[head.start : head.start + head.size] = data
        message.starts.add(head.start)
        message.missing -= head.size
        if message.missing > 0:
            return
        del self._incoming[head.number]
        self._received.add(head.number)
        while self._received_through + 1 in self._received:
            self._received_through += 1
            self._received.remove(self._received_through)
        if message.come is not None:
            self._hand_over(message, message.come)

    def _hand_over(self, message: _Incoming, come: Future[None]) -> None:
        """Of a message that is whole: to who waits for it."""
        if message.data is not message.room:
            size, expected = len(message.data), len(message.room)
            self._early_bytes -= size + _EARLY_OVERHEAD_BYTES
            if size != expected:
                come.set_exception(TransportError(f"a message of {size} bytes came instead of {expected}"))
                return
            message.room[:] = message.data
        come.set_result(None)
