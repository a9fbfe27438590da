"""Questions from one process to another, each over a connection of its own, and answers to them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from diloco.errors import RendezvousError, TransportError
from diloco.protocol import WireMessage
from diloco.transport.address import Address
from diloco.transport.connections.streams import MAX_MESSAGE_BYTES, RefusedError, Stream, ask, pack, within

_ANSWER_S = 10.0


class NotNowError(OSError):
    """A reachable process can't answer a question now, for example because it is starting or joining itself."""


async def question(
    open_stream: Callable[[Address], Awaitable[Stream]],
    address: Address,
    message: WireMessage,
    expected: Any,
    most_bytes: int = MAX_MESSAGE_BYTES,
) -> Any:
    """Ask a process and return its answer, of at most ``most_bytes``.

    Raises:
        RendezvousError: it refuses for good; the message gives its reason.
        NotNowError: it can be reached but does not answer, or can't answer now.
        OSError, EOFError, TransportError: it can't be reached.
    """
    stream = await open_stream(address)
    try:
        return await within(_ANSWER_S, ask(stream, message, expected, most_bytes))
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
    await within(_ANSWER_S, reader.read(1))
