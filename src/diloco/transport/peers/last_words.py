"""Reading what a peer said before its connection broke, also where this side was about to write.

asyncio gives a connection up at the first write that fails, with whatever has come and was not read. Who wakes from a
standstill writes first, and would miss that the others have gone on without it.
"""

from __future__ import annotations

import asyncio
import contextlib

__all__ = ["hear_out"]

_MOST_BYTES = 1 << 20
"""More than any peer's last words; what is beyond is not read."""


def hear_out(transport: asyncio.BaseTransport) -> None:
    """From now on what has arrived is handed on before a connection that broke counts as ended.

    Args:
        transport: of a connection over a socket, whose protocol is that of asyncio's streams.
    """
    if isinstance(transport, asyncio.Transport):
        protocol = transport.get_protocol()
        assert isinstance(protocol, asyncio.Protocol)
        transport.set_protocol(_LastWords(transport, protocol))


class _LastWords(asyncio.Protocol):
    """Stands before another protocol."""

    def __init__(self, transport: asyncio.Transport, protocol: asyncio.Protocol) -> None:
        self._transport = transport
        self._protocol = protocol

    def data_received(self, data: bytes) -> None:
        self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, OSError) and (words := self._unread()):
            self._protocol.data_received(words)
            exc = None  # else the reader would raise before it gives them out
        self._protocol.connection_lost(exc)

    def _unread(self) -> bytes:
        words = bytearray()
        socket = self._transport.get_extra_info("socket")
        with contextlib.suppress(OSError), socket.dup() as mine:  # what asyncio has given out can't be read from
            mine.setblocking(False)
            while len(words) < _MOST_BYTES and (more := mine.recv(_MOST_BYTES)):
                words += more
        return bytes(words)
