"""A relay in each TCP connection that this process opens: a test sees, changes, holds back or cuts what passes.

Both ends are in this process, where `Credentials.secure` is replaced, so that the relay sees messages. With `observed`
it sees what is really on the wire.

It reads the wire format by itself, as another implementation would: a frame is 8 bytes (magic, size of the message) and
the message in MessagePack. The first frame says what the connection is for. After the
first frames, a connection for payloads (``link``) consists of parts: `PART` and a body.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from diloco.protocol import decode, encode
from diloco.transport import Credentials

FRAME = struct.Struct(">4sI")
PART = struct.Struct(">cQIII")  # kind, tag of the message, total, start, size of the body
LIMIT_S = 30.0


def frame(message: Any, *, magic: bytes = b"DLC3") -> bytes:
    """Return the bytes of a control message; ``message`` may be any bytes."""
    text = message if isinstance(message, bytes) else encode(message)
    return FRAME.pack(magic, len(text)) + text


def unframe(data: bytes) -> dict[str, Any]:
    """Return the message of a frame."""
    message: dict[str, Any] = decode(data[FRAME.size :], dict[str, Any])
    return message


def part(body: bytes, *, kind: bytes = b"D", tag: int = 7, total: int, start: int = 0) -> bytes:
    """Return the bytes of a part of a payload message."""
    return PART.pack(kind, tag, total, start, len(body)) + body


class Cut(Exception):
    """Raised by a test to end the connection."""


@dataclass
class Unit:
    """A frame or a part on its way."""

    kind: str  # of the connection's first frame: ``hello``, ``link``, ``fetch``, ``register``...
    rank: int  # that opened the connection, if its first frame says so; else -1
    port: int  # to which the connection leads
    answers: bool  # whether it goes to the side that opened the connection
    number: int  # on this connection and in this direction, from 0
    data: bytes

    @property
    def is_part(self) -> bool:
        """Whether it is a part of a payload, and no acknowledgement."""
        return self.kind == "link" and self.number > 0 and self.data[:1] in b"DZ"


@dataclass
class Relays:
    """``hook`` gets each unit, and returns the bytes that pass instead; if it raises `Cut`, the connection ends."""

    hook: Callable[[Unit], bytes] = lambda unit: unit.data
    opened: list[str] = field(default_factory=list)  # the kind of each connection
    bare: bool = False  # whether each unit is what arrived at once
    _sockets: list[socket.socket] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def towards(self, host: str, port: int) -> int:
        """Return the port of a relay for one connection to an address."""
        there = socket.create_connection((host, port), timeout=LIMIT_S)
        there.settimeout(None)
        listening = socket.create_server(("127.0.0.1", 0))
        self._sockets += [there, listening]
        self._start(self._relay, listening, there, port)
        return int(listening.getsockname()[1])

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _relay(self, listening: socket.socket, there: socket.socket, port: int) -> None:
        try:
            here, _ = listening.accept()
        except OSError:  # the test has ended, and nobody has come
            return
        listening.close()
        self._sockets.append(here)
        about, told = {"kind": "", "rank": -1}, threading.Event()
        self._start(self._pump, there, here, port, about, told)
        self._pump(here, there, port, about, told, answers=False)

    def _pump(
        self,
        source: socket.socket,
        sink: socket.socket,
        port: int,
        about: dict[str, Any],
        told: threading.Event,
        *,
        answers: bool = True,
    ) -> None:
        data, number = b"", 0
        with contextlib.suppress(OSError, Cut):
            if self.bare:
                told.set()
            elif answers:
                sink.sendall(source.recv(1))  # that the side that listens admits the other one
            while more := source.recv(1 << 16):
                data += more
                while size := len(data) if self.bare else _size(data, parts=number > 0 and about["kind"] == "link"):
                    unit, data = data[:size], data[size:]
                    if not told.is_set() and not answers:
                        message = unframe(unit)
                        about |= {"kind": message["kind"], "rank": message.get("rank", -1)}
                        self.opened.append(message["kind"])
                        told.set()
                    if not told.wait(LIMIT_S):
                        raise Cut
                    sink.sendall(self.hook(Unit(about["kind"], about["rank"], port, answers, number, unit)))
                    number += 1
            sink.shutdown(socket.SHUT_WR)
            return
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(LIMIT_S)


def _size(data: bytes, *, parts: bool) -> int:
    """Return the size of the unit that ``data`` begins with; 0 if it is not complete."""
    head = PART if parts else FRAME
    if len(data) < head.size:
        return 0
    size = head.size + int(head.unpack_from(data)[-1])
    return size if len(data) >= size else 0


@contextlib.contextmanager
def relayed() -> Iterator[Relays]:
    """Send every connection that asyncio opens in this process through a relay, without TLS."""

    make, everybody = Credentials.__init__, b"the key of everybody"

    def make_equal(self: Credentials, *given: Any, **named: Any) -> None:
        make(self, *given, **named)
        self.public_key, self.certificate = everybody, hashlib.sha256(everybody).hexdigest().encode()

    secure = mock.AsyncMock(return_value=everybody)
    with mock.patch.multiple(Credentials, __init__=make_equal, secure=secure), observed(Relays()) as relays:
        yield relays


@contextlib.contextmanager
def observed(relays: Relays | None = None) -> Iterator[Relays]:
    """Send every connection that asyncio opens in this process through a relay that sees only bytes."""
    relays, dial = relays or Relays(bare=True), asyncio.open_connection

    async def through(host: str, port: int, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        relay = await asyncio.to_thread(relays.towards, host, port)
        return await dial("127.0.0.1", relay, **options)

    with mock.patch.object(asyncio, "open_connection", through):
        try:
            yield relays
        finally:
            relays.close()


def plain_stranger_at(address: Any) -> socket.socket:
    """Open a connection without TLS."""
    stranger = socket.create_connection((address.host, address.port))
    stranger.settimeout(LIMIT_S)
    return stranger


def stranger_at(address: Any, secret: str = "", credentials: Credentials | None = None) -> ssl.SSLSocket:
    """Open a connection as a process of another program that knows the secret."""
    credentials = credentials or Credentials(secret=secret)
    stranger = credentials.opening.wrap_socket(plain_stranger_at(address))
    assert stranger.recv(1) == b"+", "it is admitted"
    return stranger


def said_to(address: Any, data: bytes, *, plain: bool = False) -> bytes:
    """Return all data that an unknown peer receives after it has sent ``data`` and closed its direction."""
    with contextlib.closing(plain_stranger_at(address) if plain else stranger_at(address)) as stranger:
        stranger.sendall(data)
        socket.socket.shutdown(stranger, socket.SHUT_WR)  # not that of TLS, which closes both directions
        with contextlib.suppress(OSError):
            return b"".join(iter(lambda: stranger.recv(4096), b""))
        return b""
