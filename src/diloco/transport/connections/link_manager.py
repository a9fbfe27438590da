"""Payload links over the streams of a network. One end opens the connections and reopens those that break."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated

from msgspec import Meta

from diloco.errors import TransportError
from diloco.membership import Rank
from diloco.protocol import Refused, WireMessage
from diloco.transport.address import Address
from diloco.transport.connections.backoff import Backoff
from diloco.transport.connections.connection_manager import ConnectionManager
from diloco.transport.connections.opened_link import LinkRequest, OpenedLink, Route
from diloco.transport.connections.pace import UplinkMeter
from diloco.transport.connections.payload_connection import PayloadConnection
from diloco.transport.connections.reliable_link import ReliableLink
from diloco.transport.connections.streams import Stream, pack, read_frame, within

__all__ = ["MOST_CONNECTIONS", "LinkManager"]

MOST_CONNECTIONS = 64  # of one link

_RETRY_S, _RETRY_PART = (
    0.2,
    4,
)  # pauses before the first connection of a link is dialled again; at most the patience / 4
_RETRY_MORE_S, _RETRY_MORE_AT_MOST_S = 1.0, 30.0  # the same for each other one, which are as many as 63

_PLAIN = Route("TCP")


class LinkAsked(WireMessage, tag="link"):
    """The sender opens a payload connection of a link."""

    key: Annotated[str, Meta(max_length=200)]  # names the link
    rank: Rank  # of the sender
    connection: Annotated[int, Meta(ge=0, lt=MOST_CONNECTIONS)]


class Linked(WireMessage):
    """The connection is part of the link."""


class LinkManager:
    """The payload links of one rank.

    Args:
        patience_s: How long a link may have no connection before it ends.
        compresses: Whether to compress payloads on slow paths; see `PayloadConnection`.
    """

    def __init__(self, connections: ConnectionManager, patience_s: float, *, compresses: bool = True) -> None:
        self._meter = UplinkMeter()
        self._compresses = compresses
        self._connections = connections
        self._patience_s = patience_s
        self._links: dict[str, OpenedLink] = {}
        self._changed = asyncio.Condition()
        connections.services[LinkAsked] = self._serve

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
        link = ReliableLink(self._connections.loop, self._meter, route.name)
        opened = OpenedLink(request, route, link)
        async with self._changed:
            if before := self._links.get(request.key):
                before.link.end("it was opened again")
            self._links[request.key] = opened
            self._changed.notify_all()
        opened.watching = self._connections.begin(self._forget_ended(opened))
        if opened.dials:
            self._keep_at_least(opened, 1)
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
        """Maintain at least ``number`` connections from now on."""
        for index in range(len(opened.keeping), number):
            opened.keeping.append(self._connections.begin(self._keep(opened, index)))

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
                writer.write(pack(LinkAsked(request.key, self._connections.rank, index)))
                answer, _ = await read_frame(reader, Linked | Refused)
                if isinstance(answer, Refused):
                    self._end(opened, answer.reason)
                    return
            await self._use(opened, index, reader, writer)
        except (OSError, EOFError, TimeoutError, TransportError, ValueError) as error:
            link.why = str(error) or type(error).__name__
            if not link.connections:
                self._end_if_abandoned(opened)
        finally:
            if writer is not None:
                writer.close()

    async def _serve(self, asked: LinkAsked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        identity, key, rank, index = self._connections.streams.identity(writer), asked.key, asked.rank, asked.connection
        if identity and identity != str(self.address_of(rank)):
            return
        async with self._changed:
            try:
                await within(self._patience_s, self._changed.wait_for(lambda: key in self._links))
            except TimeoutError:
                writer.write(pack(Refused("the other side does not know this link")))
                await writer.drain()
                return
        opened = self._links[key]
        request = opened.request
        if request.rank != rank or opened.dials or opened.link.ended:
            return
        self._connections.vouch(writer)
        writer.write(pack(Linked()))
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
            if opened.dials and not connection.near and not opened.route.single:
                self._keep_at_least(opened, opened.request.streams)
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
