"""The control connections of a rank, which carry small messages apart from payloads and detect lost ranks.

Each pair of ranks shares one connection, over which both send a heartbeat every ``heartbeat_s``. A rank is lost when
its connection ends, or when nothing is received from it for ``silence_s``. Clocks of different machines are never
compared. A handshake keeps one of two connections that two ranks open to each other at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import sys
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from functools import partial
from typing import Annotated, Any, Union

from msgspec import Meta

from diloco.errors import TransportError
from diloco.membership import GREATEST, Rank
from diloco.protocol import (
    Beat,
    Entry,
    Excluded,
    GivenUp,
    Loss,
    Machine,
    Pulse,
    Refused,
    Rules,
    WireMessage,
    silent_ones,
)
from diloco.transport.address import Address
from diloco.transport.connections.control_connection import ControlConnection
from diloco.transport.connections.control_thread import ControlThread
from diloco.transport.connections.limits import ArrivalLimit, ConnectionLimit
from diloco.transport.connections.sockets import TcpStreams, raw_transport
from diloco.transport.connections.streams import (
    Stream,
    pack,
    read_frame,
    within,
)

_Name = Annotated[str, Meta(max_length=64)]


class Hello(WireMessage):
    """The sender opens the connection between two ranks."""

    rank: Rank
    address: Annotated[str, Meta(max_length=300)]  # where it listens
    hello: _Name = ""  # the name of this hello


class Greeting(WireMessage):
    rank: Rank
    crossed: _Name = ""  # the name of the hello of the answering rank that it crossed, or ""


Service = Callable[[Any, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Serves a connection whose first message asked for the service. The connection is closed when the service returns."""

FIRST_MESSAGE_S = 10.0
MOST_OPEN, MOST_OPEN_OF_ONE = 512, 256
"""Limits on connections that are not control connections: they request a service or have sent nothing yet."""
ARRIVALS_PER_S, MOST_ARRIVALS = 64.0, 1024
"""Limits on how fast an origin may open connections: a tenth of a core's time for handshakes, and a start at once."""
_MOST_UNKNOWN_PEERS, _MOST_UNKNOWN_PEERS_OF_ONE = 256, 4
"""Limits on control connections of ranks that are not members, on networks that prove identities."""
MOST_UNSENT_BYTES, MOST_UNSENT_TO_UNKNOWN_PEER_BYTES = 4 << 20, 1 << 18  # per rank; one that reads too little is lost
_FLUSH_S = 1.0


class ConnectionManager(ControlThread):
    """The control connections of this process, by rank.

    Args:
        rules: The rules of the run, and which rank this is.
    """

    def __init__(self, rules: Rules, streams: TcpStreams) -> None:
        super().__init__(rules.rank)
        self.rules = rules
        self.machine = Machine(rules)
        # called in the control thread with a method of the machine and its arguments when a connection is made or ends,
        # when a message arrives, and once for each rank that is lost. If it raises `MessageError`, the connection of
        # that message ends
        self.handle: Callable[..., object] = lambda act, *arguments: None
        self.streams = streams
        self.address = Address("", 0)  # where this process listens
        self.services: dict[type[WireMessage], Service] = {}  # type of the first message -> service
        # topic of a `Store` -> what is called with the sender's rank and the value
        self.receivers: dict[str, Callable[[int, bytes], None]] = {}
        self.arrived = asyncio.Event()  # set when a connection is made and when its first message arrives
        self.most_ranks = sys.maxsize  # only lower ranks may connect
        self.entries: Mapping[int, Entry] = {}  # known ranks; a peer with another proven identity can't claim them
        self._connections: dict[int, ControlConnection] = {}
        # rank -> name of the hello to it that is not answered yet; set when it is. When the hellos of two ranks cross,
        # the higher rank answers the lower rank's hello at once and includes the name of its own. The lower rank holds
        # back its answer until then, and no longer sends it
        self._hellos: dict[int, tuple[str, asyncio.Event]] = {}
        self.identities: dict[int, str] = {}  # rank -> its identity when it became a member, for each other member
        self._members: frozenset[int] = frozenset()
        self._open_limit = ConnectionLimit[asyncio.StreamWriter](MOST_OPEN, MOST_OPEN_OF_ONE)
        self._unknown_peers = ConnectionLimit[int](_MOST_UNKNOWN_PEERS, _MOST_UNKNOWN_PEERS_OF_ONE)
        self._arrivals = ArrivalLimit(ARRIVALS_PER_S, MOST_ARRIVALS)
        self._numbers = itertools.count(1)
        self._watch: asyncio.Task[None] | None = None
        self.pulse = Pulse(rules)  # detects stalls of this process itself

    # From any thread.

    def listen(self, *where: Any) -> Address:
        """Accept connections. Arguments and errors are those of `TcpStreams.listen` of the network."""
        return self.call(self.listen_at(*where))

    # In the control thread.

    @property
    def connected(self) -> frozenset[int]:
        return frozenset(self._connections)

    def get(self, rank: int) -> ControlConnection | None:
        return self._connections.get(rank)

    def identity(self, rank: int) -> str:
        """Return the identity that the process connected as ``rank`` has proved; "" if there is none."""
        return self.streams.identity(self._connections[rank].writer) if rank in self._connections else ""

    def send(self, rank: int, message: WireMessage) -> None:
        """Send a message. Without an open connection it is dropped; a receiver that reads too little is lost."""
        if (connection := self._connections.get(rank)) is None:
            return
        connection.writer.write(pack(message))
        most_bytes = MOST_UNSENT_BYTES if connection.trusted else MOST_UNSENT_TO_UNKNOWN_PEER_BYTES
        if connection.writer.transport.get_write_buffer_size() > most_bytes:
            self.loop.call_soon(self._drop, connection, f"{connection.address} does not read its messages")

    def trust(self, ranks: Iterable[int]) -> None:
        """Make ``ranks`` the members, which may send large messages and are exempt from the limits on other peers."""
        before, self._members = self._members, frozenset(ranks)
        there = self._connections.items()
        new = {rank: self.streams.identity(each.writer) for rank, each in there if rank in self._members - before}
        self.identities = {rank: each for rank, each in (self.identities | new).items() if rank in self._members}
        for rank in self._members:
            self._unknown_peers.leave(rank)
        for rank, connection in self._connections.items():
            connection.trusted = connection.opened or rank in self._members

    async def open(self, address: Address) -> Stream:
        """Open a connection as `TcpStreams.open` does. `close` aborts it, even if it still has data to send."""
        return self.keep(await self.streams.open(address))

    def vouch(self, writer: asyncio.StreamWriter) -> None:
        """Exempt an accepted connection that this process expects from the limits on unknown peers."""
        self._open_limit.leave(writer)

    async def claimed(self, rank: int, writer: asyncio.StreamWriter) -> str:
        """Return why the process behind an accepted connection can't be ``rank``, as another one is; "" if it can."""
        if rank == self.rank:
            mine = self.streams.identity(writer) == self.streams.me
            return "" if mine else f"rank {rank} is the process that was asked, at {self.address}"
        other, streams = self._connections.get(rank), self.streams
        if other is None or streams.process(other.writer) == streams.process(writer):
            return ""
        is_copy = streams.identity(other.writer) == streams.identity(writer)
        if not await other.answers(self.rules.heartbeat_s):
            return ""
        copied = ". It has the same key: was identity.key copied? Each replica needs its own" if is_copy else ""
        return f"rank {rank} is connected from {other.address}, which still answers{copied}"

    async def connect(self, rank: int, address: Address) -> None:
        """Open the connection to ``rank``, which listens at ``address``.

        Raises:
            OSError: Nothing answers there.
            TransportError: Another process answers there, or it refuses.
        """
        reader, writer = await self.open(address)
        if rank in self._connections:  # it has connected in the meantime
            writer.close()
            return
        mine = self._hellos[rank] = secrets.token_hex(8), asyncio.Event()
        try:
            self.streams.tune(writer)
            writer.write(pack(Hello(self.rank, str(self.address), mine[0])))
            answer, _ = await read_frame(reader, Greeting | Refused)
            if isinstance(answer, Refused):
                raise TransportError(f"{address} refuses: {answer.reason}")
            if answer.rank != rank:
                raise TransportError(
                    f"{address} should be rank {rank}, but answered as rank {answer.rank}. Another diloco run may be "
                    "using that port."
                )
            self._register(rank, address, (reader, writer), mine[0], opened=True, crossed=answer.crossed)
        except BaseException as error:
            writer.close()
            if not isinstance(error, EOFError) or rank not in self._connections:
                raise
            return  # the connection that it opened stays instead
        finally:
            mine[1].set()
            if self._hellos.get(rank) is mine:
                del self._hellos[rank]
        self.send(rank, Beat())  # confirms to the other end that the connection is open on this side

    def hang_up(self, rank: int) -> None:
        """End the connection to ``rank`` without reporting a loss."""
        self._unknown_peers.leave(rank)
        if connection := self._connections.pop(rank, None):
            if connection.task is not None:
                connection.task.cancel()
            connection.writer.close()
            # TLS would wait half a minute for the other end to close it, too
            self.loop.call_later(_FLUSH_S, raw_transport(connection.writer).abort)

    def drop(self, rank: int, why: str) -> None:
        """End the connection to ``rank``, if there is one, and report its loss."""
        if connection := self._connections.get(rank):
            self._drop(connection, why)

    def drop_silent(self, ranks: Collection[int]) -> None:
        """Drop ranks that have been silent for too long. All connections end before the first loss is reported."""
        silent = [self._connections[rank] for rank in ranks]
        for connection in silent:
            connection.writer.write(pack(GivenUp()))  # in case the other process only stalled
            self.hang_up(connection.rank)
            self.handle(self.machine.disconnect, connection.rank)
        for connection in silent:
            text = f"nothing was received from {connection.address} for {self.rules.silence_s:g} s"
            self.handle(self.machine.lose, connection.rank, Loss("silent", text))

    async def listen_at(self, *where: Any) -> Address:
        """Accept connections as `listen` does, from within the control thread."""
        self.address = await self.streams.listen(self._arrive, *where)
        self._watch = self.begin(self._beat())
        return self.address

    def _arrive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Coroutine[Any, Any, None]:
        self.keep((reader, writer))  # at once: the task that closes it may be cancelled before it starts
        return self._accept(reader, writer)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            origins = self.streams.origins(writer)
            if not self._arrivals.admits(origins, self.loop.time()):
                raw_transport(writer).abort()
                return
            if (out := self._open_limit.enter(writer, origins)) is not None:
                raw_transport(out).abort()
            async with asyncio.timeout(FIRST_MESSAGE_S):
                if not await self.streams.admit(reader, writer):
                    return
                message, _ = await read_frame(reader, Union[(Hello, *self.services)])  # of a list of types
            if not self.streams.is_current(writer):
                return
            if isinstance(message, Hello):
                await self._greet(message, reader, writer)
            else:
                await self.services[type(message)](message, reader, writer)
        except (OSError, EOFError, TransportError, ValueError, asyncio.CancelledError):
            pass  # an unknown peer, one that left, or the end of this process; asyncio would print a traceback
        finally:
            if not any(connection.writer is writer for connection in self._connections.values()):
                await _part(writer)
            self._open_limit.leave(writer)

    async def _greet(self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a peer that introduces itself as a rank, and register its connection unless the claim is refused."""
        rank, address = hello.rank, self.streams.address(hello.address)
        if rank == self.rank or rank >= self.most_ranks:
            return
        identity, known = self.streams.identity(writer), self.entries.get(rank)
        if self.streams.named and (identity != str(address) or (known is not None and known.address != identity)):
            return
        crossed, answered = self._hellos.get(rank, ("", None))
        if answered is not None and self.rank < rank:
            await answered.wait()
        if (before := self._connections.get(rank)) is not None and before.crossed == hello.hello:
            return  # it said so before it answered this process's own hello, and the connection is registered
        if reason := await self.claimed(rank, writer):
            writer.write(pack(Refused(reason)))
            return
        unknown = self.streams.named and rank not in self._members
        if unknown and (out := self._unknown_peers.enter(rank, (identity,))) is not None:
            self._drop(self._connections[out], "too many connected peers are not members")
        self.streams.tune(writer)
        writer.write(pack(Greeting(self.rank, crossed)))
        self._register(rank, address, (reader, writer), hello.hello, opened=False)

    def _drop(self, connection: ControlConnection, why: str) -> None:
        if self._connections.get(connection.rank) is connection:
            connection.writer.transport.abort()  # discards what the peer has not read
            self.hang_up(connection.rank)
            self.handle(self.machine.disconnect, connection.rank)
            loss = Loss("cut", f"the connection to {connection.address} was ended: {why}")
            self.handle(self.machine.lose, connection.rank, loss)

    def _register(
        self, rank: int, address: Address, stream: Stream, token: str, *, opened: bool, crossed: str = ""
    ) -> None:
        reader, writer = stream
        if not self.streams.is_current(writer):
            raise TransportError(f"the secret has changed since {address} was admitted")
        if before := self._connections.get(rank):
            before.writer.write(pack(Excluded(GREATEST, "another process has taken its place")))
            self.hang_up(rank)
        number, trusted = next(self._numbers), opened or rank in self._members
        connection = ControlConnection(rank, number, address, writer, token, opened, trusted, self.loop.time(), crossed)
        self._connections[rank] = connection
        self.handle(self.machine.connect, rank, number, str(address))
        connection.task = self.begin(self._listen_to(connection, reader))
        self.arrived.set()

    async def _listen_to(self, connection: ControlConnection, reader: asyncio.StreamReader) -> None:
        ended = await connection.listen(reader, self.arrived, partial(self.handle, self.machine.receive))
        if self._connections.get(connection.rank) is not connection:
            return
        del self._connections[connection.rank]  # not `hang_up`, which would cancel the current task
        self._unknown_peers.leave(connection.rank)
        connection.writer.close()
        self.handle(self.machine.disconnect, connection.rank)
        was_suspended, longest_s = self.pulse.was_suspended(self.loop.time()), min(2.0, self.rules.silence_s)
        if connection.trusted:
            loss = await connection.why_lost(ended, self.open, longest_s, was_suspended=was_suspended)
        else:  # nobody is dialled on a stranger's word
            loss = Loss("cut", f"the connection to {connection.address} ended ({ended})")
        if connection.rank not in self._connections:  # else a new process of that rank has connected, and was reported
            self.handle(self.machine.lose, connection.rank, loss)

    async def _beat(self) -> None:
        beat = pack(Beat())
        self.pulse.begin(self.loop.time())
        while True:
            await asyncio.sleep(self.rules.heartbeat_s)
            now_s = self.loop.time()
            if self.pulse.beat(now_s):  # this process itself stalled
                for connection in self._connections.values():
                    connection.heard_s = now_s
            quiet_s = {rank: now_s - each.heard_s for rank, each in self._connections.items()}
            self.drop_silent(silent_ones(quiet_s, self.rules, self._members))
            for connection in self._connections.values():
                connection.writer.write(beat)

    async def end_connections(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await self.streams.refuse()
        for _ in range(4):  # iterations of the loop in which new connections get the tasks that close them
            await asyncio.sleep(0)
        await self._hang_up_all(_FLUSH_S)
        await self.streams.close()

    async def release(self) -> None:
        await self._hang_up_all(0.0)  # a cancelled task may still have registered a connection

    async def _hang_up_all(self, flush_s: float) -> None:
        """End all connections. Data that the other side has not received within ``flush_s`` is discarded."""
        flushed = [asyncio.create_task(connection.writer.wait_closed()) for connection in self._connections.values()]
        for rank in self.connected:
            self.hang_up(rank)
        if flushed:
            await asyncio.wait(flushed, timeout=flush_s)
        self.abort_connections()
        if flushed:
            await asyncio.wait(flushed, timeout=_FLUSH_S)
        await asyncio.sleep(0)


async def _part(writer: asyncio.StreamWriter) -> None:
    """Close a connection: the other end has a moment to read what was sent to it, and to close it, too.

    Otherwise TLS would wait half a minute for one that does not, and thousands of them would use up all descriptors.
    """
    raw = raw_transport(writer)
    if raw is not writer.transport or not raw.is_closing():  # it was not aborted in the handshake
        writer.close()
        with contextlib.suppress(OSError, asyncio.CancelledError):  # at the end of its task
            await within(_FLUSH_S, writer.wait_closed())
    raw.abort()
