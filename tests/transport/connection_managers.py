"""Connection managers that record their events, each with its own thread and connections."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Protocol, TypeVar

from diloco.protocol import Event, Loss, Lost, Received, Timing
from diloco.transport import Address, ConnectionManager, TcpStreams


class HasBoard(Protocol):
    connections: ConnectionManager


Made = TypeVar("Made", bound=HasBoard)
QUICK = Timing(heartbeat_s=0.1, silence_s=1.0)
LIMIT_S = 30.0


class Rank:
    """A connection manager that records its events."""

    def __init__(self, rank: int, timing: Timing = QUICK) -> None:
        self.heard: queue.Queue[tuple[int, dict[str, Any], bytes, float]] = queue.Queue()
        self.losses: queue.Queue[tuple[int, Loss]] = queue.Queue()
        self.connections = ConnectionManager(rank, timing, TcpStreams(), self._note)
        self.address = self.connections.listen("127.0.0.1", range(1), "127.0.0.1")

    def _note(self, event: Event) -> None:
        match event:
            case Received(sender, message, blob) if message["kind"] != "beat":
                self.heard.put((sender, dict(message), blob, time.monotonic()))
            case Lost(rank, loss):
                self.losses.put((rank, loss))

    def reach(self, other: Rank) -> None:
        self.connections.call(self.connections.connect(other.connections.rank, other.address), LIMIT_S)
        other.settled()  # it answers first and registers the connection afterwards

    def say(self, other: int, message: dict[str, Any], blob: bytes = b"") -> None:
        self.connections.post(self.connections.send, other, message, blob)

    def settled(self) -> None:
        """Wait until everything that was posted before has been done."""
        done = threading.Event()
        self.connections.post(done.set)
        assert done.wait(LIMIT_S)


def stranger_at(address: Address) -> socket.socket:
    """Open a raw connection, as an unknown peer."""
    stranger = socket.create_connection((address.host, address.port))
    stranger.settimeout(LIMIT_S)
    return stranger


def said_to(address: Address, data: bytes) -> bytes:
    """Return all data that an unknown peer receives after it has sent ``data`` and closed its direction."""
    with closing(stranger_at(address)) as stranger:
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: stranger.recv(4096), b""))


MakeRank = Callable[..., Rank]


def pair(make_rank: MakeRank, *timing: Timing) -> tuple[Rank, Rank]:
    """Return two connected ranks, of which the second opened the connection."""
    first, second = make_rank(0, *timing), make_rank(1, *timing)
    second.reach(first)
    return first, second


def makes(kind: Callable[..., Made]) -> Iterator[Callable[..., Made]]:
    """Yield a factory whose products are closed at the end, for a fixture."""
    made: list[Made] = []

    def one(*arguments: Any) -> Made:
        made.append(kind(*arguments))
        return made[-1]

    yield one
    for each in made:
        each.connections.close()
