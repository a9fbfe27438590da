"""One control connection that stands, and what became of the process behind one that has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from diloco.errors import TransportError
from diloco.protocol.failure_detector import Loss
from diloco.transport.address import Address
from diloco.transport.peers.streams import read_frame, within

__all__ = ["ControlConnection", "Ending", "inquire"]

_INQUIRIES = 10
_BETWEEN_INQUIRIES_S = 0.1

OpenStream = Callable[[Address], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@dataclass(frozen=True)
class Ending:
    """Why nothing comes over a connection any more.

    Attributes:
        reason: in words.
        given_up: whether the other side says that it heard nothing of this process for too long.
    """

    reason: str = ""
    given_up: bool = False


@dataclass(eq=False)
class ControlConnection:
    """A connection to a rank.

    Attributes:
        rank: of the process at the other end.
        number: of its own, also where another process of the same rank comes.
        address: where the other end listens.
        writer: to it.
        heard_s: when something came last, by the clock of the loop.
        words: messages that have come, beats included.
        task: that listens.
    """

    rank: int
    number: int
    address: Address
    writer: asyncio.StreamWriter
    heard_s: float
    words: int = 0
    task: asyncio.Task[None] | None = None

    async def listen(
        self, reader: asyncio.StreamReader, began: asyncio.Event, deliver: Callable[[int, dict[str, Any], bytes], None]
    ) -> Ending:
        """Hand on what comes until nothing comes any more.

        Args:
            reader: from the other end.
            began: set when the first message has come, of whatever kind.
            deliver: called with the rank, every message and its blob; an error of what was said ends the connection.
        """
        clock = asyncio.get_running_loop()
        try:
            while True:
                message, blob = await read_frame(reader)
                self.heard_s = clock.time()
                self.words += 1
                if self.words == 1:
                    began.set()
                if message["kind"] == "given-up":
                    return Ending(given_up=True)
                deliver(self.rank, message, blob)
        except (OSError, EOFError, TransportError) as error:
            return Ending(str(error) or type(error).__name__)
        except (KeyError, ValueError, TypeError, OverflowError) as error:  # in what it said
            return Ending(f"it sent what is no message: {type(error).__name__}: {error}")


async def inquire(open_stream: OpenStream, address: Address, reason: str, longest_s: float) -> Loss:
    """Whether the process behind a connection that ended is still there: a port that refuses says no.

    A process that is being ended may still have its port for a moment.

    Args:
        open_stream: as `Streams.open`.
        address: where it listened.
        reason: why the connection ended, in words.
        longest_s: to wait for an answer, each time.
    """
    for _ in range(_INQUIRIES):
        try:
            _, writer = await within(longest_s, open_stream(address))
        except ConnectionRefusedError:
            return Loss("gone", f"its process at {address} has ended")
        except ConnectionResetError:
            pass  # it was being ended in that very moment
        except (OSError, TimeoutError) as error:
            return Loss("cut", f"the connection to {address} ended ({reason}) and can't be made anew ({error})")
        else:
            writer.close()
        await asyncio.sleep(_BETWEEN_INQUIRIES_S)
    return Loss("cut", f"the connection to {address} ended ({reason}), though somebody listens there")
