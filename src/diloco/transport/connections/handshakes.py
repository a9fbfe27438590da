"""The handshake of control connections, which keeps one of two that two ranks open to each other at the same time."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from msgspec import Meta

from diloco.errors import TransportError
from diloco.membership import Rank
from diloco.protocol import Refused, WireMessage
from diloco.transport.address import Address
from diloco.transport.connections.streams import Stream, pack, read_frame

__all__ = ["Greeting", "Hello", "PendingHellos", "send_hello"]

_Name = Annotated[str, Meta(max_length=64)]


class Hello(WireMessage):
    """The sender opens the connection between two ranks."""

    rank: Rank
    address: Annotated[str, Meta(max_length=300)]  # where it listens
    hello: _Name = ""  # the name of this hello


class Greeting(WireMessage):
    """The answer to a hello."""

    rank: Rank
    crossed: _Name = ""  # the name of the hello of the answering rank that it crossed, or ""


class PendingHellos:
    """The hellos that this rank has sent and that are still unanswered.

    When the hellos of two ranks cross, the higher rank answers the lower rank's hello at once and includes the name of
    its own hello. The lower rank holds back its answer until then, and no longer sends it.
    """

    def __init__(self, me: int) -> None:
        self._me = me
        self._pending: dict[int, tuple[str, asyncio.Event]] = {}  # rank -> name of the hello; set when it is settled

    @contextmanager
    def to(self, rank: int) -> Iterator[str]:
        """Yield the name of a new hello to ``rank``, which counts as unanswered until the context ends."""
        mine = secrets.token_hex(8), asyncio.Event()
        self._pending[rank] = mine
        try:
            yield mine[0]
        finally:
            mine[1].set()
            if self._pending.get(rank) is mine:
                del self._pending[rank]

    async def before(self, rank: int) -> str:
        """Wait until a hello from ``rank`` may be answered. Return the name of the own hello that it crosses, or ""."""
        name, over = self._pending.get(rank, ("", None))
        if over is not None and self._me < rank:
            await over.wait()
        return name


async def send_hello(stream: Stream, me: int, mine: Address, name: str, rank: int, address: Address) -> str:
    """Introduce this process, rank ``me`` listening at ``mine``, over a connection to ``rank`` at ``address``.

    Returns:
        The name of the other rank's hello that this one crossed, or "" if there is none.

    Raises:
        OSError, EOFError: The connection ended.
        TransportError: The other side refuses, or is not ``rank``.
    """
    reader, writer = stream
    writer.write(pack(Hello(me, str(mine), name)))
    answer, _ = await read_frame(reader, Greeting | Refused)
    if isinstance(answer, Refused):
        raise TransportError(f"{address} refuses: {answer.reason}")
    if answer.rank != rank:
        raise TransportError(
            f"{address} should be rank {rank}, but answered as rank {answer.rank}. Another diloco run may be using "
            "that port."
        )
    return str(answer.crossed)
