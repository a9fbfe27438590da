"""What control connections need of a network, whatever it is.

Control messages on the wire: a small JSON object and a blob, both with their sizes in front. No pickle.

::

    4 bytes  b"DLC1"      protocol and its version
    4 bytes  json size    big-endian; at most `MAX_JSON_BYTES`, of a stranger `STRANGERS_BYTES`
    8 bytes  blob size    big-endian; at most `MAX_BLOB_BYTES`, of a stranger `STRANGERS_BLOB_BYTES`
    json, blob

Sizes are checked before anything is allocated.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

from diloco.errors import TransportError
from diloco.protocol.fields import json_object, room_bytes
from diloco.protocol.registry import Entry
from diloco.transport.address import Address
from diloco.transport.secret import TurnedAwayError
from diloco.units import visible

__all__ = [
    "ASKS",
    "MAX_BLOB_BYTES",
    "MAX_JSON_BYTES",
    "PROTOCOL",
    "STRANGERS_BLOB_BYTES",
    "STRANGERS_BYTES",
    "Accept",
    "Stream",
    "Streams",
    "hear_out",
    "pack",
    "read_body",
    "read_frame",
    "read_head",
    "unpack_head",
    "within",
]

T = TypeVar("T")

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]  # a connection, as what comes over it and what goes

Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Takes over a connection that somebody opened, and closes it."""


class Streams(Protocol):
    """Connections of bytes, made in the thread of an event loop."""

    async def listen(self, accept: Accept, *where: Any) -> Address:
        """From now on hand every connection that somebody opens to ``accept``; where others reach this.

        Raises:
            TransportError: if this machine can't be listened on there.
        """

    async def open(self, address: Address) -> Stream:
        """A connection to who listens at ``address``.

        Raises:
            ConnectionRefusedError: if nobody listens there, and somebody of that machine says so.
            OSError: if it can't be reached.
        """

    def address(self, text: str) -> Address:
        """What ``str`` of an address of this network gave, as an address."""

    def payload_address(self, entry: Entry) -> Address:
        """Where a rank takes payload connections."""

    def calls_back_at(self, entry: Entry) -> Address | None:
        """Where to connect to a rank that asks for it, as it can't do so itself; None: here nobody is called back."""

    def tune(self, writer: asyncio.StreamWriter, silence_s: float) -> None:
        """Make a connection one for small messages: at once, and noticed when its way is dead for long."""

    async def admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether who has opened a connection may: comes before anything else of it is read.

        Raises:
            OSError, EOFError: the connection ends.
        """

    def identity(self, writer: asyncio.StreamWriter) -> str:
        """Who is at the other end of a connection, as an address, where the network proves it; else ""."""

    def origins(self, writer: asyncio.StreamWriter) -> tuple[str, ...]:
        """Whom and where a connection comes from, as far as the network tells: each has so many places and no more."""

    async def refuse(self) -> None:
        """Accept nothing any more."""

    async def close(self) -> None:
        """End what is left, after every connection has been closed."""


async def within(seconds: float | None, awaited: Awaitable[T]) -> T:
    """As ``asyncio.wait_for``, which in Python 3.11 forgets that its task is to end when that comes in the moment in
    which what it waits for is done: the task then goes on, and whoever waits for its end waits for ever.

    Raises:
        TimeoutError: if it takes longer.
    """
    async with asyncio.timeout(seconds):
        return await awaited


_MOST_BYTES = 1 << 20  # more than any peer's last words; what is beyond is not read


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
ASKS = b"DLC?"  # what whoever listens begins with, instead of `PROTOCOL`, where it asks for a secret
MAX_JSON_BYTES = 1 << 20
MAX_BLOB_BYTES = 1 << 20
STRANGERS_BYTES = 1 << 14
STRANGERS_BLOB_BYTES = 1 << 12  # of the JSON of whoever has not become a member, and of what any peer says of itself

_MOST_KIND = 64
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
            f"a control message of {len(text)} + {len(blob)} bytes was to be sent; at most "
            f"{MAX_JSON_BYTES} + {MAX_BLOB_BYTES} are allowed. Nothing was sent."
        )
    return b"".join((_HEAD.pack(PROTOCOL, len(text), len(blob)), text, blob))


def unpack_head(
    head: bytes, most_json_bytes: int = MAX_JSON_BYTES, most_blob_bytes: int = MAX_BLOB_BYTES
) -> tuple[int, int]:
    """Sizes of the JSON text and the blob that follow.

    Raises:
        TransportError: if the sender speaks another protocol, or announces more than is taken.
        TurnedAwayError: if it asks for a secret.
    """
    protocol, json_bytes, blob_bytes = _HEAD.unpack(head)
    if protocol == ASKS:
        raise TurnedAwayError("the other side asks for a secret (transport.secret_file), and none was given")
    if protocol != PROTOCOL:
        raise TransportError(
            f"something that begins with {protocol!r} came in where {PROTOCOL!r} was due; the sender is no diloco of "
            "this protocol version. The connection was closed."
        )
    if json_bytes > most_json_bytes or blob_bytes > most_blob_bytes:
        raise TransportError(
            f"a message of {json_bytes} + {blob_bytes} bytes was announced; {most_json_bytes} + {most_blob_bytes} are "
            "taken. The connection was closed."
        )
    return json_bytes, blob_bytes


async def read_frame(
    reader: asyncio.StreamReader, most_json_bytes: int = MAX_JSON_BYTES, most_blob_bytes: int = MAX_BLOB_BYTES
) -> tuple[dict[str, Any], bytes]:
    """The next message and its blob.

    Args:
        most_json_bytes, most_blob_bytes: larger ones are refused when they are announced.

    Raises:
        TransportError: for anything malformed.
        asyncio.IncompleteReadError, OSError: when the connection ends.
    """
    message, blob, _ = await read_body(reader, await read_head(reader), most_json_bytes, most_blob_bytes)
    return message, blob


async def read_head(reader: asyncio.StreamReader) -> bytes:
    """The head of the next message; raises as `read_frame`."""
    return await reader.readexactly(_HEAD.size)


async def read_body(
    reader: asyncio.StreamReader, head: bytes, most_json_bytes: int, most_blob_bytes: int
) -> tuple[dict[str, Any], bytes, int]:
    """What follows a head: the message, its blob, and what both take of memory; as `read_frame`."""
    json_bytes, blob_bytes = unpack_head(head, most_json_bytes, most_blob_bytes)
    text = await reader.readexactly(json_bytes)
    blob = await reader.readexactly(blob_bytes) if blob_bytes else b""
    try:
        message = json_object(text)
    except ValueError as error:
        words = visible(str(error))
        raise TransportError(f"a message that can't be read came in ({words}). The connection was closed.") from error
    if not isinstance(message.get("kind"), str) or len(message["kind"]) > _MOST_KIND:
        raise TransportError(f"a message without a kind came in: {text[:80]!r}. The connection was closed.")
    return message, blob, room_bytes(text) + len(blob)
