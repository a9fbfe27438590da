"""One connected peer: a control stream, and payload messages over stripes, which both live as long as it is connected.

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
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NoReturn

from diloco.algorithm import RoundId
from diloco.errors import CodecError, TransportError
from diloco.events import PeerTraffic
from diloco.protocol import GivenUp, Header, Message, MessageError, decode
from diloco.transport.address import Address
from diloco.transport.connections.pace import Pace, TcpCounters, UplinkMeter, sum_of
from diloco.transport.connections.sockets import raw_transport
from diloco.transport.connections.streams import MAX_MESSAGE_BYTES, UNKNOWN_PEER_BYTES, read_bytes
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

_MESSAGE_BYTES = 2048  # counted for each control message, besides its size: the time that it takes
_BYTES_PER_S, _BURST_S = {False: 64e3, True: 8e6}, 4.0
"""Rate accepted from unknown peers and from members, and for how long it may be exceeded; normal use is far below."""
SMALL_PER_S = 2048.0  # parts that take more time than their data, likewise
FLUSH_S = 1.0
PIECE_BITS = 17  # of a tag: the message within its round
_LOOK_S = 0.01  # between two looks whether a stripe has become free
_MAX_REFUSED = 3  # a message of which so many parts were wrong, each over another connection, is the sender's fault


def round_tag(view_id: int, round_id: RoundId) -> int:
    """Return the number of a round of a view, 47 bits: no two that are near each other in time share one."""
    return view_id % (1 << 24) << 23 | (round_id.fragment + 1) % (1 << 16) << 7 | round_id.outer_step % (1 << 7)


@dataclass(eq=False)
class Peer:
    """Everything runs in the loop's thread."""

    rank: int  # of the other process
    number: int  # unique in this process; tells apart successive processes of one rank
    address: Address  # where the other process listens
    writer: asyncio.StreamWriter  # of the control stream
    token: str  # the name of the hello that opened the control stream, which both ends know and nobody else
    opened: bool  # whether this process opened it
    trusted: bool  # whether the other process is a member, or this process opened the control stream
    dials: bool  # whether this end opens the stripes
    crossed: str  # name of the other end's hello that crossed the one that opened the control stream, or ""
    meter: UplinkMeter  # of the uplink of this process
    num_messages: int = 0  # number of control messages received, heartbeats included
    task: asyncio.Task[None] | None = None  # runs `listen`
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
        self._paid_s = self._small_paid_s = 0.0  # until when the rates that are accepted have been used
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

    # The control stream.

    async def listen(
        self, reader: asyncio.StreamReader, began: asyncio.Event, deliver: Callable[[int, Message], object]
    ) -> str:
        """Deliver messages until the connection ends, at no more than the rate that is accepted.

        Returns:
            Why it ended; "" if the other side says that it received nothing from this process for too long.
        """
        while True:
            try:
                message = decode(await self._next(reader), Message)
                if self.num_messages == 1:
                    began.set()
                if isinstance(message, GivenUp):
                    return ""
                if isinstance(message, Header):  # it need not have acknowledged the round just before yet
                    decided = message.round._replace(outer_step=message.round.outer_step - 2)
                    self._stop_sending(round_tag(message.view, decided))
                deliver(self.rank, message)
            except MessageError as error:
                return f"it sent an invalid message: {error}"
            except (OSError, EOFError, TransportError) as error:
                return str(error) or type(error).__name__

    async def _next(self, reader: asyncio.StreamReader) -> bytes:
        """Read the next message; raises the errors of `read_frame`."""
        data = await read_bytes(reader, lambda: MAX_MESSAGE_BYTES if self.trusted else UNKNOWN_PEER_BYTES)
        now_s = self._loop.time()
        self._paid_s = max(self._paid_s, now_s) + (_MESSAGE_BYTES + len(data)) / _BYTES_PER_S[self.trusted]
        if (wait_s := self._paid_s - now_s - _BURST_S) > 0:
            await asyncio.sleep(wait_s)
        self.num_messages += 1
        return data

    async def answers(self, heard_s: float, heartbeat_s: float) -> bool:
        """Return whether a message arrives within two heartbeats of the last one, at ``heard_s``.

        A live process keeps its rank: where the network proves no identities, any peer could claim to be that rank.
        """
        num_messages = self.num_messages
        # a process that stood still has heard nothing meanwhile, and has yet to read what has arrived
        until_s = max(heard_s + 2 * heartbeat_s, self._loop.time() + heartbeat_s)
        while not self.writer.is_closing() and self._loop.time() < until_s:
            await asyncio.sleep(heartbeat_s / 8)
            if self.num_messages > num_messages:
                return True
        return False

    def hang_up(self) -> None:
        """End everything, in good order."""
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()
        self.end("the control connection has ended")
        self.writer.close()
        # TLS would wait half a minute for the other end
        self._loop.call_later(FLUSH_S, raw_transport(self.writer).abort)

    # The payload links.

    @property
    def ended(self) -> bool:
        return self._error is not None

    def end(self, why: str) -> None:
        """End the payload links for good: all their operations fail with ``why``. Later calls have no effect."""
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

    # Rounds.

    def open_round(self, round_tag: int, most_bytes: int) -> None:
        """Keep up to so many bytes of a round until `take_early`: the peer may know the plan before this rank."""
        self._early[round_tag] = Early(most_bytes)

    def take_early(self, round_tag: int) -> None:
        """Store what has arrived for a round in the messages that `receive` awaits from now on."""
        if early := self._early.pop(round_tag, None):
            for head, data in early.parts.values():
                try:
                    self.arrived(head, data)
                except TransportError as error:  # it was acknowledged, so it is not sent again
                    self._spoil(head.tag, str(error))

    def close_round(self, round_tag: int) -> None:
        """Send and await nothing more of a round, which has ended here. Who waits for a message is released."""
        self._early.pop(round_tag, None)
        for tag in [tag for tag in self._incoming if tag >> PIECE_BITS == round_tag]:
            self._incoming.pop(tag).received.cancel()
        self._stop_sending(round_tag)

    def _stop_sending(self, round_tag: int) -> None:
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
        if early := self._early.get(head.tag >> PIECE_BITS):
            early.keep(head, data)
            return
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
