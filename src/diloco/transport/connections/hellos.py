"""Of two control connections that two ranks open to each other at the same time, one stands."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from diloco.errors import TransportError
from diloco.protocol.fields import Fields
from diloco.transport.address import Address
from diloco.transport.connections.streams import STRANGERS_BYTES, Stream, pack, read_frame
from diloco.units import visible

__all__ = ["Hellos", "say_hello"]


class Hellos:
    """Hellos that this rank has said and that are not answered yet.

    Of two that cross, the lower rank's is answered at once, with the name of the one that it crossed; the other one
    waits until then, and is not answered any more.
    """

    def __init__(self, me: int) -> None:
        self._me = me
        self._said: dict[int, tuple[str, asyncio.Event]] = {}  # to whom -> its name, and when it is over

    @contextmanager
    def to(self, rank: int) -> Iterator[str]:
        """While this rank waits for an answer to the hello of that name."""
        mine = secrets.token_hex(8), asyncio.Event()
        self._said[rank] = mine
        try:
            yield mine[0]
        finally:
            mine[1].set()
            if self._said.get(rank) is mine:
                del self._said[rank]

    async def before(self, rank: int) -> str:
        """Wait until a hello of ``rank`` is to be answered. Returns the name of my own that it crosses; "" if none."""
        name, over = self._said.get(rank, ("", None))
        if over is not None and self._me < rank:
            await over.wait()
        return name


async def say_hello(stream: Stream, me: int, mine: Address, name: str, rank: int, address: Address) -> str:
    """Say over a connection to ``rank`` at ``address`` that this is rank ``me``, which listens at ``mine``.

    Returns:
        The name of the other one's hello that this one has crossed; "" if none.

    Raises:
        OSError, EOFError: the connection ends.
        TransportError: it refuses, or somebody else is there.
    """
    reader, writer = stream
    writer.write(pack({"kind": "hello", "rank": me, "address": str(mine), "hello": name}))
    try:
        answer, _ = await read_frame(reader, STRANGERS_BYTES, 0)
        if answer["kind"] == "refused":
            raise TransportError(f"{address} refuses: {Fields(answer).words('reason')}")
    except ValueError as error:
        raise TransportError(f"{address} answered with what is no message: {error}") from error
    if answer["kind"] != "hello" or answer.get("rank") != rank:
        raise TransportError(
            f"{address} was to be rank {rank} and answered {visible(str(answer))}; another diloco may be using that "
            "port."
        )
    return str(answer.get("crossed", ""))
