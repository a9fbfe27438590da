"""The format of control messages: objects in MessagePack (`diloco.protocol`), each preceded by its size.

::

    4 bytes  b"DLC3"  protocol and its version
    4 bytes  size     big-endian; at most `MAX_MESSAGE_BYTES`, from an unknown peer `UNKNOWN_PEER_BYTES`
    message

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


class Done(WireMessage):
    """What the first message of a connection asked for was done."""


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


PROTOCOL = b"DLC3"
MAX_MESSAGE_BYTES = 1 << 20
UNKNOWN_PEER_BYTES = 1 << 14  # of a message, from a peer that is not a member, and for what any peer sends about itself

ANSWER_S = 10.0  # to a question

_HEAD = struct.Struct(">4sI")


def pack(message: object) -> bytes:
    """Encode a message.

    >>> from diloco.protocol import Beat
    >>> pack(Beat())[:8]
    b'DLC3\\x00\\x00\\x00\\x0b'
    """
    data = encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        words = f"a control message of {len(data)} bytes exceeds the limit of {MAX_MESSAGE_BYTES} bytes."
        raise TransportError(f"{words} Nothing was sent.")
    return _HEAD.pack(PROTOCOL, len(data)) + data


async def read_frame(reader: asyncio.StreamReader, expected: Any, most_bytes: int = UNKNOWN_PEER_BYTES) -> Any:
    """Read the next message.

    Args:
        expected: A type of messages, or several as a union.
        most_bytes: Limit on the size, checked when it is announced. Only a caller that expects more raises it.

    Raises:
        TransportError: The message is malformed or too large.
        asyncio.IncompleteReadError, OSError: The connection ended.
    """
    try:
        return decode(await read_bytes(reader, lambda: most_bytes), expected)
    except MessageError as error:
        raise TransportError(f"an unreadable message arrived ({error}). The connection was closed.") from error


async def read_bytes(reader: asyncio.StreamReader, limit: Callable[[], int]) -> bytes:
    """Read the bytes of the next message, as `read_frame` does; ``limit()`` is what holds when its size arrives."""
    protocol, num_bytes = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    if protocol != PROTOCOL:
        raise TransportError(
            f"data that begins with {protocol!r} arrived instead of {PROTOCOL!r}, so the sender does not use this "
            "version of diloco's protocol. The connection was closed."
        )
    if num_bytes > (most_bytes := limit()):
        raise TransportError(
            f"a message of {num_bytes} bytes was announced, more than the limit of {most_bytes} bytes. The connection "
            "was closed."
        )
    return await reader.readexactly(num_bytes)


async def ask(stream: Stream, message: object, expected: Any, most_bytes: int = UNKNOWN_PEER_BYTES) -> Any:
    """Send the first message over a connection, and return the answer. After an error the connection is closed.

    Raises:
        RefusedError: The other side refuses. Other errors are those of `read_frame`.
    """
    reader, writer = stream
    try:
        writer.write(pack(message))
        answer = await read_frame(reader, expected | Refused, most_bytes)
        if isinstance(answer, Refused):
            raise RefusedError(answer)
    except BaseException:
        writer.close()
        raise
    return answer


class NotNowError(OSError):
    """A reachable process can't answer a question now, for example because it is starting or joining itself.

    Attributes:
        reason: why not, as it says; "" if it does not answer.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


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
        raise NotNowError(f"{address} can't answer yet: {error}", str(error)) from error
    except TransportError as error:
        raise NotNowError(f"{address} gave an answer that can't be read: {error}") from error
    except (EOFError, OSError) as error:
        raise NotNowError(f"{address} does not answer") from error
    finally:
        stream[1].transport.abort()


async def say(answer: WireMessage, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send an answer, and wait for a while until the asking process ends the connection.

    When one side closes a stream of libp2p, the daemon drops what the other side has not read yet.
    """
    writer.write(pack(answer))
    async with asyncio.timeout(ANSWER_S):
        await writer.drain()
        await reader.read(1)
