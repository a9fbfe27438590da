"""What comes in over the connections of a link: parts are put together, and messages handed to who waits for them.

Memory for what nobody waits for yet is limited. In the loop's thread.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from diloco.errors import TransportError
from diloco.transport.peers.payload_connection import Head

__all__ = ["Inbox", "Receive"]

_MOST_EARLY_BYTES = 64 << 20
_EARLY_OVERHEAD_BYTES = 256  # of a message that nobody waits for yet, beside its own


@dataclass(eq=False)
class Receive:
    """Room for a message, and who waits for it."""

    data: memoryview
    come: Future[None]


@dataclass(eq=False)
class _Incoming:
    """A message of which parts have come, and where they go: to who waits for it, or to memory of its own."""

    tag: int
    data: memoryview
    receive: Receive | None
    missing: int
    starts: set[int] = field(default_factory=set)  # of parts that have come


class Inbox:
    """Messages of one link, by number and tag."""

    def __init__(self) -> None:
        self._receives: dict[int, deque[Receive]] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._early: dict[int, deque[_Incoming]] = {}
        self._early_bytes = 0
        self._received_through = 0
        self._received: set[int] = set()  # after that one

    def expect(self, tag: int, receive: Receive) -> None:
        """Hand over the next message with this tag, now or when it has come."""
        if early := self._early.get(tag):
            message = early.popleft()
            if not early:
                del self._early[tag]
            message.receive = receive
            if message.missing == 0:
                self._hand_over(message, receive)
        else:
            self._receives.setdefault(tag, deque()).append(receive)

    def close(self, error: TransportError) -> None:
        """An error for all that wait for a message; what has come of messages is forgotten."""
        waiting = [each for receives in self._receives.values() for each in receives]
        waiting += [each.receive for each in self._incoming.values() if each.receive]
        for receive in waiting:
            receive.come.set_exception(error)
        for held in (self._receives, self._incoming, self._early):
            held.clear()

    def has_room(self, head: Head) -> bool:
        """Whether a part may come now, or has to wait until messages were taken; of the first, room is made for all.

        Raises:
            TransportError: if no such part can come.
        """
        message = self._incoming.get(head.number)
        if message is None:
            if head.number <= self._received_through or head.number in self._received:  # it has come
                return True
            receives = self._receives.get(head.tag)
            if receives and len(receives[0].data) == head.total:
                data = receives[0].data
            else:
                size = head.total + _EARLY_OVERHEAD_BYTES
                if self._early_bytes and self._early_bytes + size > _MOST_EARLY_BYTES:
                    return False
                self._early_bytes += size
                data = memoryview(bytearray(head.total))
            message = _Incoming(head.tag, data, receives.popleft() if receives else None, head.total)
            self._incoming[head.number] = message
            if message.receive is None:
                self._early.setdefault(head.tag, deque()).append(message)
            elif not receives:
                del self._receives[head.tag]
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
        if message.receive is not None:
            self._hand_over(message, message.receive)

    def _hand_over(self, message: _Incoming, receive: Receive) -> None:
        """Of a message that is whole: to who waits for it."""
        size, expected = len(message.data), len(receive.data)
        if message.data is not receive.data:
            self._early_bytes -= size + _EARLY_OVERHEAD_BYTES
            if size != expected:
                receive.come.set_exception(TransportError(f"a message of {size} bytes came instead of {expected}"))
                return
            receive.data[:] = message.data
        receive.come.set_result(None)
