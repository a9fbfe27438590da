"""The payload link to one connected peer: messages over any number of stripes, which live as long as the peer does.

Messages are cut into parts, and each free stripe takes the next part. A stripe that loss slows down delays only the
parts that it carries; the parts of one that breaks are sent again over others, or over the next one. Every part is
acknowledged, and the sender keeps a message until all its parts are.

A message belongs to a round of a view, as its tag says. It is sent once all members are known to have begun that round,
by the headers of their contributions. A member that still lacks a header keeps what arrives. What arrives for any other
round is acknowledged and dropped, so a round is cancelled by its tag alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future
from typing import Annotated

from msgspec import Meta

from diloco.algorithm import RoundId, Uplink
from diloco.errors import TransportError
from diloco.membership import Rank, View
from diloco.protocol import ConnectionEnded, ConnectionMade, Event, Header, Received, Refused, WireMessage
from diloco.transport.connections.connection_manager import ConnectionManager
from diloco.transport.connections.control_connection import ControlConnection
from diloco.transport.connections.limits import Backoff
from diloco.transport.connections.pace import Pace, TcpCounters, UplinkMeter, streams_to_each, sum_of
from diloco.transport.connections.streams import Stream, pack, read_frame
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

_TAG_BITS = 17  # of a message within its round
_RETRY_S, _RETRY_PART = 0.2, 4  # pauses before the first stripe is dialled again; at most the patience / 4
_LOOK_S = 0.01  # between two looks whether a stripe has become free
_RETRY_MORE_S, _RETRY_MORE_AT_MOST_S = 1.0, 30.0  # the same for each other one


def round_tag(view_id: int, round_id: RoundId) -> int:
    """Return the number of a round of a view, 47 bits: no two that are near each other in time share one."""
    return view_id % (1 << 24) << 23 | (round_id.fragment + 1) % (1 << 16) << 7 | round_id.outer_step % (1 << 7)


class PeerLink:
    """Payload messages to and from one peer. Everything runs in the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: ControlConnection, meter: UplinkMeter) -> None:
        self.rank, self.token = connection.rank, connection.token
        self.dials = connection.opened  # whether this end opens the stripes
        self.single = False  # whether a second stripe would be useless
        self.description = ""  # what carries the link, for display
        self.stripes: dict[int, Stripe] = {}  # open stripes by number
        self.waiting_bytes = 0  # bytes that no stripe has taken yet
        self.pace = Pace()
        self.uses = 0  # number of stripes made so far
        self.sent_bytes = self.received_bytes = 0  # of parts, compressed where they are
        self.why = "the other side did not connect"  # why a stripe last ended or could not be made
        self.keeping: list[asyncio.Task[None]] = []  # one for each stripe that this end opens
        self.started = False  # whether stripes are wanted
        self._loop = loop
        self._meter = meter
        self._began_s = 0.0  # when the current transfer began
        self._transfer_bytes = self._missing_bytes = 0  # acknowledged of it, as sent, and not acknowledged, as data
        self._counted = TcpCounters()  # by TCP until then
        self._unsent: deque[Outgoing] = deque()  # messages that are not completely cut into parts
        self._to_resend: deque[Part] = deque()  # unacknowledged parts of stripes that broke
        self._in_flight: set[Outgoing] = set()
        self._incoming: dict[int, Incoming] = {}  # by tag, the messages that this rank waits for
        self._early: dict[int, Early] = {}  # by round, of those whose messages are not known yet
        self._wake_scheduled = False  # whether `wake` is about to run
        self._look_scheduled = False  # whether it runs in a moment
        self._error: TransportError | None = None

    @property
    def ended(self) -> bool:
        return self._error is not None

    def end(self, why: str) -> None:
        """End the link for good: current and later operations fail with ``why``. Later calls have no effect."""
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
        self.wake()

    def drop(self, stripe: Stripe, unfinished: list[Part], why: str) -> None:
        """Remove a stripe that has ended, and schedule its unacknowledged parts to be sent again."""
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
                self._store(head, data)

    def close_round(self, round_tag: int) -> None:
        """Send and await nothing more of a round, which has ended here. Who waits for a message is released."""
        self._early.pop(round_tag, None)
        for tag in [tag for tag in self._incoming if tag >> _TAG_BITS == round_tag]:
            self._incoming.pop(tag).received.cancel()
        self.stop_sending(round_tag)

    def stop_sending(self, round_tag: int) -> None:
        """Count what belongs to a round as sent, as it is not wanted any more, even if it is never acknowledged."""
        cancelled = {message for message in self._in_flight if message.tag >> _TAG_BITS == round_tag}
        if not cancelled:
            return
        self.pace.lift()
        for stripe in self.stripes.values():
            stripe.forget(cancelled)
        self._in_flight -= cancelled
        self._unsent = deque(message for message in self._unsent if message not in cancelled)
        self._to_resend = deque(part for part in self._to_resend if part.message not in cancelled)
        self.waiting_bytes = sum(len(each.data) - each.cut for each in self._unsent)
        self.waiting_bytes += sum(len(part.data) for part in self._to_resend)
        for message in cancelled:
            self._missing_bytes -= message.missing
            message.sent.set_result(None)
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
            self._began_s, self._counted = self._loop.time(), self._counters()
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
            number = max(1, min(len(self.stripes), self._missing_bytes // LEAST_PART_BYTES))  # that are needed
            for stripe in self.stripes.values():
                stripe.limit(self.pace.bits_per_s / number, self.pace.seen_bits_per_s / number)
        free = list(self.stripes.values())
        while free and (self._unsent or self._to_resend):
            free = [each for each in free if each.write_next()]
        if (self._unsent or self._to_resend) and not self._look_scheduled:
            self._look_scheduled = True
            self._loop.call_later(_LOOK_S, self._look)
        self._note_sending()

    def _look(self) -> None:
        self._look_scheduled = False
        self.wake()

    def take(self, *, compressed: bool = False) -> Part | None:
        """Return the next part for a free stripe, or None."""
        if self._to_resend:
            part = self._to_resend.popleft()
        elif self._unsent:
            message = self._unsent[0]
            size = part_bytes(self.waiting_bytes, len(self.stripes))
            data = message.data[message.cut : message.cut + size]
            part = Part(message, message.cut, data, compress(data) if compressed else data)
            message.cut += len(data)
            if message.cut == len(message.data):
                self._unsent.popleft()
        else:
            return None
        self.waiting_bytes -= len(part.data)
        self._meter.written_bytes += len(part.body)
        self.sent_bytes += len(part.body)
        return part

    def acknowledge(self, part: Part) -> None:
        message = part.message
        if part.acknowledged or message not in self._in_flight or self._error is not None:
            return
        part.acknowledged = True
        self._transfer_bytes += len(part.body)
        message.missing -= len(part.data)
        self._missing_bytes -= len(part.data)
        if message.missing == 0:
            self._in_flight.remove(message)
            message.sent.set_result(None)
            if not self._in_flight:
                self._end_transfer()

    def _end_transfer(self) -> None:
        now_s, now, before = self._loop.time(), self._counters(), self._counted
        self.pace.note(
            self._transfer_bytes,
            now_s - self._began_s,
            resent=now.resent - before.resent,
            round_trip_s=now.round_trip_s,
        )

    def _counters(self) -> TcpCounters:
        return sum_of(stripe.counters() for stripe in list(self.stripes.values()))

    def traffic(self) -> tuple[int, int, float]:
        """Return what `RoundCommitted.peers` says about this peer. For any thread."""
        return self.sent_bytes, self.received_bytes, self._counters().round_trip_s

    def _note_sending(self) -> None:
        self._meter.note(self, bool(self._unsent or self._to_resend), self._loop.time())

    # Receiving.

    def receive(self, tag: int, buffer: memoryview, received: Future[None]) -> None:
        """Fill ``buffer`` with the message ``tag``, then resolve ``received``.

        If the link ends before, or the message has another size, ``received`` fails with a `TransportError`. It is
        cancelled if its round is closed before.
        """
        if self._error is not None:
            received.set_exception(self._error)
        else:
            self._incoming[tag] = Incoming(buffer, received, len(buffer))

    def arrived(self, head: Head, data: memoryview) -> None:
        """Store a part that is awaited and has not arrived before, or keep it if its round has no plan yet."""
        self.received_bytes += len(data)
        if early := self._early.get(head.tag >> _TAG_BITS):
            early.keep(head, data)
        else:
            self._store(head, data)

    def _store(self, head: Head, data: memoryview) -> None:
        message = self._incoming.get(head.tag)
        if message is None or head.start in message.parts:
            return
        expected = len(message.buffer)
        if head.total != expected:
            del self._incoming[head.tag]
            words = f"a message of {head.total} bytes arrived where {expected} bytes were expected"
            message.received.set_exception(TransportError(words))
            return
        message.put(head.start, head.content(data))
        if message.missing <= 0:
            del self._incoming[head.tag]
            message.received.set_result(None)


class LinkAsked(WireMessage, tag="link"):
    token: Annotated[str, Meta(min_length=1, max_length=64)]  # of the control connection
    rank: Rank  # of the sender
    number: Annotated[int, Meta(ge=0, lt=64)]  # of the stripe


class Linked(WireMessage):
    """The connection is a stripe."""


class PeerLinks:
    """The links of one rank to its connected peers. Everything runs in the control thread.

    A peer whose link has no stripe for `Rules.silence_s` counts as lost.
    """

    def __init__(self, connections: ConnectionManager) -> None:
        self.by_rank: dict[int, PeerLink] = {}
        self.connections = connections
        self.rules = connections.rules
        self._meter = UplinkMeter(self._counters)
        self._wanted: frozenset[int] = frozenset()  # ranks to which there are to be stripes
        connections.services[LinkAsked] = self._serve

    def _counters(self) -> TcpCounters:
        return sum_of(stripe.counters() for link in self.by_rank.values() for stripe in link.stripes.values())

    @property
    def uplink(self) -> Uplink:
        """What is known about the bandwidth with which this rank sends. For any thread."""
        return self._meter.uplink(full=any(math.isfinite(link.pace.bits_per_s) for link in list(self.by_rank.values())))

    def is_peer(self, rank: int) -> bool:
        """Return whether a rank of another replica is at the position of this one."""
        size = self.rules.ranks_per_replica
        return rank % size == self.rules.position and rank // size != self.rules.replica

    def peers(self, view: View) -> list[int]:
        return [rank for rank in self.rules.ranks(view.members) if self.is_peer(rank)]

    def notice(self, event: Event) -> None:
        """Take note of connections that are made and end, and of rounds that peers have decided."""
        match event:
            case Received(sender, Header() as header) if sender in self.by_rank:
                link, fragment, outer_step = self.by_rank[sender], *header.round
                # it has decided the rounds before; it need not have acknowledged the one just before yet
                link.stop_sending(round_tag(header.view, RoundId(fragment, outer_step - 2)))
            case ConnectionMade(rank) if self.is_peer(rank):
                self.disconnect(rank)
                self.by_rank[rank] = self.make(rank)
                if rank in self._wanted:
                    self._start(self.by_rank[rank])
            case ConnectionEnded(rank):
                self.disconnect(rank)

    def make(self, rank: int) -> PeerLink:
        connection = self.connections.get(rank)
        assert connection is not None, "it has just been made"
        return PeerLink(self.connections.loop, connection, self._meter)

    def disconnect(self, rank: int) -> None:
        if link := self.by_rank.pop(rank, None):
            link.end("the control connection has ended")

    def want(self, ranks: Collection[int]) -> None:
        """Keep stripes to these ranks from now on, as they are members."""
        self._wanted = frozenset(ranks)
        number = streams_to_each(len(ranks))
        for rank in self._wanted & self.by_rank.keys():
            link = self.by_rank[rank]
            if not link.started:
                self._start(link)
            for task in link.keeping[number:]:
                task.cancel()
            del link.keeping[number:]

    async def open_stripe(self, link: PeerLink) -> Stream:
        """Open a connection for one more stripe."""
        if (connection := self.connections.get(link.rank)) is None:
            raise OSError(f"rank {link.rank} is not connected")
        stream, streams = await self.connections.open(connection.address), self.connections.streams
        if streams.identity(stream[1]) != streams.identity(connection.writer):
            stream[1].transport.abort()
            raise OSError(f"another process answers in place of rank {link.rank}")
        return stream

    def _start(self, link: PeerLink) -> None:
        link.started = True
        if link.dials:
            self.keep_at_least(link, 1)
        self._watch(link, self.rules.connect_timeout_s)

    def _watch(self, link: PeerLink, patience_s: float) -> None:
        """Lose the peer unless a stripe is made within ``patience_s``; do nothing while there is one."""
        if not link.ended and not link.stripes:
            self.connections.loop.call_later(patience_s, self._lose, link, link.uses, patience_s)

    def _lose(self, link: PeerLink, uses: int, patience_s: float) -> None:
        if not link.ended and not link.stripes and link.uses == uses and link.rank in self._wanted:
            what = "reopened" if uses else "opened"
            self.connections.drop(link.rank, f"no payload connection could be {what} in {patience_s:g} s: {link.why}")

    def keep_at_least(self, link: PeerLink, number: int) -> None:
        link.keeping += [self.connections.begin(self._keep(link, each)) for each in range(len(link.keeping), number)]

    async def _keep(self, link: PeerLink, index: int) -> None:
        """Maintain one stripe: dial it, and dial it again when it ends."""
        clock = self.connections.loop
        times = (_RETRY_S, self.rules.silence_s / _RETRY_PART) if index == 0 else (_RETRY_MORE_S, _RETRY_MORE_AT_MOST_S)
        backoff = Backoff(*times, seed=f"{self.connections.rank} {link.rank} {index}")
        while link.dials and not link.ended:
            began_s = clock.time()
            await self._dial(link, index)
            if clock.time() - began_s > backoff.upper_s:  # it was open for a while
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _dial(self, link: PeerLink, index: int) -> None:
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(self.rules.connect_timeout_s):
                reader, writer = await self.open_stripe(link)
                writer.write(pack(LinkAsked(link.token, self.connections.rank, index)))
                answer, _ = await read_frame(reader, Linked | Refused)
            if isinstance(answer, Refused):
                raise TransportError(answer.reason)
            await self._use(link, index, reader, writer)
        except (OSError, EOFError, TimeoutError, TransportError, ValueError) as error:
            link.why = str(error) or type(error).__name__
        finally:
            if writer is not None:
                writer.close()

    async def _serve(self, asked: LinkAsked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        streams, link, owner = self.connections.streams, self.by_rank.get(asked.rank), self.connections.get(asked.rank)
        if owner is not None and streams.identity(owner.writer) != streams.identity(writer):
            return
        if link is None or link.token != asked.token or asked.rank not in self._wanted or link.dials:
            with contextlib.suppress(OSError):
                writer.write(pack(Refused("the other side does not expect this connection yet")))
                await writer.drain()
            return
        self.connections.vouch(writer)
        writer.write(pack(Linked()))
        await self._use(link, asked.number, reader, writer)

    async def _use(
        self, link: PeerLink, index: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        transport = writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        reader.feed_eof()  # so that `read` returns what has already arrived without waiting for more
        already = await reader.read()
        link.description = self.connections.streams.route(writer)
        stripe = Stripe(link, transport, self.rules.silence_s, compresses=self.rules.compress)
        try:
            if link.ended:
                return
            stripe.begin(already)
            link.add(index, stripe)
            if link.dials and not stripe.near and not link.single:
                self.keep_at_least(link, streams_to_each(len(self._wanted)))
            await asyncio.shield(stripe.ended)  # so that one that is no longer wanted gives its parts back, too
        finally:
            stripe.end()
            self._watch(link, self.rules.silence_s)
