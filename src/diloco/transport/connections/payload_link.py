"""The payload messages of one connected peer, over stripes, for as long as it is connected.

Payload messages are cut into parts, and each free stripe takes the next part. A stripe that loss slows down delays only
the parts that it carries; the parts of one that breaks are sent again over others, or over the next one. Every part is
acknowledged, and the sender keeps a message until all its parts are.

A payload message belongs to a round of a view, as its tag says. It is sent once the headers of all members say that
they have begun that round. A member that still lacks one keeps what arrives. What arrives for any other round is
acknowledged and dropped, so a round is cancelled by its tag alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NoReturn

from diloco.algorithm import RoundId
from diloco.errors import CodecError, TransportError
from diloco.events import PeerTraffic
from diloco.transport.connections.pace import Pace, TcpCounters, UplinkMeter, sum_of
from diloco.transport.connections.stripe import (
    LEAST_PART_BYTES,
    Early,
    Head,
    Incoming,
    Outgoing,
    Part,
    Stripe,
    compress,
    part_bytes,
)

_BURST_S = 4.0  # for how long the rate of small parts may be exceeded
SMALL_PER_S = 2048.0  # parts that take more time than their data; normal use is far below
PIECE_BITS = 17  # of a tag: the message within its round
_LOOK_S = 0.01  # between two looks whether a stripe has become free
_MAX_REFUSED = 3  # a message of which so many parts were wrong, each over another connection, is the sender's fault


def round_tag(view_id: int, round_id: RoundId) -> int:
    """Return the number of a round of a view, 47 bits: no two that are near each other in time share one."""
    return view_id % (1 << 24) << 23 | (round_id.fragment + 1) % (1 << 16) << 7 | round_id.outer_step % (1 << 7)


@dataclass(eq=False)
class PayloadLink:
    """Everything runs in the control thread. `PeerLinks` decides on its stripes."""

    dials: bool  # whether this end opens the stripes
    meter: UplinkMeter  # of the uplink of this process
    single: bool = False  # whether a second stripe would be useless
    stripes: dict[int, Stripe] = field(default_factory=dict)  # open stripes by number
    wanted: bool = False  # whether there are to be stripes
    bare_s: float = 0.0  # since when there has been no stripe, if one is wanted and there is none
    uses: int = 0  # number of stripes made so far
    why: str = "the other side did not connect"  # why a stripe last ended or could not be made
    keeping: list[asyncio.Task[None]] = field(default_factory=list)  # one for each stripe that this end opens
    waiting_bytes: int = 0  # bytes that no stripe has taken yet
    sent_bytes: int = 0  # of parts, compressed where they are
    received_bytes: int = 0
    pace: Pace = field(default_factory=Pace)

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._small_paid_s = 0.0  # until when the rate of small parts has been used
        self._began_s = 0.0  # when the current transfer began
        self._transfer_bytes = self._missing_bytes = 0  # acknowledged of it, as sent, and not acknowledged, as data
        self._counted = TcpCounters()  # by TCP until then
        self._unsent: deque[Outgoing] = deque()  # messages that are not completely cut into parts
        self._to_resend: deque[Part] = deque()  # unacknowledged parts of stripes that broke
        self._in_flight: set[Outgoing] = set()
        self._incoming: dict[int, Incoming] = {}  # by tag, the messages that this rank waits for
        self._early: dict[int, Early] = {}  # by round, of those whose messages are not known yet
        self._needed = 1  # number of stripes that the transfer has use for
        self._wake_scheduled = False  # whether `wake` is about to run
        self._look_scheduled = False  # whether it runs in a moment
        self._error: TransportError | None = None

    @property
    def ended(self) -> bool:
        return self._error is not None

    def end(self, why: str) -> None:
        """End the link for good: all their operations fail with ``why``. Later calls have no effect."""
        if self._error is not None:
            return
        self._error = error = TransportError(f"a payload connection ended: {why}")
        for message in self._in_flight:
            message.sent.set_exception(error)
        for incoming in self._incoming.values():
            incoming.received.set_exception(error)
        for messages in (self._incoming, self._early, self._in_flight, self._unsent, self._to_resend):
            messages.clear()
        self._note_sending()
        for stripe in list(self.stripes.values()):
            stripe.end()
        for task in self.keeping:
            if task is not asyncio.current_task():
                task.cancel()

    def add(self, number: int, stripe: Stripe) -> None:
        if before := self.stripes.get(number):
            before.end()
        self.stripes[number] = stripe
        self.uses += 1
        self._wake_scheduled = True  # its pace is that of the others
        self.wake()

    def drop(self, stripe: Stripe, unfinished: list[Part], why: str) -> None:
        """Remove a stripe that has ended, and schedule its unacknowledged parts to be sent again."""
        if stripe in self.stripes.values():  # else it ended before it was used
            self.bare_s = self._loop.time()
        self.stripes = {number: each for number, each in self.stripes.items() if each is not stripe}
        self.why = why
        again = [part for part in unfinished if not part.acknowledged and part.message in self._in_flight]
        self.waiting_bytes += sum(len(part.data) for part in again)
        self._to_resend.extend(again)
        self.wake()

    def bare(self, now_s: float, patience_s: float, connect_timeout_s: float) -> str:
        """Return why the link is of no use, as there has been no stripe for too long; "" if it is."""
        patience_s = patience_s if self.uses else connect_timeout_s
        if not self.wanted or self.stripes or now_s - self.bare_s <= patience_s:
            return ""
        how = "reopened" if self.uses else "opened"
        return f"no payload connection could be {how} in {patience_s:g} s: {self.why}"

    # Rounds.

    def open_round(self, round_tag: int, most_bytes: int) -> None:
        """Keep up to so many bytes of a round until `take_early`: the peer may know the plan before this rank."""
        self._early[round_tag] = Early(most_bytes)

    def take_early(self, round_tag: int) -> None:
        """Store what has arrived for a round in the messages that `receive` awaits from now on."""
        if early := self._early.pop(round_tag, None):
            for head, data in early.parts.values():
                try:
                    self._store(head, data)
                except TransportError as error:  # it was acknowledged, so it is not sent again
                    self._spoil(head.tag, str(error))

    def close_round(self, round_tag: int) -> None:
        """Send and await nothing more of a round, which has ended here. Who waits for a message is released."""
        self._early.pop(round_tag, None)
        for tag in [tag for tag in self._incoming if tag >> PIECE_BITS == round_tag]:
            self._incoming.pop(tag).received.cancel()
        self.stop_sending(round_tag)

    def stop_sending(self, round_tag: int) -> None:
        """Count what belongs to a round as sent, as it is not wanted any more, even if it is never acknowledged."""
        cancelled = {message for message in self._in_flight if message.tag >> PIECE_BITS == round_tag}
        if not cancelled:
            return
        self.pace.lift()
        self._in_flight -= cancelled
        self._unsent = deque(message for message in self._unsent if message not in cancelled)
        self._to_resend = deque(part for part in self._to_resend if part.message not in cancelled)
        self.waiting_bytes = sum(len(each.data) - each.cut for each in self._unsent)
        self.waiting_bytes += sum(len(part.data) for part in self._to_resend)
        for message in cancelled:
            self._missing_bytes -= message.missing
            message.sent.set_result(None)
        for stripe in self.stripes.values():
            stripe.forget(cancelled)
        self._note_sending()

    # Sending.

    def send(self, tag: int, data: memoryview, sent: Future[None]) -> None:
        """Send ``data``, which must not change until ``sent`` is resolved: the peer has it then, or wants it no more.

        If the link ends before, ``sent`` fails with a `TransportError`.
        """
        if self._error is not None:
            sent.set_exception(self._error)
            return
        message = Outgoing(tag, data, sent, missing=len(data))
        if not self._in_flight:
            self._began_s, self._counted = self._loop.time(), self.counters()
            self._transfer_bytes = self._missing_bytes = 0
        self._in_flight.add(message)
        self._unsent.append(message)
        self.waiting_bytes += len(message.data)
        self._missing_bytes += len(message.data)
        self._note_sending()
        if not self._wake_scheduled:  # waits for further messages of this iteration, which allow larger parts
            self._wake_scheduled = True
            self._loop.call_soon(self.wake)

    def wake(self) -> None:
        """Give each free stripe one part at a time, in turns, as long as there are any."""
        if self._wake_scheduled:
            self._wake_scheduled = False
            self._needed = max(1, min(len(self.stripes), self._missing_bytes // LEAST_PART_BYTES))
        most = min(self.pace.bits_per_s, self.meter.share_bits_per_s)
        for stripe in self.stripes.values():
            stripe.limit(most / self._needed, self.pace.seen_bits_per_s / self._needed)
        free = deque(self.stripes.values())
        while free and (self._unsent or self._to_resend):
            stripe = free.popleft()
            if not stripe.is_free:
                continue
            free.append(stripe)
            if self._to_resend:
                part = self._to_resend.popleft()
            else:
                message = self._unsent[0]
                data = message.data[message.cut : message.cut + part_bytes(self.waiting_bytes, len(self.stripes))]
                part = Part(message, message.cut, data, compress(data) if stripe.compresses else data)
                message.cut += len(data)
                if message.cut == len(message.data):
                    self._unsent.popleft()
            self.waiting_bytes -= len(part.data)
            self.meter.written_bytes += len(part.body)
            self.sent_bytes += len(part.body)
            stripe.write(part)
        if (self._unsent or self._to_resend) and not self._look_scheduled:
            self._look_scheduled = True
            self._loop.call_later(_LOOK_S, self._look)
        self._note_sending()

    def _look(self) -> None:
        self._look_scheduled = False
        self.wake()

    def acknowledge(self, part: Part) -> None:
        message = part.message
        if part.acknowledged or message not in self._in_flight:
            return
        part.acknowledged = True
        self._transfer_bytes += len(part.body)
        message.missing -= len(part.data)
        self._missing_bytes -= len(part.data)
        if message.missing == 0:
            self._in_flight.remove(message)
            message.sent.set_result(None)
            if not self._in_flight:
                now, lasted_s = self.counters(), self._loop.time() - self._began_s
                resent = max(0, now.resent - self._counted.resent)  # a stripe that ended takes its count along
                self.pace.note(self._transfer_bytes, lasted_s, resent=resent, round_trip_s=now.round_trip_s)

    def counters(self) -> TcpCounters:
        return sum_of(stripe.counters() for stripe in list(self.stripes.values()))

    def traffic(self) -> PeerTraffic:
        """Return what `RoundCommitted.peers` says about this peer. For any thread."""
        return PeerTraffic(self.sent_bytes, self.received_bytes, self.counters().round_trip_s or None)

    def _note_sending(self) -> None:
        self.meter.note(self, bool(self._unsent or self._to_resend), self.sent_bytes, self._loop.time())

    # Receiving.

    def receive(self, tag: int, buffer: memoryview, received: Future[None]) -> None:
        """Fill ``buffer`` with the message ``tag``, then resolve ``received``.

        If the link ends before, ``received`` fails with a `TransportError`. If the message has another size, or its
        parts are wrong, it fails with a `CodecError`. It is cancelled if its round is closed before.
        """
        if self._error is not None:
            received.set_exception(self._error)
        else:
            self._incoming[tag] = Incoming(buffer, received, len(buffer))

    def pause_s(self, size: int) -> float:
        """Return for how long to read nothing after a part of this size: small ones keep the thread from all else."""
        if size >= LEAST_PART_BYTES:
            return 0.0
        now_s = self._loop.time()
        self._small_paid_s = max(self._small_paid_s, now_s) + 1 / SMALL_PER_S
        return self._small_paid_s - now_s - _BURST_S

    def arrived(self, head: Head, data: memoryview) -> None:
        """Store a part that is awaited and has not arrived before, or keep it if its round has no plan yet."""
        self.received_bytes += head.size
        if early := self._early.get(head.tag >> PIECE_BITS):
            early.keep(head, data)
        else:
            self._store(head, data)

    def _store(self, head: Head, data: memoryview) -> None:
        message = self._incoming.get(head.tag)
        if message is None or head.start in message.parts:
            return
        try:
            message.store(head, data)
        except CodecError as error:
            self._spoil(head.tag, str(error))
        except TransportError as error:
            self.refuse(head, str(error))
        else:
            if message.missing == 0:
                self._incoming.pop(head.tag).received.set_result(None)

    def refuse(self, head: Head, why: str) -> NoReturn:
        """End the connection that brought a wrong part, which is then sent again; the third time, its message fails."""
        if message := self._incoming.get(head.tag):
            message.num_refused += 1
            if message.num_refused == _MAX_REFUSED:
                self._spoil(head.tag, why)
        raise TransportError(why)

    def _spoil(self, tag: int, why: str) -> None:
        if message := self._incoming.pop(tag, None):
            message.received.set_exception(CodecError(why))
