"""The handshake of control connections, which keeps one of two that two ranks open to each other at the same time."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from diloco.errors import TransportError
from diloco.protocol import Fields
from diloco.transport.address import Address
from diloco.transport.connections.streams import UNKNOWN_PEER_BYTES, Stream, pack, read_frame
from diloco.units import visible

__all__ = ["PendingHellos", "send_hello"]


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
    writer.write(pack({"kind": "hello", "rank": me, "address": str(mine), "hello": name}))
    try:
        answer, _ = await read_frame(reader, UNKNOWN_PEER_BYTES, 0)
        if answer["kind"] == "refused":
            raise TransportError(f"{address} refuses: {Fields(answer).words('reason')}")
    except ValueError as error:
        raise TransportError(f"{address} sent an invalid answer: {error}") from error
    if answer["kind"] != "hello" or answer.get("rank") != rank:
        raise TransportError(
            f"{address} should be rank {rank}, but answered {visible(str(answer))}. Another diloco run may be using "
            "that port."
        )
    return str(answer.get("crossed", ""))
