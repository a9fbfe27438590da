"""Payload links over the streams of a network. The lower rank opens them, and opens them again when they break."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any

from torch import Tensor

from diloco.errors import TransportError
from diloco.protocol.registry import Entry
from diloco.transport.address import Address
from diloco.transport.peers.connection_manager import ConnectionManager
from diloco.transport.peers.data_link import LinkRequest
from diloco.transport.peers.reliable_stream import ReliableStream, StreamWork
from diloco.transport.peers.streams import pack, read_frame, within

__all__ = ["LinkManager", "ReliableLink"]

_RETRY_S = 0.2


class _LinkStream:
    """One stream of a link, over all connections that carry it."""

    def __init__(self, request: LinkRequest, index: int, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self.index = index
        self.messages = ReliableStream(loop)
        self.settled = asyncio.Event()  # connected for the first time, or ended
        self.why = "the other side did not come"
        self.uses = 0
        self.running: asyncio.Task[Any] | None = None
        self.keeping: asyncio.Task[None] | None = None

    async def use(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, theirs: int) -> None:
        """Carry messages over a connection until it breaks."""
        self.uses += 1
        self.settled.set()
        why = await self.messages.run(reader, writer, theirs)
        if not self.messages.ended:
            self.why = why

    async def leave(self) -> None:
        """End the connection in use, so that another can take its place."""
        while self.running is not None and not self.running.done():  # others may be waiting for the same
            self.running.cancel()
            await asyncio.wait((self.running,))

    def end(self, why: str) -> None:
        """For good."""
        if self.messages.ended:
            return
        self.why = why
        self.messages.end(TransportError(f"a payload connection ended: {why}"))
        self.settled.set()
        for task in (self.running, self.keeping):
            if task is not None and task is not asyncio.current_task():
                task.cancel()


class ReliableLink:
    """Payload streams to one other rank, each with its own messages in order."""

    def __init__(self, manager: LinkManager, streams: Sequence[_LinkStream]) -> None:
        self._manager = manager
        self._streams = streams

    def send(self, values: Tensor, stream: int, tag: int) -> StreamWork:
        return self._streams[stream % len(self._streams)].messages.send(values, tag)

    def receive(self, values: Tensor, stream: int, tag: int) -> StreamWork:
        return self._streams[stream % len(self._streams)].messages.receive(values, tag)

    def close(self) -> None:
        """End the streams; for any thread."""
        self._manager.close(self._streams)


class LinkManager:
    """All payload links of one rank.

    Args:
        connections: whose loop does the work, and at which the others' connections come in.
        entries: rank -> its entry; kept up to date by the caller.
        patience_s: how long a link may be broken before it ends.
    """

    def __init__(self, connections: ConnectionManager, entries: Mapping[int, Entry], patience_s: float) -> None:
        self._connections = connections
        self._entries = entries
        self._patience_s = patience_s
        self._streams: dict[tuple[str, int], _LinkStream] = {}
        self._opened = asyncio.Condition()
        connections.services["link"] = self._serve

    def open_link(self, request: LinkRequest) -> ReliableLink:
        """As `OpenLink` says."""
        opening = self._open(request)
        try:
            return self._connections.call(opening)
        except (CancelledError, RuntimeError) as error:
            opening.close()
            raise TransportError(f"the payload connection {request.key} was not made: the transport closed") from error

    def close(self, streams: Sequence[_LinkStream]) -> None:
        """End the streams of a link; for any thread."""
        for each in streams:
            self._connections.post(self._end, each, "it was closed")

    async def _open(self, request: LinkRequest) -> ReliableLink:
        streams = [_LinkStream(request, index, self._connections.loop) for index in range(request.streams)]
        async with self._opened:
            self._streams.update({(request.key, each.index): each for each in streams})
            self._opened.notify_all()
        if request.first:
            for each in streams:
                each.keeping = asyncio.ensure_future(self._keep(each))
        with contextlib.suppress(TimeoutError):
            await within(request.timeout_s, _settled(streams))
        lacking = [each for each in streams if each.messages.ended or not each.settled.is_set()]
        if lacking:
            why = lacking[0].why
            for each in streams:
                self._end(each, why)
            raise TransportError(f"the payload connection {request.key} could not be made: {why}")
        return ReliableLink(self, streams)

    def _end(self, stream: _LinkStream, why: str) -> None:
        if not stream.messages.ended:
            self._streams.pop((stream.request.key, stream.index), None)
            stream.end(why)

    async def _keep(self, stream: _LinkStream) -> None:
        """Connect again and again; give up when it takes too long."""
        loop = asyncio.get_running_loop()
        broken_s, patience_s = loop.time(), stream.request.timeout_s
        while not stream.messages.ended:
            uses = stream.uses
            stream.running = asyncio.ensure_future(self._dial(stream, broken_s + patience_s - loop.time()))
            await asyncio.wait((stream.running,))
            if stream.uses > uses:
                broken_s, patience_s = loop.time(), self._patience_s
            elif loop.time() + _RETRY_S > broken_s + patience_s:
                self._end(stream, f"{stream.why}, and it could not be made again in {patience_s:g} s")
            else:
                await asyncio.sleep(_RETRY_S)

    async def _dial(self, stream: _LinkStream, left_s: float) -> None:
        try:
            opening = self._connections.open(self._address_of(stream.request.rank))
            reader, writer = await within(left_s, opening)
        except (OSError, TimeoutError) as error:
            stream.why = str(error) or type(error).__name__
            return
        asking = {"kind": "link", "key": stream.request.key, "stream": stream.index}
        try:
            writer.write(pack({**asking, "received": stream.messages.received, "rank": self._connections.rank}))
            answer, _ = await within(left_s, read_frame(reader))
            if answer["kind"] == "refused":
                self._end(stream, str(answer["reason"]))
            else:
                await stream.use(reader, writer, int(answer["received"]))
        except (OSError, EOFError, TimeoutError, TransportError, KeyError, ValueError, TypeError) as error:
            stream.why = str(error) or type(error).__name__
        finally:
            writer.close()

    async def _serve(
        self, message: dict[str, Any], blob: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        key, rank = (str(message["key"]), int(message["stream"])), int(message["rank"])
        identity = self._connections.streams.identity(writer)
        if identity and identity != str(self._address_of(rank)):
            return
        async with self._opened:
            try:
                await within(self._patience_s, self._opened.wait_for(lambda: key in self._streams))
            except TimeoutError:
                writer.write(pack({"kind": "refused", "reason": "the other side has no such link"}))
                await writer.drain()
                return
        stream = self._streams[key]
        if stream.request.rank != rank or stream.request.first:
            return
        await stream.leave()
        stream.running = asyncio.current_task()
        writer.write(pack({"kind": "link", "received": stream.messages.received}))
        try:
            await stream.use(reader, writer, int(message["received"]))
        finally:
            if not stream.messages.ended:
                self._connections.loop.call_later(self._patience_s, self._give_up, stream, stream.uses)

    def _give_up(self, stream: _LinkStream, uses: int) -> None:
        if stream.uses == uses:
            self._end(stream, f"{stream.why}, and the other side did not come again in {self._patience_s:g} s")

    def _address_of(self, rank: int) -> Address:
        """Of a rank that is connected, or has been known; `OSError` for any other."""
        connected = self._connections.get(rank)
        if connected is not None:
            return connected.address
        if rank not in self._entries:
            raise OSError(f"nobody knows where rank {rank} is")
        return self._connections.streams.address(self._entries[rank].address)


async def _settled(streams: Sequence[_LinkStream]) -> None:
    for each in streams:
        await each.settled.wait()
