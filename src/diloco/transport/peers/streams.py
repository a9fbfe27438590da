"""What control connections need of a network, whatever it is.

Control messages on the wire: a small JSON object and a blob, both with their sizes in front. No pickle.

::

    4 bytes  b"DLC1"      protocol and its version
    4 bytes  json size    big-endian; at most `MAX_JSON_BYTES`
    8 bytes  blob size    big-endian; at most `MAX_BLOB_BYTES`
    json, blob

Sizes are checked before anything is allocated.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

from diloco.errors import TransportError
from diloco.transport.address import Address, parse_address

__all__ = [
    "MAX_BLOB_BYTES",
    "MAX_JSON_BYTES",
    "PROTOCOL",
    "Accept",
    "Streams",
    "TcpStreams",
    "hear_out",
    "pack",
    "read_frame",
    "stop_listening",
    "unpack_head",
    "within",
]

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
                        f"{host or 'this machine'} can't be listened on at {tried}: {error}. Choose another port "
                        "(transport.ports) or an address of this machine (transport.host). Nothing was started."
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


PROTOCOL = b"DLC1"
MAX_JSON_BYTES = 1 << 20
MAX_BLOB_BYTES = 1 << 24

_HEAD = struct.Struct(">4sIQ")


def pack(message: Mapping[str, Any], blob: bytes | memoryview = b"") -> bytes:
    """One frame.

    Raises:
        TransportError: if it is larger than a reader takes. Nothing was sent.

    >>> head = pack({"kind": "beat"})[:16]
    >>> unpack_head(head)
    (15, 0)
    """
    text = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > MAX_JSON_BYTES or len(blob) > MAX_BLOB_BYTES:
        raise TransportError(
            f"a control message of {len(text)} + {len(blob)} bytes was to be sent; {MAX_JSON_BYTES} + "
            f"{MAX_BLOB_BYTES} would work. Nothing was sent."
        )
    return b"".join((_HEAD.pack(PROTOCOL, len(text), len(blob)), text, blob))


def unpack_head(head: bytes) -> tuple[int, int]:
    """Sizes of the JSON text and the blob that follow.

    Raises:
        TransportError: if the sender speaks another protocol, or announces more than is taken.
    """
    protocol, json_bytes, blob_bytes = _HEAD.unpack(head)
    if protocol != PROTOCOL:
        raise TransportError(
            f"something that begins with {protocol!r} came in where {PROTOCOL!r} was due; the sender is no diloco of "
            "this protocol version. The connection was closed."
        )
    if json_bytes > MAX_JSON_BYTES or blob_bytes > MAX_BLOB_BYTES:
        raise TransportError(
            f"a message of {json_bytes} + {blob_bytes} bytes was announced; {MAX_JSON_BYTES} + {MAX_BLOB_BYTES} are "
            "taken. The connection was closed."
        )
    return json_bytes, blob_bytes


async def read_frame(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    """The next message and its blob.

    Raises:
        TransportError: for anything malformed.
        asyncio.IncompleteReadError, OSError: when the connection ends.
    """
    json_bytes, blob_bytes = unpack_head(await reader.readexactly(_HEAD.size))
    text = await reader.readexactly(json_bytes)
    blob = await reader.readexactly(blob_bytes) if blob_bytes else b""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TransportError(f"a message that is no JSON came in ({error}). The connection was closed.") from error
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise TransportError(f"a message without a kind came in: {text[:80]!r}. The connection was closed.")
    return message, blob
