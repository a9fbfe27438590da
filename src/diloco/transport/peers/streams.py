"""What control connections need of a network, whatever it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from diloco.transport.address import Address

__all__ = ["Accept", "Streams", "stop_listening"]

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
