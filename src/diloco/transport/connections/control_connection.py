"""One control connection: its messages, as fast as their sender may send, and why it has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from diloco.errors import TransportError
from diloco.protocol import GivenUp, Loss, Message, MessageError, decode
from diloco.transport.address import Address
from diloco.transport.connections.limits import Backoff, TokenBucket
from diloco.transport.connections.streams import (
    MAX_MESSAGE_BYTES,
    UNKNOWN_PEER_BYTES,
    Stream,
    read_body,
    read_head,
    within,
)

_INQUIRIES = 6  # within about a second
_BETWEEN_INQUIRIES_S = 0.05, 0.4
_MESSAGE_BYTES = 512  # counted for each message, besides its size: the time that it takes
_PACES = {False: (64e3, 256_000), True: (8e6, 32_000_000)}
"""Rate (bytes per second) and burst (bytes) accepted from unknown peers and from members; normal use is far below."""

OpenStream = Callable[[Address], Awaitable[Stream]]


@dataclass(eq=False)
class ControlConnection:
    rank: int  # of the other process
    number: int  # unique in this process; tells apart successive processes of one rank
    address: Address  # where the other process listens
    writer: asyncio.StreamWriter
    token: str  # the name of the hello that opened it, which both ends know and nobody else
    opened: bool  # whether this process opened it
    trusted: bool  # whether the other process is a member, or this process opened the connection
    heard_s: float  # when a message was last received, by the loop's clock
    crossed: str = ""  # name of the other end's hello that crossed the one that opened this connection, if any
    num_messages: int = 0  # number of messages received, heartbeats included
    task: asyncio.Task[None] | None = None  # runs `listen`

    def __post_init__(self) -> None:
        self._paces = {trusted: TokenBucket(*pace) for trusted, pace in _PACES.items()}

    async def listen(
        self, reader: asyncio.StreamReader, began: asyncio.Event, deliver: Callable[[int, Message], object]
    ) -> str:
        """Deliver messages until the connection ends, at no more than the rate that `_PACES` allows.

        Returns:
            Why it ended; "" if the other side says that it received nothing from this process for too long.
        """
        while True:
            try:
                message = decode(await self._next(reader), Message)
                if self.num_messages == 1:
                    began.set()
                if isinstance(message, GivenUp):
                    return ""
                deliver(self.rank, message)
            except MessageError as error:
                return f"it sent an invalid message: {error}"
            except (OSError, EOFError, TransportError) as error:
                return str(error) or type(error).__name__

    async def _next(self, reader: asyncio.StreamReader) -> bytes:
        """Read the next message; raises the errors of `read_frame`."""
        clock = asyncio.get_running_loop()
        head = await read_head(reader)
        data, _ = await read_body(reader, head, MAX_MESSAGE_BYTES if self.trusted else UNKNOWN_PEER_BYTES)
        self.heard_s = clock.time()
        if wait_s := self._paces[self.trusted].take(clock.time(), _MESSAGE_BYTES + len(data)):
            await asyncio.sleep(wait_s)
        self.num_messages += 1
        return data

    async def answers(self, heartbeat_s: float) -> bool:
        """Return whether a message arrives within two heartbeats of the last one.

        A live process keeps its rank: where the network proves no identities, any peer could claim to be that rank.
        """
        clock, num_messages, until_s = asyncio.get_running_loop(), self.num_messages, self.heard_s + 2 * heartbeat_s
        while not self.writer.is_closing() and clock.time() < until_s:
            if self.num_messages > num_messages:
                return True
            await asyncio.sleep(heartbeat_s / 8)
        return False

    async def why_lost(self, why: str, open_stream: OpenStream, longest_s: float, *, was_suspended: bool) -> Loss:
        """Find out why the process behind this connection, which has ended, is lost. A refusing port means it is gone.

        The port is tried several times, as a process that is terminating may keep it for a moment.

        Args:
            longest_s: The time to wait for each answer.
            was_suspended: Whether this process was suspended. The other one may have ended in the meantime, so its
                port proves nothing.
        """
        if not why or was_suspended:
            what = f"ended the connection ({why})" if why else "dropped it"
            return Loss("cut", f"{self.address} received nothing from this process for too long and {what}")
        ended = f"the connection to {self.address} ended ({why})"
        backoff = Backoff(*_BETWEEN_INQUIRIES_S, seed=f"{self.rank} {self.number}")
        for _ in range(_INQUIRIES):
            try:
                _, writer = await within(longest_s, open_stream(self.address))
            except ConnectionRefusedError:
                return Loss("gone", f"its process at {self.address} has ended")
            except ConnectionResetError:
                pass  # it was terminating at that moment
            except (OSError, EOFError, TransportError) as error:
                return Loss("cut", f"{ended} and can't be reopened ({error})")
            else:
                writer.close()
            await asyncio.sleep(backoff.next_s())
        return Loss("cut", f"{ended}, though a process still listens there")
