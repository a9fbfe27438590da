"""Data that a peer sends before it closes is received, whatever this side was doing."""

from __future__ import annotations

import asyncio
import socket

import pytest

from diloco.transport import drain_on_reset


async def broken(said: bytes) -> asyncio.StreamReader:
    """Return a connection that is reset by its own write before it reads what the closed other end sent."""
    listening = socket.create_server(("127.0.0.1", 0))
    reader, writer = await asyncio.open_connection(*listening.getsockname())
    other, _ = listening.accept()
    drain_on_reset(writer.transport)
    writer.write(b"never read there")  # unread data turns the close into a reset
    other.send(said)
    other.close()
    listening.close()
    while not writer.transport.is_closing():  # without an iteration of the loop in between
        writer.write(b"more")
    return reader


@pytest.mark.parametrize("said", [b"excluded", b"x" * 100_000])
def test_the_last_words_are_read(said: bytes) -> None:
    async def read() -> bytes:
        return await (await broken(said)).read()

    assert asyncio.run(read()) == said


def test_who_said_nothing_has_broken_off() -> None:
    async def read() -> bytes:
        return await (await broken(b"")).read()

    with pytest.raises(ConnectionError):
        asyncio.run(read())
