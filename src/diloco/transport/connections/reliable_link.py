"""Reliable messages to and from one other rank over any number of connections.

Messages are cut into parts, and each free connection takes the next part. A connection that loss slows down delays only
the parts that it carries; the parts of one that breaks are sent again over others, or over the next one. Every part
carries a checksum and is acknowledged. The sender keeps a message until all its parts are acknowledged. Memory for
messages that arrive before the receiver asks for them is limited. This module handles messages, and `PayloadConnection`
bytes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Future

from diloco.errors import TransportError
from diloco.transport.connections.pace import Pace, TcpCounters, UplinkMeter
from diloco.transport.connections.parts import (
    LEAST_PART_BYTES,
    Head,
    Incoming,
    Outgoing,
    Part,
    compress,
    part_bytes,
)
from diloco.transport.connections.payload_connection import PayloadConnection

__all__ = ["ReliableLink"]

_MOST_EARLY_BYTES = 64 << 20  # of messages that this rank has not asked for; the sender waits when they are reached
_EARLY_OVERHEAD_BYTES = 2048  # bookkeeping of a message that arrived early
_MOST_AHEAD = 1 << 16  # messages between the first one that is incomplete and the last one that is accepted


class ReliableLink:
    """Payload messages to and from one other rank. Messages with the same tag arrive in the order sent.

    All methods but `close` run in the loop's thread.

    Args:
        loop: The event loop in whose thread everything runs.
        meter: Measures the uplink, which all links of this rank share.
        route: What carries the link, for display.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, meter: UplinkMeter, route: str = "TCP") -> None:
        self.connections: dict[int, PayloadConnection] = {}  # open connections by number
        self.waiting_bytes = 0  # bytes that no connection has taken yet
        self.pace = Pace()
        self.over = asyncio.Event()  # set once the link has ended
        self.settled = asyncio.Event()  # set once the first connection is open, or the link has ended
        self.uses = 0  # number of connections made so far
        self.why = "the other side did not connect"  # why a connection last ended or could not be made
        self.description = route  # what carries the link, for display
        self._loop = loop
        self.meter = meter
        self._began_s = 0.0  # when the current transfer began
        self._transfer_bytes = self._missing_bytes = 0  # its size so far, and how much of it is not acknowledged
        self._counted = TcpCounters()  # by TCP until then
        self._last_number = 0
        self._unsent: deque[Outgoing] = deque()  # messages that are not completely cut into parts
        self._to_resend: deque[Part] = deque()  # unacknowledged parts of connections that broke
        self._in_flight: set[Outgoing] = set()
        self._tags: dict[int, deque[Outgoing]] = {}  # tag in use -> messages that wait for their turn
        self._incoming: dict[int, Incoming] = {}  # partially received messages by number
        # by tag, messages that were asked for and have not begun to arrive, or the other way around
        self._unmatched: dict[int, deque[Incoming]] = {}
        self._early_bytes = 0  # memory of the messages that arrived early
        self._received_through = 0  # all messages up to this number have been received
        self._received_numbers: set[int] = set()  # later ones that have been received
        self._wake_scheduled = False  # whether `wake` is about to run
        self._error: TransportError | None = None

    def close(self) -> None:
        """End the link, from any thread. All waiting operations fail at once."""
        try:
            self._loop.call_soon_threadsafe(self.end, "it was closed")
        except RuntimeError:  # the loop is closed, and all connections with it
            self.end("it was closed")

    @property
    def ended(self) -> bool:
        """Whether the link has ended."""
        return self._error is not None

    def end(self, why: str) -> None:
        """End the link for good: current and later operations fail with ``why``. Later calls have no effect."""
        if self._error is not None:
            return
        if self._in_flight:
            self.meter.end(self._loop.time(), 0)
        self.why = why
        self._error = error = TransportError(f"a payload connection ended: {why}")
        for message in (*self._in_flight, *(each for held in self._tags.values() for each in held)):
            message.sent.set_exception(error)
        for incoming in (*self._incoming.values(), *(each for queue in self._unmatched.values() for each in queue)):
            if incoming.received is not None:
                incoming.received.set_exception(error)
        self._incoming.clear()
        self._unmatched.clear()
        for connection in list(self.connections.values()):
            connection.end()
        self.settled.set()
        self.over.set()

    def add(self, number: int, connection: PayloadConnection) -> None:
        """Use a connection, which replaces the one with the same number."""
        if before := self.connections.get(number):
            before.end()
        self.connections[number] = connection
        self.uses += 1
        self.settled.set()
        self.wake()

    def drop(self, connection: PayloadConnection, unfinished: list[Part], why: str) -> None:
        """Remove a connection that has ended, and schedule its unacknowledged parts to be sent again."""
        for number, each in list(self.connections.items()):
            if each is connection:
                del self.connections[number]
        if self._error is None:
            self.why = why
        again = [part for part in unfinished if not part.acknowledged]
        self.waiting_bytes += sum(len(part.data) for part in again)
        self._to_resend.extend(again)
        self.wake()

    # Sending.

    def send(self, tag: int, data: memoryview, sent: Future[None]) -> None:
        """Send ``data``, which must not change until ``sent`` is resolved: the other side then has it.

        If the link ends before, ``sent`` fails with a `TransportError`.
        """
        if self._error is not None:
            sent.set_exception(self._error)
            return
        message = Outgoing(tag, data, sent, missing=len(data))
        if tag in self._tags:  # keeps messages of one tag in order
            self._tags[tag].append(message)
            return
        self._tags[tag] = deque([message])
        self._start_next(tag)

    def _start_next(self, tag: int) -> None:
        """Start the next message of a tag that has none in flight."""
        if self._error is not None:
            return
        if not (held := self._tags[tag]):
            del self._tags[tag]
            return
        message = held.popleft()
        self._last_number += 1
        message.number = self._last_number
        if not self._in_flight:
            self._began_s, self._counted = self._loop.time(), self._counters()
            self._transfer_bytes = self._missing_bytes = 0
            self.meter.begin(self._began_s)
        self._in_flight.add(message)
        self._unsent.append(message)
        self.waiting_bytes += len(message.data)
        self._transfer_bytes += len(message.data)
        self._missing_bytes += len(message.data)
        if not self._wake_scheduled:  # waits for further messages of this iteration, which allow larger parts
            self._wake_scheduled = True
            self._loop.call_soon(self.wake)

    def wake(self) -> None:
        """Give each free connection one part at a time, in turns, as long as there are any."""
        if self._wake_scheduled:
            self._wake_scheduled = False
            self._limit()
        free = list(self.connections.values())
        while free and (self._unsent or self._to_resend):
            free = [each for each in free if each.write_next()]

    def take(self, *, compressed: bool = False) -> Part | None:
        """Return the next part for a free connection, or None.

        Args:
            compressed: Whether to compress the part.
        """
        if not (self._unsent or self._to_resend):
            return None
        if self._to_resend:
            part = self._to_resend.popleft()
        else:
            message = self._unsent[0]
            size = part_bytes(self.waiting_bytes, len(self.connections))
            data = message.data[message.cut : message.cut + size]
            part = Part(message, message.cut, data, compress(data) if compressed else data)
            message.cut += len(data)
            if message.cut == len(message.data):
                self._unsent.popleft()
        self.waiting_bytes -= len(part.data)
        return part

    def acknowledge(self, part: Part) -> None:
        """Record that the other side has received a part."""
        if part.acknowledged or self._error is not None:
            return
        part.acknowledged, message = True, part.message
        message.missing -= len(part.data)
        self._missing_bytes -= len(part.data)
        if message.missing == 0:
            self._in_flight.remove(message)
            message.sent.set_result(None)
            self._start_next(message.tag)
            if not self._in_flight:
                self._end_transfer()

    def _end_transfer(self) -> None:
        """Take note of a transfer of which everything has been acknowledged."""
        now_s, now, before = self._loop.time(), self._counters(), self._counted
        self.meter.end(now_s, self._transfer_bytes)
        self.pace.note(
            self._transfer_bytes,
            now_s - self._began_s,
            sent=now.sent - before.sent,
            resent=now.resent - before.resent,
            round_trip_s=now.round_trip_s,
        )

    def _counters(self) -> TcpCounters:
        """Return what TCP has counted for all connections together."""
        if not self.connections:
            return TcpCounters()
        sent, resent, trips_s = zip(*(each.counters() for each in self.connections.values()), strict=True)
        return TcpCounters(sum(sent), sum(resent), min(filter(None, trips_s), default=0.0))

    def _limit(self) -> None:
        """Divide the pace among the connections that are needed for what is left of the transfer."""
        number = max(1, min(len(self.connections), self._missing_bytes // LEAST_PART_BYTES))
        for connection in self.connections.values():
            connection.limit(self.pace.bits_per_s / number, self.pace.seen_bits_per_s / number)

    # Receiving.

    def receive(self, tag: int, buffer: memoryview, received: Future[None]) -> None:
        """Fill ``buffer`` with the next message of ``tag``, then resolve ``received``.

        If the link ends before, or the message has another size, ``received`` fails with a `TransportError`.
        """
        if self._error is not None:
            received.set_exception(self._error)
            return
        unmatched = self._unmatched.setdefault(tag, deque())
        if unmatched and unmatched[0].received is None:
            message = unmatched.popleft()
            message.buffer, message.received = buffer, received
            if len(message.data) != len(buffer):
                self._refuse(message, len(message.data))
            elif message.missing == 0:
                self._hand_over(message)
        else:
            unmatched.append(Incoming(tag, received, buffer))
        if not unmatched:
            del self._unmatched[tag]
        for connection in [each for each in self.connections.values() if each.waits]:
            connection.resume_reading()

    def has_room(self, head: Head) -> bool:
        """Return whether a part may be read now; otherwise it waits until messages are asked for.

        The first part of a message reserves memory for all of it, unless its buffer waits.

        Raises:
            TransportError: The part contradicts an earlier part of the same message, or is too far ahead.
        """
        message = self._incoming.get(head.number)
        if message is None:
            if head.number <= self._received_through or head.number in self._received_numbers:  # a duplicate
                return True
            if head.number > self._received_through + _MOST_AHEAD:
                raise TransportError(f"message {head.number} arrived while {self._received_through + 1} is incomplete")
            unmatched = self._unmatched.get(head.tag, deque())
            if unmatched and unmatched[0].received is not None:
                message = unmatched.popleft()
                if not unmatched:
                    del self._unmatched[head.tag]
                message.data = message.buffer
            else:
                size = head.total + _EARLY_OVERHEAD_BYTES
                if self._early_bytes + size > _MOST_EARLY_BYTES:
                    return False
                self._early_bytes += size
                message = Incoming(head.tag, data=memoryview(bytearray(head.total)))
                self._unmatched.setdefault(head.tag, unmatched).append(message)
            message.number, message.missing = head.number, head.total
            self._incoming[head.number] = message
            if len(message.data) != head.total:
                self._refuse(message, head.total)
        elif (message.tag, len(message.data)) != (head.tag, head.total):
            raise TransportError(
                f"message {head.number} of {len(message.data)} bytes was continued as one of {head.total} bytes"
            )
        return True

    def arrived(self, head: Head, data: memoryview) -> None:
        """Store a complete part, unless it has already arrived over a connection that broke.

        Raises:
            TransportError: The part can't be decompressed, or does not fit to the others; see `Incoming.put`.
        """
        message = self._incoming.get(head.number)
        if message is None or head.start in message.parts:
            return
        message.put(head.start, head.content(data))
        if message.missing > 0:
            return
        self._forget(message)
        if message.received is not None:
            self._hand_over(message)

    def _forget(self, message: Incoming) -> None:
        """Ignore further parts of a message."""
        if self._incoming.pop(message.number, None) is None:  # it is complete already
            return
        self._received_numbers.add(message.number)
        while self._received_through + 1 in self._received_numbers:
            self._received_through += 1
            self._received_numbers.remove(self._received_through)

    def _hand_over(self, message: Incoming) -> None:
        """Deliver a complete message that this rank has asked for."""
        if message.data is not message.buffer:
            self._early_bytes -= len(message.data) + _EARLY_OVERHEAD_BYTES
            message.buffer[:] = message.data
        assert message.received is not None
        message.received.set_result(None)

    def _refuse(self, message: Incoming, size: int) -> None:
        """Fail what waits for a message of ``size`` bytes that has another size, and ignore the message."""
        if message.data is not message.buffer:
            self._early_bytes -= size + _EARLY_OVERHEAD_BYTES
        self._forget(message)
        assert message.received is not None
        expected = len(message.buffer)
        message.received.set_exception(
            TransportError(f"a message of {size} bytes arrived where {expected} bytes were expected")
        )
