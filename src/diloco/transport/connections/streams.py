"""The format of control messages.

A control message is a small object in MessagePack (`diloco.protocol`) and a blob, both preceded by their sizes.

::

    4 bytes  b"DLC2"       protocol and its version
    4 bytes  message size  big-endian; at most `MAX_MESSAGE_BYTES`, from an unknown peer `UNKNOWN_PEER_BYTES`
    8 bytes  blob size     big-endian; at most `MAX_BLOB_BYTES`; where none is expected, 0
    message, blob

Sizes are checked before anything is allocated.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from diloco.errors import RendezvousError, TransportError
from diloco.protocol import MessageError, Refused, WireMessage, decode, encode
from diloco.transport.address import Address

T = TypeVar("T")

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]  # the two directions of a connection

Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Takes over a connection that another process opened, and closes it."""


class RefusedError(TransportError):
    """The other side of a connection refuses what it is asked for."""

    def __init__(self, answer: Refused) -> None:
        super().__init__(answer.reason)
        self.for_good = answer.for_good


async def within(seconds: float | None, awaited: Awaitable[T]) -> T:
    """Wait for ``awaited`` as ``asyncio.wait_for`` does, but never swallow a cancellation.

    In Python 3.11 ``asyncio.wait_for`` loses a cancellation that arrives at the moment at which the awaited operation
    completes. The task then continues, and a caller that waits for its end waits forever.
    """
    async with asyncio.timeout(seconds):
        return await awaited


PROTOCOL = b"DLC2"
MAX_MESSAGE_BYTES = 1 << 20
MAX_BLOB_BYTES = 1 << 20
UNKNOWN_PEER_BYTES = 1 << 14  # of a message, from a peer that is not a member, and for what any peer sends about itself

ANSWER_S = 10.0  # to a question

_HEAD = struct.Struct(">4sIQ")


def pack(message: object, blob: bytes | memoryview = b"") -> bytes:
    """Encode a message and its blob.

    >>> from diloco.protocol import Beat
    >>> pack(Beat())[:16]
    b'DLC2\\x00\\x00\\x00\\x0b\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00'
    """
    data = encode(message)
    if len(data) > MAX_MESSAGE_BYTES or len(blob) > MAX_BLOB_BYTES:
        raise TransportError(
            f"a control message of {len(data)} + {len(blob)} bytes exceeds the limit of "
            f"{MAX_MESSAGE_BYTES} + {MAX_BLOB_BYTES} bytes. Nothing was sent."
        )
    return b"".join((_HEAD.pack(PROTOCOL, len(data), len(blob)), data, blob))


async def read_frame(
    reader: asyncio.StreamReader, expected: Any, most_bytes: int = UNKNOWN_PEER_BYTES, most_blob_bytes: int = 0
) -> tuple[Any, bytes]:
    """Read the next message and its blob.

    Args:
        expected: A type of messages, or several as a union.
        most_bytes, most_blob_bytes: Limits on the sizes, checked when they are announced. Only a caller that expects
            more raises them.

    Raises:
        TransportError: The message is malformed or too large.
        asyncio.IncompleteReadError, OSError: The connection ended.
    """
    data, blob = await read_body(reader, await read_head(reader), most_bytes, most_blob_bytes)
    try:
        return decode(data, expected), blob
    except MessageError as error:
        raise TransportError(f"an unreadable message arrived ({error}). The connection was closed.") from error


async def ask(stream: Stream, message: object, expected: Any, most_bytes: int = UNKNOWN_PEER_BYTES) -> Any:
    """Send the first message over a connection, and return the answer. After an error the connection is closed.

    Raises:
        RefusedError: The other side refuses. Other errors are those of `read_frame`.
    """
    reader, writer = stream
    try:
        writer.write(pack(message))
        answer, _ = await read_frame(reader, expected | Refused, most_bytes)
        if isinstance(answer, Refused):
            raise RefusedError(answer)
    except BaseException:
        writer.close()
        raise
    return answer


class NotNowError(OSError):
    """A reachable process can't answer a question now, for example because it is starting or joining itself."""


async def question(
    stream: Stream, address: Address, message: WireMessage, expected: Any, most_bytes: int = MAX_MESSAGE_BYTES
) -> Any:
    """Ask a process over a new connection, which ends with its answer, of at most ``most_bytes``.

    Raises:
        RendezvousError: it refuses for good; the message gives its reason.
        NotNowError: it can be reached but does not answer, or can't answer now.
    """
    try:
        return await within(ANSWER_S, ask(stream, message, expected, most_bytes))
    except RefusedError as error:
        if error.for_good:
            raise RendezvousError(f"{address} refuses: {str(error).removesuffix('.')}.") from error
        raise NotNowError(f"{address} can't answer yet: {error}") from error
    except TransportError as error:
        raise NotNowError(f"{address} answered with what is no answer: {error}") from error
    except (EOFError, OSError) as error:
        raise NotNowError(f"{address} does not answer") from error
    finally:
        stream[1].transport.abort()


async def say(answer: WireMessage, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send an answer, and wait until the asking process ends the connection.

    When one side closes a stream of libp2p, the daemon drops what the other side has not read yet.
    """
    writer.write(pack(answer))
    await writer.drain()
    await within(ANSWER_S, reader.read(1))


async def read_head(reader: asyncio.StreamReader) -> bytes:
    """Read the header of the next message. Errors are those of `read_frame`."""
    return await reader.readexactly(_HEAD.size)


async def read_body(
    reader: asyncio.StreamReader, head: bytes, most_bytes: int, most_blob_bytes: int = 0
) -> tuple[bytes, bytes]:
    """Read the rest of a message: itself and its blob. Errors are as in `read_frame`."""
    protocol, num_bytes, blob_bytes = _HEAD.unpack(head)
    if protocol != PROTOCOL:
        raise TransportError(
            f"data that begins with {protocol!r} arrived instead of {PROTOCOL!r}, so the sender does not use this "
            "version of diloco's protocol. The connection was closed."
        )
    if num_bytes > most_bytes or blob_bytes > most_blob_bytes:
        raise TransportError(
            f"a message of {num_bytes} + {blob_bytes} bytes was announced, more than the limit of {most_bytes} + "
            f"{most_blob_bytes} bytes. The connection was closed."
        )
    data = await reader.readexactly(num_bytes)
    return data, await reader.readexactly(blob_bytes) if blob_bytes else b""
