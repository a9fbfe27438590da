"""The members of a swarm: asking peers for the table of members, connecting to them, and answering such questions."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from diloco.errors import RendezvousError, TransportError
from diloco.membership import Count, Rank, Ranks
from diloco.protocol import Entries, Entry, Introduce, Refused, Registry, WireMessage, difference
from diloco.transport.connections.connection_manager import ConnectionManager
from diloco.transport.connections.streams import (
    MAX_MESSAGE_BYTES,
    UNKNOWN_PEER_BYTES,
    Streams,
    pack,
    read_frame,
    within,
)
from diloco.transport.peers.transport import PeerTransport
from diloco.transport.swarm.peer_streams import PeerAddress, PeerStreams
from diloco.transport.swarm.status import PeerStatus
from diloco.units import visible

__all__ = ["MemberDialer", "NotNowError", "StatusAnswer", "StatusAsked", "SwarmService", "SwarmTable", "ask_peer"]

_ANSWER_S = 10.0


class NotNowError(OSError):
    """A reachable peer can't answer a question now, for example because it is starting or joining itself."""


class SwarmTable(WireMessage, tag="table", dict=True):
    """The members of a swarm, as one of them sees it."""

    swarm: Annotated[str, Meta(max_length=64)]  # the swarm's name, chosen by its founder
    known: Entries  # of the members and of the peers that are about to join
    members: Ranks  # the ranks of the view
    step: Count  # inner steps that the member has begun to synchronise
    founded_step: Count = 0  # step of the checkpoint that the swarm was founded from; 0 for none

    def __post_init__(self) -> None:
        if not self.swarm.isprintable() or not self.members or not self.entries.keys() >= {*self.members}:
            raise ValueError("it has no members, or members without entries")

    @functools.cached_property
    def entries(self) -> Mapping[int, Entry]:
        """Rank -> entry."""
        return {each.rank: each for each in self.known.whole()}

    @property
    def first(self) -> Entry:
        """The entry of the first member, which all joiners ask so that they learn of each other."""
        return self.entries[min(self.members)]


class TableAsked(WireMessage):
    """A peer asks for the table of members."""

    entry: Entry


class CallBackAsked(WireMessage):
    """A peer asks to have member ``to`` connect to it."""

    to: Rank
    entry: Entry


class Introduced(WireMessage):
    """The member was asked to connect."""


class StatusAsked(WireMessage):
    """An observer asks for the status of a peer."""

    since: Count | None = None  # the number of the first event to report; None: none
    of: Annotated[str, Meta(max_length=200)] | None = None  # another peer, which the asked one is to ask


class StatusAnswer(WireMessage):
    """The status of a peer as JSON, as it holds the records of events."""

    text: Annotated[bytes, Meta(max_length=1 << 20)]


class MemberDialer:
    """Asks peers for their tables, and opens connections to members. It runs in the control thread.

    Args:
        connections: the control connections of this peer.
        streams: the streams of this peer.
        registry: holds the entry of this peer; the entries in received tables are added.
        silence_s: the longest time that opening a connection may take, in seconds.
    """

    def __init__(
        self, connections: ConnectionManager, streams: PeerStreams, registry: Registry, silence_s: float
    ) -> None:
        self._connections = connections
        self._streams = streams
        self._registry = registry
        self._rank = connections.rank
        self._silence_s = silence_s

    async def ask(self, peer_id: str) -> SwarmTable:
        """Return the table of the first member of the swarm that ``peer_id`` is in.

        Raises:
            RendezvousError: if this peer is refused permanently.
            OSError: if the peer can't be reached or can't answer now.
        """
        mine = self._registry.entries[self._rank]
        question = TableAsked(mine)
        try:
            table = await ask_peer(self._streams, peer_id, question, SwarmTable)
            if table.first.address not in (peer_id, mine.address):
                self._streams.know(table.first.address, table.first.places)
                try:
                    table = await ask_peer(self._streams, table.first.address, question, SwarmTable)
                except RendezvousError:
                    pass  # the peer that was asked first does not refuse
                except OSError as error:  # the swarm exists, because the peer that was asked first is a member
                    raise NotNowError(str(error)) from error
        except RendezvousError:
            raise
        except (ValueError, TransportError) as error:
            raise NotNowError(f"{peer_id} answered with an invalid table: {error}") from error
        for rank, entry in table.entries.items():
            if rank != self._rank:
                self._registry.note(entry, keep={self._rank, *table.members, *self._connections.connected})
        return table  # type: ignore[no-any-return]  # what was asked for

    async def dial(self, table: SwarmTable) -> None:
        """Connect to all members, and as far as possible to the peers that are about to join.

        Raises:
            OSError: if a member can't be reached.
        """

        async def one(rank: int) -> None:
            entry = table.entries[rank]
            try:
                address = self._streams.calls_back_at(entry)
                await within(self._silence_s, self._connections.connect(rank, address))
            except (OSError, EOFError, TransportError, TimeoutError) as error:
                if rank in table.members and not await self._called_back(table, rank):
                    raise OSError(
                        f"replica {self._rank} can't reach replica {rank} ({entry.address}), which is a member: "
                        f"{str(error) or type(error).__name__}. If both are behind routers that block incoming "
                        "connections, they need a relay: a peer with a public address"
                    ) from error

        wanted = [rank for rank in table.entries if rank != self._rank and rank not in self._connections.connected]
        for result in await asyncio.gather(*(one(rank) for rank in wanted), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _called_back(self, table: SwarmTable, rank: int) -> bool:
        """Ask the other members to have member ``rank`` open the connection, and return whether it did."""
        question = CallBackAsked(rank, self._registry.entries[self._rank])
        for other in table.members:
            if other == rank:
                continue
            try:
                await ask_peer(self._streams, table.entries[other].address, question, Introduced)
            except OSError:
                continue
            with contextlib.suppress(TimeoutError):
                await within(self._silence_s, self._connected_to(rank))
                return True
        return False

    async def _connected_to(self, rank: int) -> None:
        # the first message from the other side shows that it has established the connection, too
        while (connection := self._connections.get(rank)) is None or not connection.num_messages:
            self._connections.arrived.clear()
            await self._connections.arrived.wait()


class SwarmService:
    """Answers the questions of other peers, from when the transport has begun.

    Args:
        transport: the transport of this peer.
        swarm: name of the swarm.
        founded_step: as in `SwarmTable`.
        status: as in `SwarmPlace`.
    """

    def __init__(self, transport: PeerTransport, swarm: str, founded_step: int, status: PeerStatus) -> None:
        self._transport = transport
        self._connections = transport.connections
        self._streams = transport.connections.streams
        self._registry = transport.registry
        self._swarm = swarm
        self._founded_step = founded_step
        self._status = status
        services = self._connections.services
        services[TableAsked], services[CallBackAsked] = self._answer_table, self._introduce
        services[StatusAsked] = self._answer_status

    @property
    def _members(self) -> tuple[int, ...]:
        """The members of the view; empty while this peer is not a member itself."""
        members = self._transport.view.members
        return members if self._transport.replica in members else ()

    def _table(self) -> SwarmTable:
        """Return the table of the members and of connected peers that ask to join."""
        members, entries = self._members, self._registry.entries
        ranks = sorted({*members, *self._connections.connected} & entries.keys())
        step = self._transport.step
        return SwarmTable(self._swarm, Entries.of(entries[rank] for rank in ranks), members, step, self._founded_step)

    def _refusal(self, entry: Entry) -> str:
        """Return why a peer can't take part, or "" if it can."""
        known = self._registry.entries.get(entry.rank)
        if known is not None and known.address != entry.address and entry.rank in self._members:
            return f"replica {entry.rank} is {known.address} already; choose another number"
        return difference(self._registry.entries[self._transport.replica], entry)

    async def _answer_table(
        self, asked: TableAsked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        entry = asked.entry
        if entry.address != self._streams.identity(writer):
            return
        if closed := self._transport.closed_to_joiners or ("" if self._members else "it is joining itself"):
            answer: WireMessage = Refused(closed)
        elif why := self._refusal(entry):
            answer = Refused(why, for_good=True)
        else:
            self._registry.note(entry, keep={*self._members, self._transport.replica, *self._connections.connected})
            answer = self._table()
        await _say(answer, reader, writer)

    async def _introduce(
        self, asked: CallBackAsked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Have a member connect to the asking peer, which can't connect to that member."""
        if asked.entry.address == self._streams.identity(writer) and asked.to in self._members:
            self._connections.send(asked.to, Introduce(asked.entry))
            await _say(Introduced(), reader, writer)

    async def _answer_status(
        self, asked: StatusAsked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer with the status of this peer, or forward the question to a member that the asking peer can't reach."""
        other, since, others = asked.of, asked.since, {*self._members} - {self._transport.replica}
        answer: WireMessage
        if other is None:
            codec = self._registry.entries[self._transport.replica].facts.get("codec", "")
            status = self._status.message(self._transport, self._swarm, codec, since)
            answer = StatusAnswer(json.dumps(status).encode())
        elif any(rank in others and entry.address == other for rank, entry in self._registry.entries.items()):
            answer = await ask_peer(self._streams, other, StatusAsked(since), StatusAnswer)
        else:
            answer = Refused(f"{visible(other, 80)} is not another member of this swarm")
        await _say(answer, reader, writer)


async def ask_peer(
    streams: Streams, peer_id: str, question: WireMessage, expected: Any, most_bytes: int = MAX_MESSAGE_BYTES
) -> Any:
    """Ask a peer and return its answer, of at most ``most_bytes``.

    Raises:
        RendezvousError: if the peer refuses permanently; the message gives its reason.
        NotNowError: if the peer can be reached but does not answer, or can't answer now.
        OSError: if the peer can't be reached.
    """
    reader, writer = await streams.open(PeerAddress(peer_id))
    try:
        writer.write(pack(question))
        if question == StatusAsked():
            most_bytes = UNKNOWN_PEER_BYTES
        answer, _ = await within(_ANSWER_S, read_frame(reader, expected | Refused, most_bytes))
    except (EOFError, TimeoutError) as error:
        raise NotNowError(f"{peer_id} does not answer") from error
    finally:
        writer.close()
    if isinstance(answer, Refused):
        if answer.for_good:
            raise RendezvousError(f"{peer_id} refuses: {answer.reason}.")
        raise NotNowError(f"{peer_id} can't answer yet: {answer.reason}")
    return answer


async def _say(answer: WireMessage, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send an answer, and wait until the asking peer closes the stream.

    When one side closes a stream, the daemon drops what the other side has not read yet.
    """
    writer.write(pack(answer))
    await writer.drain()
    await within(_ANSWER_S, reader.read(1))
