"""Opening payload links over the streams of a network, and opening them again when they break."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any

from torch import Tensor

from diloco.errors import TransportError
from diloco.transport.address import Address
from diloco.transport.peers.connection_manager import ConnectionManager
from diloco.transport.peers.data_link import LinkRequest
from diloco.transport.peers.frames import pack, read_frame
from diloco.transport.peers.reliable_stream import ReliableStream, StreamWork
from diloco.transport.peers.streams import within

__all__ = ["LinkManager", "ReliableLink"]

_RETRY_S = 0.2


class ReliableLink:
    """Payload streams to one other rank.

    Args:
        streams: each with its own messages in order.
        close: ends them; for any thread.
    """

    def __init__(self, streams: Sequence[ReliableStream], close: Callable[[], None]) -> None:
        self._streams = streams
        self.close = close

    def send(self, values: Tensor, stream: int, tag: int) -> StreamWork:
        return self._streams[stream % len(self._streams)].send(values, tag)

    def receive(self, values: Tensor, stream: int, tag: int) -> StreamWork:
        return self._streams[stream % len(self._streams)].receive(values, tag)


class _Line:
    """One stream of a link, from its first connection to its last."""

    def __init__(self, request: LinkRequest, index: int, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self.index = index
        self.stream = ReliableStream(loop, self._note)
        self.settled = asyncio.Event()  # connected for the first time, or given up
        self.why = "the other side did not come"
        self.uses = 0
        self.running: asyncio.Task[Any] | None = None
        self.keeping: asyncio.Task[None] | None = None

    def _note(self, why: str) -> None:
        self.why = why

    async def leave(self) -> None:
        """End the connection that is in use, so that another one can take its place."""
        while self.running is not None and not self.running.done():  # others may be waiting for the same
            self.running.cancel()
            await asyncio.wait((self.running,))


class LinkManager:
    """All payload links of one rank. The lower rank of a link opens its connections, and opens them again.

    Args:
        connections: whose loop does the work, and at which the others' connections come in.
        address_of: rank -> where it listens.
        patience_s: how long a link may be broken before it ends.
    """

    def __init__(self, connections: ConnectionManager, address_of: Callable[[int], Address], patience_s: float) -> None:
        self._connections = connections
        self._address_of = address_of
        self._patience_s = patience_s
        self._lines: dict[tuple[str, int], _Line] = {}
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

    async def _open(self, request: LinkRequest) -> ReliableLink:
        lines = [_Line(request, index, self._connections.loop) for index in range(request.streams)]
        async with self._opened:
            self._lines.update({(request.key, line.index): line for line in lines})
            self._opened.notify_all()
        if request.first:
            for line in lines:
                line.keeping = asyncio.ensure_future(self._keep(line))
        with contextlib.suppress(TimeoutError):
            await within(request.timeout_s, _settled(lines))
        lacking = [line for line in lines if line.stream.ended or not line.settled.is_set()]
        if lacking:
            self._end(lines, lacking[0].why)
            raise TransportError(f"the payload connection {request.key} could not be made: {lacking[0].why}")
        return ReliableLink(
            [line.stream for line in lines], lambda: self._connections.post(self._end, lines, "it was closed")
        )

    def _end(self, lines: Sequence[_Line], why: str) -> None:
        for line in lines:
            if line.stream.ended:
                continue
            self._lines.pop((line.request.key, line.index), None)
            line.why = why
            line.stream.end(TransportError(f"a payload connection ended: {why}"))
            line.settled.set()
            for task in (line.running, line.keeping):
                if task is not None and task is not asyncio.current_task():
                    task.cancel()

    async def _keep(self, line: _Line) -> None:
        """Connect, again and again; give up when it takes too long."""
        loop = asyncio.get_running_loop()
        broken_s, patience_s = loop.time(), line.request.timeout_s
        while not line.stream.ended:
            uses = line.uses
            line.running = asyncio.ensure_future(self._dial(line, broken_s + patience_s - loop.time()))
            await asyncio.wait((line.running,))
            if line.uses > uses:
                broken_s, patience_s = loop.time(), self._patience_s
            elif loop.time() + _RETRY_S > broken_s + patience_s:
                self._end([line], f"{line.why}, and it could not be made again in {patience_s:g} s")
            else:
                await asyncio.sleep(_RETRY_S)

    async def _dial(self, line: _Line, left_s: float) -> None:
        try:
            opening = self._connections.open(self._address_of(line.request.rank))
            reader, writer = await within(left_s, opening)
        except (OSError, TimeoutError) as error:
            line.why = str(error) or type(error).__name__
            return
        asking = {"kind": "link", "key": line.request.key, "stream": line.index, "received": line.stream.received}
        try:
            writer.write(pack({**asking, "rank": self._connections.rank}))
            answer, _ = await within(left_s, read_frame(reader))
            if answer["kind"] == "refused":
                self._end([line], str(answer["reason"]))
            else:
                await self._use(line, reader, writer, int(answer["received"]))
        except (OSError, EOFError, TimeoutError, TransportError, KeyError, ValueError, TypeError) as error:
            line.why = str(error) or type(error).__name__
        finally:
            writer.close()

    async def _use(self, line: _Line, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, theirs: int) -> None:
        line.uses += 1
        line.settled.set()
        await line.stream.run(reader, writer, theirs)

    async def _serve(
        self, message: dict[str, Any], blob: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        key, rank = (str(message["key"]), int(message["stream"])), int(message["rank"])
        identity = self._connections.streams.identity(writer)
        if identity and identity != str(self._address_of(rank)):
            return
        async with self._opened:
            try:
                await within(self._patience_s, self._opened.wait_for(lambda: key in self._lines))
            except TimeoutError:
                writer.write(pack({"kind": "refused", "reason": "the other side has no such link"}))
                await writer.drain()
                return
        line = self._lines[key]
        if line.request.rank != rank or line.request.first:
            return
        await line.leave()
        line.running = asyncio.current_task()
        writer.write(pack({"kind": "link", "received": line.stream.received}))
        try:
            await self._use(line, reader, writer, int(message["received"]))
        finally:
            if not line.stream.ended:
                self._connections.loop.call_later(self._patience_s, self._give_up, line, line.uses)

    def _give_up(self, line: _Line, uses: int) -> None:
        if line.uses == uses:
            self._end([line], f"{line.why}, and the other side did not come again in {self._patience_s:g} s")


async def _settled(lines: Sequence[_Line]) -> None:
    for line in lines:
        await line.settled.wait()
