"""The control connections of a rank, which carry small messages apart from payloads and detect lost ranks.

Each pair of ranks shares one connection, over which both send a heartbeat every ``heartbeat_s``. A rank is lost when
its connection ends, or when nothing is received from it for ``silence_s``. Clocks of different machines are never
compared. A handshake keeps one of two connections that two ranks open to each other at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Annotated, Any, Union

from msgspec import Meta

from diloco.errors import TransportError
from diloco.membership import GREATEST, Cause, Rank
from diloco.protocol import (
    Beat,
    BeatDue,
    Connected,
    Disconnected,
    Entry,
    Excluded,
    GivenUp,
    Message,
    MessageError,
    RankLost,
    Received,
    Refused,
    Rules,
    Store,
    WireMessage,
)
from diloco.transport.address import Address
from diloco.transport.connections.control_thread import ControlThread
from diloco.transport.connections.limits import ArrivalLimit, ConnectionLimit, pauses
from diloco.transport.connections.pace import UplinkMeter, sum_of
from diloco.transport.connections.payload_link import PayloadLink
from diloco.transport.connections.peer import FLUSH_S, Peer
from diloco.transport.connections.sockets import TcpStreams, raw_transport
from diloco.transport.connections.streams import Stream, ask, pack, read_frame, within

_Name = Annotated[str, Meta(max_length=64)]


class Hello(WireMessage):
    """The sender opens the connection between two ranks."""

    rank: Rank
    address: Annotated[str, Meta(max_length=300)]  # where it listens
    hello: _Name = ""  # the name of this hello
    process: _Name = ""  # the name of the sender's process
    expected: _Name = ""  # the name of the process that is to answer; "": any


class Greeting(WireMessage):
    rank: Rank
    crossed: _Name = ""  # the name of the hello of the answering rank that it crossed, or ""
    process: _Name = ""  # the name of the sender's process


Service = Callable[[Any, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Serves a connection whose first message asked for the service. The connection is closed when the service returns."""

FIRST_MESSAGE_S = 10.0
_INQUIRIES, _INQUIRY_S = 6, 2.0  # within about a second, and for each answer
_BETWEEN_INQUIRIES_S = 0.05, 0.4
MOST_OPEN, MOST_OPEN_OF_ONE = 128, 64
"""Limits on connections that are not control connections: they request a service or have sent nothing yet. Each takes
300 kB for TLS."""
MOST_ARRIVALS, ARRIVALS_S = 1024, 16.0
"""Limit on how fast an origin may open connections: a tenth of a core's time for handshakes, and a start at once."""
_MOST_UNKNOWN_PEERS, _MOST_UNKNOWN_PEERS_OF_ONE = 256, 4
"""Limits on control connections of ranks that are not members, in all and of one key."""
MOST_UNSENT_BYTES, MOST_UNSENT_TO_UNKNOWN_PEER_BYTES = 4 << 20, 1 << 18  # per rank; one that reads too little is lost


class ConnectionManager(ControlThread):
    """The control connections of this process, by rank.

    Args:
        on_peer: called when a peer has connected. The further arguments are those of `ControlThread`.
    """

    def __init__(
        self, rules: Rules, streams: TcpStreams, on_peer: Callable[[Peer], object] = lambda peer: None, **owner: Any
    ) -> None:
        super().__init__(rules, **owner)
        self.streams = streams
        self.address = Address("", 0)  # where this process listens
        self.process = secrets.token_hex(8)  # its name: that of its part in the run, from its first view to its last
        self.services: dict[type[WireMessage], Service] = {}  # type of the first message -> service
        # topic of a `Store` -> what is called with the sender's rank and the value
        self.receivers: dict[str, Callable[[int, bytes], None]] = {}
        self.arrived = asyncio.Event()  # set when a connection is made and when its first message arrives
        self.most_ranks = sys.maxsize if self.rank >= 0 else 0  # only lower ranks may connect
        self.entries: dict[int, Entry] = {}  # known ranks; nobody with another key can claim a member's
        self.peers: dict[int, Peer] = {}
        self.meter = UplinkMeter(lambda: sum_of(each.link.counters() for each in list(self.peers.values())))
        self._on_peer = on_peer
        # rank -> name of the hello to it that is not answered yet; set when it is. When the hellos of two ranks cross,
        # the higher rank answers the lower rank's hello at once and includes the name of its own. The lower rank holds
        # back its answer until then, and no longer sends it
        self._hellos: dict[int, tuple[str, asyncio.Event]] = {}
        self.identities: dict[int, str] = {}  # rank -> its identity when it last became a member, for each other one
        self._members: frozenset[int] = frozenset()
        self._open_limit = ConnectionLimit[asyncio.StreamWriter](MOST_OPEN, MOST_OPEN_OF_ONE)
        self._unknown_peers = ConnectionLimit[int](_MOST_UNKNOWN_PEERS, _MOST_UNKNOWN_PEERS_OF_ONE)
        self._arrivals = ArrivalLimit(MOST_ARRIVALS, ARRIVALS_S)
        self._numbers = itertools.count(1)
        self._watch: asyncio.Task[None] | None = None

    # From any thread.

    def listen(self, *where: Any) -> Address:
        """Accept connections. Arguments and errors are those of `TcpStreams.listen` of the network."""
        return self.call(self.listen_at(*where))

    # In the control thread.

    @property
    def connected(self) -> frozenset[int]:
        return frozenset(self.peers)

    def identity(self, rank: int) -> str:
        """Return the identity that the process connected as ``rank`` has proved; "" if there is none."""
        return self.streams.identity(self.peers[rank].writer) if rank in self.peers else ""

    def hears(self, entry: Entry) -> bool:
        """Return whether the process of an entry is connected, and has sent a message, so that its end is open, too."""
        peer = self.peers.get(entry.rank)
        return peer is not None and peer.num_messages > 0 and self.identity(entry.rank) == entry.key

    def send(self, rank: int, message: WireMessage) -> None:
        """Send a message. Without an open connection it is dropped; a receiver that reads too little is lost."""
        if (peer := self.peers.get(rank)) is None:
            return
        peer.writer.write(pack(message))
        most_bytes = MOST_UNSENT_BYTES if peer.trusted else MOST_UNSENT_TO_UNKNOWN_PEER_BYTES
        if peer.writer.transport.get_write_buffer_size() > most_bytes:
            self.loop.call_soon(self.drop, {peer: f"{peer.address} does not read its messages"})

    def trust(self, ranks: Iterable[int]) -> None:
        """Make ``ranks`` the members, which may send large messages and are exempt from the limits on other peers."""
        before, self._members = self._members, frozenset(ranks)
        there = self.peers.items()
        new = {rank: self.streams.identity(each.writer) for rank, each in there if rank in self._members - before}
        self.identities |= new
        for rank in self._members:
            self._unknown_peers.leave(rank)
        for rank, peer in self.peers.items():
            peer.trusted = self._trusts(rank, opened=peer.opened)

    def _trusts(self, rank: int, *, opened: bool) -> bool:
        """Return whether a rank is a member; for who is none itself yet, those are that it has dialled."""
        return rank in self._members or (opened and self.rank not in self._members)

    async def open(self, address: Address) -> Stream:
        """Open a connection as `TcpStreams.open` does. `close` aborts it, even if it still has data to send."""
        return self.keep(await self.streams.open(address))

    async def reach(self, address: Address, key: str) -> Stream:
        """Open a connection to the process that has a key; raise `TransportError` if another one listens there."""
        stream = await self.open(address)
        if self.streams.identity(stream[1]) != key:
            stream[1].transport.abort()
            raise TransportError(f"a process with another key listens at {address}")
        return stream

    def vouch(self, writer: asyncio.StreamWriter) -> None:
        """Exempt an accepted connection that this process expects from the limits on unknown peers."""
        self._open_limit.leave(writer)

    async def refusal(self, rank: int, writer: asyncio.StreamWriter) -> Refused | None:
        """Return why the process behind an accepted connection can't be ``rank``, as another one is; None if it can.

        A member's rank is that of its key: a process with the same key takes its place once it does not answer any
        more, as it was started again, and one with another key only once it is no member.
        """
        streams, key = self.streams, self.streams.identity(writer)
        if rank == self.rank:
            words = f"rank {rank} is the process that was asked, at {self.address}; choose another number"
            return None if key == streams.me else Refused(words, for_good=True)
        while (other := self.peers.get(rank)) is not None and streams.process(other.writer) != streams.process(writer):
            before = streams.identity(other.writer)
            if rank not in self._members and streams.owns(key, rank) and not streams.owns(before, rank):
                break  # anybody may connect in its number
            if await other.answers(self.machine.roster.heard_s.get(rank, 0.0), self.rules.heartbeat_s):
                advice = "; choose another number"
                if before == key:
                    advice = ". It has the same key: was identity.key copied? Each replica needs its own"
                words = f"rank {rank} is connected from {other.address}, which still answers{advice}"
                return Refused(words, for_good=True)
            if self.peers.get(rank) is other:  # else a third process has taken its place meanwhile
                break
        if self._is_anothers(rank, key):
            known = self.entries[rank].address
            return Refused(f"rank {rank} is that of {known}, which has another key, until the others have lost it")
        return None

    async def dial(self, entry: Entry, expected: str = "") -> None:
        """Open the connection to a rank.

        Args:
            expected: the name of the process that is to answer; "": any.

        Raises:
            OSError: Nothing answers at its address.
            RefusedError: It refuses, for example as it is another process.
            TransportError: A process with another key answers there.
            ConfigurationError: Its address isn't one.
        """
        rank, address = entry.rank, self.streams.locate(entry)
        reader, writer = await self.reach(address, entry.key)
        if rank in self.peers and not self._is_anothers(rank, self.identity(rank)):  # it has connected in the meantime
            writer.close()
            return
        mine = self._hellos[rank] = secrets.token_hex(8), asyncio.Event()
        try:
            hello = Hello(self.rank, str(self.address), mine[0], self.process, expected)
            answer = await ask((reader, writer), hello, Greeting)
            if answer.rank != rank:
                raise TransportError(
                    f"{address} should be rank {rank}, but answered as rank {answer.rank}. Another diloco run may be "
                    "using that port."
                )
            stream, crossed = (reader, writer), answer.crossed
            self._register(rank, address, stream, mine[0], answer.process, opened=True, crossed=crossed)
        except BaseException as error:
            writer.close()
            if not isinstance(error, EOFError) or rank not in self.peers:
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
        if peer := self.peers.pop(rank, None):
            peer.hang_up()

    def drop(self, reasons: Mapping[Peer, str], cause: Cause = "unreachable") -> None:
        """End connections, all of them before the first loss is reported, as others would hear of that one alone."""
        dropped = {peer: why for peer, why in reasons.items() if self.peers.get(peer.rank) is peer}
        for peer in dropped:
            if cause == "silent":
                peer.writer.write(pack(GivenUp()))  # in case the other process only stalled
            else:
                peer.writer.transport.abort()  # discards what the peer has not read
            self.hang_up(peer.rank)
            self.handle(Disconnected(peer.rank))
        for peer, why in dropped.items():
            self.handle(RankLost(peer.rank, f"the connection to {peer.address} was ended: {why}", cause))

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
                message = await read_frame(reader, Union[(Hello, *self.services)])  # of a list of types
            if not self.streams.is_current(writer):
                return
            if isinstance(message, Hello):
                await self._greet(message, reader, writer)
            else:
                await self.services[type(message)](message, reader, writer)
        except asyncio.CancelledError:
            pass  # the end of this process; asyncio would print a traceback
        except (OSError, EOFError, TransportError, ValueError):
            # an unknown peer, one that left, or a fault of a service
            logging.getLogger(__name__).debug("a connection that was accepted has ended", exc_info=True)
        finally:
            if not any(peer.writer is writer for peer in self.peers.values()):
                await _part(writer)
            self._open_limit.leave(writer)

    async def _greet(self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a peer that introduces itself as a rank, and register its connection unless the claim is refused."""
        rank, address = hello.rank, self.streams.address(hello.address, writer)
        if hello.expected not in ("", self.process):
            writer.write(pack(Refused("this is another process")))
            return
        if rank == self.rank or rank >= self.most_ranks:
            return
        crossed, answered = self._hellos.get(rank, ("", None))
        if answered is not None and self.rank < rank:
            await answered.wait()
        if (before := self.peers.get(rank)) is not None and before.crossed == hello.hello:
            return  # it said so before it answered this process's own hello, and the connection is registered
        if refused := await self.refusal(rank, writer):
            writer.write(pack(refused))
            return
        if (known := self.entries.get(rank)) is not None and known.key != self.streams.identity(writer):
            del self.entries[rank]
        writer.write(pack(Greeting(self.rank, crossed, self.process)))
        self._register(rank, address, (reader, writer), hello.hello, hello.process, opened=False)

    def _is_anothers(self, rank: int, key: str) -> bool:
        """Return whether a rank is that of another key. Who only asked a member in that number keeps nobody out."""
        known = self.entries.get(rank)
        if known is None or known.key == key:
            return False
        return rank in self._members or not (self.rank in self._members or self.streams.owns(key, rank))

    def _register(
        self, rank: int, address: Address, stream: Stream, token: str, process: str, *, opened: bool, crossed: str = ""
    ) -> None:
        reader, writer = stream
        if not self.streams.is_current(writer):
            raise TransportError(f"the secret has changed since {address} was admitted")
        if before := self.peers.get(rank):
            if self.streams.process(before.writer) != self.streams.process(writer):
                before.writer.write(pack(Excluded(GREATEST, "it was started again")))
            self.hang_up(rank)
        number, trusted = next(self._numbers), self._trusts(rank, opened=opened)
        link = PayloadLink(dials=opened, meter=self.meter)
        peer = Peer(rank, number, address, writer, token, opened, trusted, crossed, link)
        self.peers[rank] = peer
        self._on_peer(peer)
        self.handle(Connected(rank, number, str(address), process))
        peer.task = self.begin(self._listen_to(peer, reader))
        self.arrived.set()
        keys = (self.streams.identity(writer),)
        if not trusted and (out := self._unknown_peers.enter(rank, keys)) is not None:
            self.drop({self.peers[out]: "too many connected peers are not members"})

    def _deliver(self, rank: int, message: Message) -> None:
        if not isinstance(message, Store):
            self.handle(Received(rank, message))
            return
        self.handle(Received(rank, Beat()))  # for the machine it is no more; its value may be secret, and isn't logged
        if receive := self.receivers.get(message.key):
            try:
                receive(rank, message.value)
            except MessageError:
                raise
            except Exception as error:  # of this process; its sender would be taken for lost
                self.fail(error)

    async def _listen_to(self, peer: Peer, reader: asyncio.StreamReader) -> None:
        ended = await peer.listen(reader, self.arrived, self._deliver)
        if self.peers.get(peer.rank) is not peer:
            return
        self.hang_up(peer.rank)
        self.handle(Disconnected(peer.rank))
        why, cause = await self._why_lost(peer, ended)
        if peer.rank not in self.peers:  # else a new process of that rank has connected, and was reported
            self.handle(RankLost(peer.rank, why, cause))

    async def _why_lost(self, peer: Peer, ended: str) -> tuple[str, Cause]:
        """Return why a process is lost whose connection has ended."""
        what = f"the connection to {peer.address} ended ({ended})"
        if not peer.trusted:  # nobody is dialled on a stranger's word
            return what, "unreachable"
        if not ended or self.machine.roster.was_suspended(self.loop.time()):  # it may have ended in the meantime, too
            how = f"ended the connection ({ended})" if ended else "dropped it"
            return f"{peer.address} received nothing from this process for too long and {how}", "unreachable"
        seed = f"{peer.rank} {peer.number}"
        for pause_s in itertools.islice(pauses(*_BETWEEN_INQUIRIES_S, seed), _INQUIRIES):  # it may be ending
            try:
                _, writer = await within(min(_INQUIRY_S, self.rules.silence_s), self.open(peer.address))
            except ConnectionRefusedError:
                return f"{what}, and nothing listens there any more", "ended"
            except ConnectionResetError:
                pass  # it was terminating at that moment
            except (OSError, EOFError, TransportError) as error:
                return f"{what} and can't be reopened ({error})", "unreachable"
            else:
                writer.close()
            await asyncio.sleep(pause_s)
        return f"{what}, though a process still listens there", "unreachable"

    async def _beat(self) -> None:
        self.handle(BeatDue())
        while True:
            await asyncio.sleep(self.rules.heartbeat_s)
            effects, now_s = self.handle(BeatDue()), self.loop.time()
            if effects.stalled:
                for peer in self.peers.values():
                    peer.link.bare_s = now_s
            why = f"nothing was received for {self.rules.silence_s:g} s"
            self.drop({peer: why for rank, peer in self.peers.items() if rank in effects.silent}, "silent")
            bare: dict[Peer, str] = {}
            for peer in self.peers.values():
                if why := peer.link.bare(now_s, self.rules.silence_s, self.rules.connect_timeout_s):
                    bare[peer] = why
                self.send(peer.rank, Beat())
            self.drop(bare)

    async def end_connections(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await self.streams.refuse()
        for _ in range(4):  # iterations of the loop in which new connections get the tasks that close them
            await asyncio.sleep(0)
        await self._hang_up_all(FLUSH_S)
        await self.streams.close()

    async def release(self) -> None:
        await self._hang_up_all(0.0)  # a cancelled task may still have registered a connection

    async def _hang_up_all(self, flush_s: float) -> None:
        """End all connections. Data that the other side has not received within ``flush_s`` is discarded."""
        flushed = [asyncio.create_task(peer.writer.wait_closed()) for peer in self.peers.values()]
        for rank in self.connected:
            self.hang_up(rank)
        if flushed:
            await asyncio.wait(flushed, timeout=flush_s)
        for transport in list(self.transports):
            transport.abort()
        if flushed:
            await asyncio.wait(flushed, timeout=FLUSH_S)
        await asyncio.sleep(0)


async def _part(writer: asyncio.StreamWriter) -> None:
    """Close a connection: the other end has a moment to read what was sent to it, and to close it, too.

    Otherwise TLS would wait half a minute for one that does not, and thousands of them would use up all descriptors.
    """
    raw = raw_transport(writer)
    if raw is not writer.transport or not raw.is_closing():  # it was not aborted in the handshake
        writer.close()
        with contextlib.suppress(OSError, asyncio.CancelledError):  # at the end of its task
            await within(FLUSH_S, writer.wait_closed())
    raw.abort()
