"""Payload links over the streams of a network. One end opens the connections and reopens those that break."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Any

from diloco.errors import TransportError
from diloco.protocol import Fields
from diloco.transport.address import Address
from diloco.transport.connections.backoff import Backoff
from diloco.transport.connections.connection_manager import ConnectionManager
from diloco.transport.connections.opened_link import LinkRequest, OpenedLink, Route
from diloco.transport.connections.path import together
from diloco.transport.connections.payload_connection import PayloadConnection
from diloco.transport.connections.reliable_link import ReliableLink
from diloco.transport.connections.send_scheduler import SendScheduler
from diloco.transport.connections.streams import Stream, pack, read_frame, within
from diloco.transport.links import Link
from diloco.transport.shaping import Pacer
from diloco.transport.tcp import KEEPING_THEIR_RATE, NEAR_S, Counters, congestion_control, connections_worth_having

__all__ = ["MOST_CONNECTIONS", "LinkManager"]

MOST_CONNECTIONS = 64  # of one link

_OBSERVE_S = 0.05
_WORTH_TELLING = 0.1  # relative change of the pacing rate that is worth showing
_RETRY_S, _RETRY_PART = (
    0.2,
    4,
)  # pauses before the first connection of a link is dialled again; at most the patience / 4
_RETRY_MORE_S, _RETRY_MORE_AT_MOST_S = 1.0, 30.0  # the same for each other one, which are as many as 63

_PLAIN = Route("TCP")


class LinkManager:
    """The payload links of one rank.

    Args:
        patience_s: How long a link may have no connection before it ends.
        paces: Whether to pace payloads to the measured bandwidth of the uplink. This applies only where congestion
            control keeps its rate. Elsewhere the first loss slows TCP down, and late acknowledgements of a busy machine
            would be mistaken for a queue.
        compresses: Whether to compress payloads on slow paths; see `PayloadConnection`.
        emulated: The emulated link of this rank, which then paces all payloads alone; None: no emulation.
    """

    def __init__(
        self,
        connections: ConnectionManager,
        patience_s: float,
        *,
        paces: bool = True,
        compresses: bool = True,
        emulated: Link | None = None,
    ) -> None:
        self._scheduler = SendScheduler(connections.loop)
        self._slows_down = congestion_control() not in KEEPING_THEIR_RATE
        self._paces = paces and emulated is None and not self._slows_down
        self._compresses = compresses
        self._pacer = Pacer(emulated) if emulated else None
        self._shown_bits_per_s = 0.0
        self._observing: asyncio.Task[None] | None = None
        self._connections = connections
        self._patience_s = patience_s
        self._links: dict[str, OpenedLink] = {}
        self._changed = asyncio.Condition()
        connections.services["link"] = self._serve

    def open_link(self, request: LinkRequest) -> ReliableLink:
        """Open a link over TCP, as `OpenLink` describes."""
        return self.open_over(_PLAIN, request)

    def open_over(self, route: Route, request: LinkRequest) -> ReliableLink:
        """Open a link over a route that both ends have agreed on, as `OpenLink` describes."""
        return self._connections.call(self._open(request, route))

    def address_of(self, rank: int) -> Address:
        """Return the payload address of a rank that is or was known. Raise `OSError` for any other."""
        connected, entry = self._connections.get(rank), self._connections.entries.get(rank)
        if connected is not None and (entry is None or str(connected.address) != entry.address):
            return connected.address
        if entry is None:
            raise OSError(f"the address of rank {rank} is unknown")
        return self._connections.streams.payload_address(entry)

    async def open_connection(self, opened: OpenedLink) -> Stream:
        """Open one more connection of a link."""
        return await self._connections.open(self.address_of(opened.request.rank))

    async def _open(self, request: LinkRequest, route: Route) -> ReliableLink:
        link = ReliableLink(self._scheduler, route.name, self._pacer)
        opened = OpenedLink(request, route, link)
        async with self._changed:
            if before := self._links.get(request.key):
                before.link.end("it was opened again")
            self._links[request.key] = opened
            self._changed.notify_all()
        opened.watching = self._connections.begin(self._forget_ended(opened))
        if self._observing is None:
            self._observing = self._connections.begin(self._observe_often())
        if opened.dials:
            self._keep_at_least(opened, request.streams if request.chosen else 1)
        with contextlib.suppress(TimeoutError):
            await within(request.timeout_s, link.settled.wait())
        if not link.ended and link.uses:
            return link
        self._end(opened, link.why)
        raise TransportError(f"the payload connection {request.key} could not be made: {link.why}")

    def _end(self, opened: OpenedLink, why: str) -> None:
        opened.link.end(why)
        self._forget(opened)

    async def _forget_ended(self, opened: OpenedLink) -> None:
        """Forget a link when it has ended, closed by its owner or otherwise."""
        await opened.link.over.wait()
        self._forget(opened)

    def _forget(self, opened: OpenedLink) -> None:
        if self._links.get(opened.request.key) is opened:
            del self._links[opened.request.key]
        for task in opened.keeping:
            if task is not asyncio.current_task():
                task.cancel()

    def _keep_at_least(self, opened: OpenedLink, number: int) -> None:
        """Maintain at least ``number`` connections from now on, up to `MOST_CONNECTIONS`."""
        for index in range(len(opened.keeping), min(number, MOST_CONNECTIONS)):
            opened.keeping.append(self._connections.begin(self._keep(opened, index)))

    async def _observe_often(self) -> None:
        """Measure the links with data in flight at regular intervals, and adjust pacing and connections."""
        loop, links = self._connections.loop, self._links
        before_s = loop.time()
        while True:
            await asyncio.sleep(_OBSERVE_S)
            now_s, active = loop.time(), [each for each in links.values() if each.link.active or each.path.in_burst]
            samples = [each.observe(now_s - before_s) for each in active]
            if samples and self._paces:
                self._scheduler.pace.observe(now_s, together(samples))
                known, told = self._scheduler.pace.bits_per_s, self._shown_bits_per_s
                if math.isfinite(known) and abs(known - told) > _WORTH_TELLING * told:
                    self._shown_bits_per_s = known
            for opened in active:
                self._adjust_number(opened)
                opened.describe(self._shown_bits_per_s)
            before_s = now_s

    def _adjust_number(self, opened: OpenedLink) -> None:
        """Adjust the number of connections to what the path needs, unless the user chose it."""
        request, link, path = opened.request, opened.link, opened.path
        if request.chosen or opened.route.single:
            return
        wanted = link.wanted if opened.dials else 0
        if path.loss is not None and path.burst_bytes and self._slows_down:
            bandwidth, hosts = path.bandwidth_bits_per_s, len(self._links)
            own = connections_worth_having(path.burst_bytes, path.least_round_trip_s, path.loss, bandwidth, hosts)
            wanted = max(wanted, own)
        if opened.dials:
            self._keep_at_least(opened, wanted)
        elif wanted > max(opened.told, len(link.connections)) and link.connections:
            opened.told = wanted
            next(iter(link.connections.values())).want(wanted)

    async def _keep(self, opened: OpenedLink, index: int) -> None:
        """Maintain one connection: dial it, and dial it again when it ends."""
        clock = self._connections.loop
        times = (_RETRY_S, self._patience_s / _RETRY_PART) if index == 0 else (_RETRY_MORE_S, _RETRY_MORE_AT_MOST_S)
        backoff = Backoff(*times, seed=f"{self._connections.rank} {opened.request.key} {index}")
        while not opened.link.ended:
            began_s = clock.time()
            await self._dial(opened, index)
            if clock.time() - began_s > backoff.upper_s:  # it was open for a while
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _dial(self, opened: OpenedLink, index: int) -> None:
        request, link = opened.request, opened.link
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(request.timeout_s):
                reader, writer = await self.open_connection(opened)
                me = {"rank": self._connections.rank, "connection": index}
                writer.write(pack({"kind": "link", "key": request.key, **me}))
                answer, _ = await read_frame(reader)
                if answer["kind"] == "refused":
                    self._end(opened, Fields(answer).words("reason"))
                    return
                more = Fields(answer).integer("streams", 1, MOST_CONNECTIONS)
            self._keep_at_least(opened, max(more, _initial_connections(request, writer)))
            await self._use(opened, index, reader, writer)
        except (OSError, EOFError, TimeoutError, TransportError, ValueError) as error:
            link.why = str(error) or type(error).__name__
            if not link.connections:
                self._end_if_abandoned(opened)
        finally:
            if writer is not None:
                writer.close()

    async def _serve(
        self, message: dict[str, Any], blob: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        fields, identity = Fields(message), self._connections.streams.identity(writer)
        key, rank, index = (
            fields.text("key"),
            fields.rank("rank"),
            fields.integer("connection", 0, MOST_CONNECTIONS - 1),
        )
        if identity and identity != str(self.address_of(rank)):
            return
        async with self._changed:
            try:
                await within(self._patience_s, self._changed.wait_for(lambda: key in self._links))
            except TimeoutError:
                writer.write(pack({"kind": "refused", "reason": "the other side does not know this link"}))
                await writer.drain()
                return
        opened = self._links[key]
        request = opened.request
        if request.rank != rank or opened.dials or opened.link.ended:
            return
        self._connections.vouch(writer)
        writer.write(pack({"kind": "link", "streams": _initial_connections(request, writer)}))
        await self._use(opened, index, reader, writer)

    async def _use(
        self, opened: OpenedLink, index: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Let a connection carry messages until it ends."""
        transport = writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        reader.feed_eof()  # so that `read` returns what has already arrived without waiting for more
        already = await reader.read()
        connection = PayloadConnection(opened.link, transport, self._patience_s, compresses=self._compresses)
        try:
            connection.begin(already)
            opened.link.add(index, connection)
            await connection.ended
        finally:
            connection.end()
            self._end_if_abandoned(opened)

    def _end_if_abandoned(self, opened: OpenedLink) -> None:
        """End the link unless a connection is made within ``patience_s``; do nothing while it has one."""
        link = opened.link
        if not link.ended and not link.connections:
            self._connections.loop.call_later(self._patience_s, self._end_abandoned, opened, link.uses)

    def _end_abandoned(self, opened: OpenedLink, uses: int) -> None:
        link = opened.link
        if link.ended or link.connections or link.uses != uses or not link.uses:
            return
        done = "it could not be reopened" if opened.dials else "the other side did not reconnect"
        self._end(opened, f"{link.why}, and {done} within {self._patience_s:g} s")


def _initial_connections(request: LinkRequest, writer: asyncio.StreamWriter) -> int:
    """Return the number of connections to start with once the first is open: one suffices over a short round trip."""
    counters = Counters.of(writer.get_extra_info("socket"))
    near = counters is not None and counters.round_trip_s < NEAR_S
    return 1 if near and not request.chosen else request.streams
