"""What control connections need of a network, whatever it is."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from diloco.errors import TransportError
from diloco.transport.address import Address, parse_address

__all__ = ["Accept", "Streams", "TcpStreams", "hear_out", "stop_listening", "within"]

T = TypeVar("T")

_LOW_DELAY = 0x10  # of the type-of-service byte: routers that know it let these packets pass payloads

Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Takes over a connection that somebody opened, and closes it."""


class Streams(Protocol):
    """Connections of bytes, made in the thread of an event loop."""

    async def listen(self, accept: Accept, *where: Any) -> Address:
        """From now on hand every connection that somebody opens to ``accept``; where others reach this.

        Raises:
            TransportError: if this machine can't be listened on there.
        """

    async def open(self, address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to who listens at ``address``.

        Raises:
            ConnectionRefusedError: if nobody listens there, and somebody of that machine says so.
            OSError: if it can't be reached.
        """

    def address(self, text: str) -> Address:
        """What ``str`` of an address of this network gave, as an address."""

    def tune(self, writer: asyncio.StreamWriter, silence_s: float) -> None:
        """Make a connection one for small messages: at once, and noticed when its way is dead for long."""

    def identity(self, writer: asyncio.StreamWriter) -> str:
        """Who is at the other end of a connection, as an address, where the network proves it; else ""."""

    async def refuse(self) -> None:
        """Accept nothing any more."""

    async def close(self) -> None:
        """End what is left, after every connection has been closed."""


async def stop_listening(server: asyncio.Server) -> None:
    """Close a server when every connection that has come to it is known to its protocol.

    asyncio loses one, and leaves it open, whose server closes between its coming and the making of its transport.
    """
    for listening in server.sockets:
        asyncio.get_running_loop().remove_reader(listening)
    for _ in range(2):
        await asyncio.sleep(0)
    server.close()


class TcpStreams:
    """One listening port, and connections to those of others.

    Args:
        kept: a socket that listens already, as `keep` gave it; it is closed with these streams.
    """

    def __init__(self, kept: socket.socket | None = None) -> None:
        self._server: asyncio.Server | None = None
        self._kept = kept

    def keep(self) -> socket.socket:
        """The listening socket, for streams that take the place of these ones: its port refuses nobody meanwhile.

        Who is refused takes this process for one that has ended.
        """
        assert self._server is not None, "listen comes first"
        return self._server.sockets[0].dup()

    async def listen(self, accept: Accept, host: str, ports: range, advertised: str) -> Address:
        """Accept connections on the first free port of ``ports``.

        Args:
            accept: takes them over.
            host: an address of this machine; "": all of them.
            ports: to try.
            advertised: the host that others are told.

        Raises:
            TransportError: if none is free, or the host is not one of this machine's.
        """
        if self._kept is not None:
            self._server = await asyncio.start_server(accept, sock=self._kept)
            return Address(advertised, self._server.sockets[0].getsockname()[1])
        for port in ports:
            try:
                self._server = await asyncio.start_server(accept, host or None, port)
                break
            except OSError as error:
                if port == ports[-1]:
                    tried = f"port {port}" if len(ports) == 1 else f"any port from {ports[0]} to {port}"
                    raise TransportError(
                        f"{host or 'this machine'} can't be listened on at {tried}: {error}. Another port "
                        "(transport.ports), or an address of this machine (transport.host), would work. "
                        "Nothing was started."
                    ) from error
        assert self._server is not None
        return Address(advertised, self._server.sockets[0].getsockname()[1])

    async def open(self, address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(address.host, address.port)

    def address(self, text: str) -> Address:
        return parse_address(text)

    def tune(self, writer: asyncio.StreamWriter, silence_s: float) -> None:
        """Small packets at once, and a dead way noticed by the kernel too."""
        connection = writer.get_extra_info("socket")
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, _LOW_DELAY)
        elif connection.family == socket.AF_INET6:
            connection.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, _LOW_DELAY)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * silence_s))

    def identity(self, writer: asyncio.StreamWriter) -> str:
        """TCP proves nothing."""
        return ""

    async def refuse(self) -> None:
        if self._server is not None:
            await stop_listening(self._server)

    async def close(self) -> None:
        """Nothing is left."""


async def within(seconds: float | None, awaited: Awaitable[T]) -> T:
    """As ``asyncio.wait_for``, which in Python 3.11 forgets that its task is to end when that comes in the moment in
    which what it waits for is done: the task then goes on, and whoever waits for its end waits for ever.

    Raises:
        TimeoutError: if it takes longer.
    """
    async with asyncio.timeout(seconds):
        return await awaited


_MOST_BYTES = 1 << 20
"""More than any peer's last words; what is beyond is not read."""


def hear_out(transport: asyncio.BaseTransport) -> None:
    """From now on what has arrived is handed on before a connection that broke counts as ended.

    Args:
        transport: of a connection over a socket, whose protocol is that of asyncio's streams.
    """
    if isinstance(transport, asyncio.Transport):
        protocol = transport.get_protocol()
        assert isinstance(protocol, asyncio.Protocol)
        transport.set_protocol(_LastWords(transport, protocol))


class _LastWords(asyncio.Protocol):
    """Stands before another protocol."""

    def __init__(self, transport: asyncio.Transport, protocol: asyncio.Protocol) -> None:
        self._transport = transport
        self._protocol = protocol

    def data_received(self, data: bytes) -> None:
        self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, OSError) and (words := self._unread()):
            self._protocol.data_received(words)
            exc = None  # else the reader would raise before it gives them out
        self._protocol.connection_lost(exc)

    def _unread(self) -> bytes:
        words = bytearray()
        socket = self._transport.get_extra_info("socket")
        with contextlib.suppress(OSError), socket.dup() as mine:  # what asyncio has given out can't be read from
            mine.setblocking(False)
            while len(words) < _MOST_BYTES and (more := mine.recv(_MOST_BYTES)):
                words += more
        return bytes(words)
