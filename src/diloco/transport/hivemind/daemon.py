"""The libp2p daemon of a peer: streams to others and from them.

Hivemind starts and ends it. What it is asked goes over connections of our own, since those of Hivemind's client stay
open where something goes wrong.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from diloco.transport.hivemind.engine import load_engine
from diloco.transport.peers.streams import stop_listening
from diloco.transport.peers.within import within

__all__ = ["Daemon", "Handler"]

_ENDING_S = 2.0
Handler = Callable[[str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Takes over a stream that the peer named first has opened."""


class Daemon:
    """A running daemon.

    Args:
        p2p: as Hivemind started it.
        protocol: name of the streams.
    """

    def __init__(self, p2p: Any, protocol: str) -> None:
        self.p2p = p2p
        self._protocol = protocol
        self._folder: Path | None = None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Future[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def addresses(self) -> tuple[str, ...]:
        """Multiaddresses at which this peer can be reached, its identity included; maybe none."""
        engine = load_engine()
        answer = await self._ask_once(self._request("IDENTIFY"))
        me = f"/p2p/{self.p2p.peer_id}"
        return tuple(f"{engine.Multiaddr(each)}{me}" for each in answer.identify.addrs)

    async def connect(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Connect to a peer at these multiaddresses, its identity left out.

        Raises:
            OSError: if it can't be reached.
        """
        engine = load_engine()
        asked = engine.p2pd_pb2.ConnectRequest(
            peer=_bytes_of(peer_id), addrs=[engine.Multiaddr(each).to_bytes() for each in addresses]
        )
        await self._ask_once(self._request("CONNECT", connect=asked), about=peer_id)

    async def open(self, peer_id: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A stream to another peer.

        Raises:
            OSError: if it can't be reached.
        """
        asked = load_engine().p2pd_pb2.StreamOpenRequest(peer=_bytes_of(peer_id), proto=[self._protocol])
        _, reader, writer = await self._ask(self._request("STREAM_OPEN", streamOpen=asked), about=peer_id)
        return reader, writer

    async def handle(self, handler: Handler) -> None:
        """Hand over every stream that is opened to this peer."""
        engine = load_engine()
        self._folder = Path(tempfile.mkdtemp(prefix="diloco-"))

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                info = engine.p2pd_pb2.StreamInfo()
                await engine.read_pbmsg_safe(reader, info)
                await handler(str(engine.PeerID(info.peer)), reader, writer)
            except (OSError, EOFError, asyncio.CancelledError):
                writer.close()  # of a daemon that ends, or of a peer that does

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._writers = {each for each in self._writers if not each.is_closing()} | {writer}
            self._tasks.add(task := asyncio.ensure_future(accept(reader, writer)))
            task.add_done_callback(self._tasks.discard)

        self._server = await asyncio.start_unix_server(accepted, self._folder / "streams")
        listening = engine.Multiaddr(f"/unix{self._folder}/streams").to_bytes()
        asked = engine.p2pd_pb2.StreamHandlerRequest(addr=listening, proto=[self._protocol], balanced=False)
        await self._ask_once(self._request("STREAM_HANDLER", streamHandler=asked))

    async def close(self) -> None:
        """End the daemon, and every stream with it."""
        if self._server is not None:
            await stop_listening(self._server)
        for _ in range(4):  # turns of the loop, in which connections that have just come get to be known
            await asyncio.sleep(0)
        for task in list(self._tasks):
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()
        ending = {task for task in (self.p2p._listen_task, self.p2p._reader_task) if task is not None} | self._tasks
        try:
            await within(_ENDING_S, self.p2p.shutdown())
        except TimeoutError:
            self.p2p._child.kill()
            await self.p2p._child.wait()
        if ending:
            await asyncio.wait(ending, timeout=_ENDING_S)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _request(self, kind: str, **fields: Any) -> Any:
        request = load_engine().p2pd_pb2.Request
        return request(type=getattr(request, kind), **fields)

    async def _ask_once(self, request: Any, about: str = "the daemon") -> Any:
        answer, _, writer = await self._ask(request, about)
        writer.close()
        return answer

    async def _ask(self, request: Any, about: str) -> tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]:
        engine = load_engine()
        reader, writer = await self.p2p._client.control.daemon_connector.open_connection()
        try:
            await engine.write_pbmsg(writer, request)
            answer = engine.p2pd_pb2.Response()
            await engine.read_pbmsg_safe(reader, answer)
            engine.raise_if_failed(answer)
        except (engine.P2PDaemonError, EOFError) as error:
            writer.close()
            raise OSError(f"{about} can't be reached: {' '.join(str(error).split())}") from error
        except BaseException:
            writer.close()
            raise
        return answer, reader, writer


def _bytes_of(peer_id: str) -> bytes:
    try:
        data: bytes = load_engine().PeerID.from_base58(peer_id).to_bytes()
    except ValueError as error:
        raise OSError(f"{peer_id} is no peer's identity ({error})") from error
    return data
