"""One connected peer: the stream of control messages, for as long as it is connected, and its payload link."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from diloco.errors import TransportError
from diloco.protocol import GivenUp, Header, Message, MessageError, decode
from diloco.transport.address import Address
from diloco.transport.connections.payload_link import PayloadLink, round_tag
from diloco.transport.connections.sockets import raw_transport
from diloco.transport.connections.streams import MAX_MESSAGE_BYTES, UNKNOWN_PEER_BYTES, read_bytes

_MESSAGE_BYTES = 2048  # counted for each control message, besides its size: the time that it takes
_BYTES_PER_S, _BURST_S = {False: 64e3, True: 8e6}, 4.0
"""Rate accepted from unknown peers and from members, and for how long it may be exceeded; normal use is far below."""
FLUSH_S = 1.0


@dataclass(eq=False)
class Peer:
    """Everything runs in the control thread. The connection manager alone changes it, and `PeerLinks` its link."""

    rank: int  # of the other process
    number: int  # unique in this process; tells apart successive processes of one rank
    address: Address  # where the other process listens
    writer: asyncio.StreamWriter
    token: str  # the name of the hello that opened the stream, which both ends know and nobody else
    opened: bool  # whether this process opened it
    trusted: bool  # whether the other process is a member, or this process opened the stream
    crossed: str  # name of the other end's hello that crossed the one that opened the stream, or ""
    link: PayloadLink
    num_messages: int = 0  # number of messages received, heartbeats included
    task: asyncio.Task[None] | None = None  # runs `listen`
    _paid_s: float = 0.0  # until when the rate that is accepted has been used

    async def listen(
        self, reader: asyncio.StreamReader, began: asyncio.Event, deliver: Callable[[int, Message], object]
    ) -> str:
        """Deliver messages until the connection ends, at no more than the rate that is accepted.

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
                if isinstance(message, Header):  # it need not have acknowledged the round just before yet
                    decided = message.round._replace(outer_step=message.round.outer_step - 2)
                    self.link.stop_sending(round_tag(message.view, decided))
                deliver(self.rank, message)
            except MessageError as error:
                return f"it sent an invalid message: {error}"
            except (OSError, EOFError, TransportError) as error:
                return str(error) or type(error).__name__

    async def _next(self, reader: asyncio.StreamReader) -> bytes:
        """Read the next message; raises the errors of `read_frame`."""
        data = await read_bytes(reader, lambda: MAX_MESSAGE_BYTES if self.trusted else UNKNOWN_PEER_BYTES)
        now_s = asyncio.get_running_loop().time()
        self._paid_s = max(self._paid_s, now_s) + (_MESSAGE_BYTES + len(data)) / _BYTES_PER_S[self.trusted]
        if (wait_s := self._paid_s - now_s - _BURST_S) > 0:
            await asyncio.sleep(wait_s)
        self.num_messages += 1
        return data

    async def answers(self, heard_s: float, heartbeat_s: float) -> bool:
        """Return whether a message arrives within two heartbeats of the last one, at ``heard_s``.

        A live process keeps its rank: where the network proves no identities, any peer could claim to be that rank.
        """
        num_messages, clock = self.num_messages, asyncio.get_running_loop()
        # a process that stood still has heard nothing meanwhile, and has yet to read what has arrived
        until_s = max(heard_s + 2 * heartbeat_s, clock.time() + heartbeat_s)
        while not self.writer.is_closing() and clock.time() < until_s:
            await asyncio.sleep(heartbeat_s / 8)
            if self.num_messages > num_messages:
                return True
        return False

    def hang_up(self) -> None:
        """End everything, in good order."""
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()
        self.link.end("the control connection has ended")
        self.writer.close()
        # TLS would wait half a minute for the other end
        asyncio.get_running_loop().call_later(FLUSH_S, raw_transport(self.writer).abort)
