"""One control connection while it stands, and what became of the process behind it once it has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from diloco.errors import TransportError
from diloco.protocol.events import Received
from diloco.protocol.failure_detector import Loss
from diloco.transport.address import Address
from diloco.transport.connections.streams import (
    MAX_BLOB_BYTES,
    MAX_JSON_BYTES,
    STRANGERS_BLOB_BYTES,
    STRANGERS_BYTES,
    Stream,
    pack,
    read_body,
    read_head,
    within,
)
from diloco.transport.shaping import TokenBucket

__all__ = ["ControlConnection", "Ending", "say_who"]

_INQUIRIES = 10
_BETWEEN_INQUIRIES_S = 0.1
_PACES = {False: (64e3, 256_000), True: (8e6, 32_000_000)}
"""Bytes a second that are taken of strangers and of members, and how many at once: many times what either says."""

OpenStream = Callable[[Address], Awaitable[Stream]]


@dataclass(frozen=True)
class Ending:
    """Why nothing more comes over a connection."""

    reason: str = ""  # in words
    given_up: bool = False  # whether the other side says that it heard nothing from this process for too long


@dataclass(eq=False)
class ControlConnection:
    """A control connection."""

    rank: int  # of the other process
    number: int  # unique in this process, so that another process of the same rank has another one
    address: Address  # where the other process listens
    writer: asyncio.StreamWriter  # to the other process
    opened: bool  # whether this process has opened it, because it wanted to talk to that rank
    trusted: bool  # whether the other process is a member, or was asked to tell this one who is
    heard_s: float  # when something last came, by the clock of the loop
    crossed: str = ""  # name of the hello of the other end that crossed mine, by which this was opened; "": none did
    words: int = 0  # number of messages that have come, heartbeats included
    task: asyncio.Task[None] | None = None  # the one that listens

    def __post_init__(self) -> None:
        self._paces = {trusted: TokenBucket(*pace) for trusted, pace in _PACES.items()}

    async def listen(
        self, reader: asyncio.StreamReader, began: asyncio.Event, deliver: Callable[[Received], None]
    ) -> Ending:
        """Deliver messages until the connection ends, and no faster than this process can follow.

        Args:
            began: set when the first message has come, of whatever kind.
            deliver: called with each. If it raises because of the message, the connection ends.
        """
        clock = asyncio.get_running_loop()
        try:
            while True:
                head = await read_head(reader)
                most = (MAX_JSON_BYTES, MAX_BLOB_BYTES) if self.trusted else (STRANGERS_BYTES, STRANGERS_BLOB_BYTES)
                message, blob, num_bytes = await read_body(reader, head, *most)
                self.heard_s = clock.time()
                if wait_s := self._paces[self.trusted].take(clock.time(), num_bytes):
                    await asyncio.sleep(wait_s)
                self.words += 1
                if self.words == 1:
                    began.set()
                if message["kind"] == "given-up":
                    return Ending(given_up=True)
                deliver(Received(self.rank, message, blob, num_bytes))
        except (OSError, EOFError, TransportError) as error:
            return Ending(str(error) or type(error).__name__)
        except ValueError as error:  # in what it said
            return Ending(f"it sent what is no message: {error}")

    async def answers(self, heartbeat_s: float) -> bool:
        """Whether anything comes within two heartbeats: nobody else takes the place of that process.

        Where the network does not prove who somebody is, anybody could say that he is a rank.
        """
        clock, words, until_s = asyncio.get_running_loop(), self.words, self.heard_s + 2 * heartbeat_s
        while not self.writer.is_closing() and clock.time() < until_s:
            if self.words > words:
                return True
            await asyncio.sleep(heartbeat_s / 8)
        return False

    async def why_lost(self, ending: Ending, open_stream: OpenStream, longest_s: float, *, stood_still: bool) -> Loss:
        """What became of the process behind this connection, which has ended: a refusing port says that it is gone.

        A process that is being ended may keep its port for a moment.

        Args:
            longest_s: to wait for an answer, each time.
            stood_still: whether this process did: then the other one may have gone on and ended since, so its port says
                nothing.
        """
        if ending.given_up or stood_still:
            why = "gave it up" if ending.given_up else f"ended the connection ({ending.reason})"
            return Loss("cut", f"{self.address} heard nothing of this process for too long and {why}")
        ended = f"the connection to {self.address} ended ({ending.reason})"
        for _ in range(_INQUIRIES):
            try:
                _, writer = await within(longest_s, open_stream(self.address))
            except ConnectionRefusedError:
                return Loss("gone", f"its process at {self.address} has ended")
            except ConnectionResetError:
                pass  # it was being ended at that very moment
            except (OSError, TimeoutError) as error:
                return Loss("cut", f"{ended} and can't be made anew ({error})")
            else:
                writer.close()
            await asyncio.sleep(_BETWEEN_INQUIRIES_S)
        return Loss("cut", f"{ended}, though somebody listens there")


async def say_who(
    message: dict[str, Any], blob: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Answer somebody who asks whether a diloco listens here."""
    writer.write(pack({"kind": "who"}))
    await writer.drain()
