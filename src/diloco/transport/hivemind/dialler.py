"""From a peer that knows a swarm to connections to all its members, also where only these can open one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from diloco.errors import RendezvousError, TransportError
from diloco.protocol.registry import Entry, Registry
from diloco.transport.hivemind.peer_streams import PeerAddress, PeerStreams
from diloco.transport.hivemind.swarm import NotNowError, SwarmTable, ask_peer
from diloco.transport.peers.connection_manager import ConnectionManager
from diloco.transport.peers.streams import within

__all__ = ["Dialler"]


class Dialler:
    """Opens this peer's connections to others. In the control thread.

    Args:
        connections: of this peer.
        streams: of this peer.
        registry: of all that are known; gets those that tables name.
        rank: of this peer.
        mine: tells its entry.
        silence_s: the longest that opening one may take.
    """

    def __init__(
        self,
        connections: ConnectionManager,
        streams: PeerStreams,
        registry: Registry,
        rank: int,
        *,
        mine: Callable[[], Entry],
        silence_s: float,
    ) -> None:
        self._connections = connections
        self._streams = streams
        self._registry = registry
        self._rank = rank
        self._mine = mine
        self._silence_s = silence_s
        self._calls: set[asyncio.Future[None]] = set()

    async def ask(self, peer_id: str) -> SwarmTable:
        """The table of ``peer_id``'s first member, which hears of all who come."""
        question = {"kind": "table", "entry": self._mine().to_message()}
        try:
            table = SwarmTable.from_message(await ask_peer(self._streams, peer_id, question))
            if table.first.address not in (peer_id, self._mine().address):
                self._streams.know(table.first.address, table.first.places)
                try:
                    table = SwarmTable.from_message(await ask_peer(self._streams, table.first.address, question))
                except OSError as error:  # the one who named it is there
                    raise NotNowError(str(error)) from error
        except (KeyError, ValueError, TypeError, TransportError) as error:
            if isinstance(error, RendezvousError):
                raise
            raise NotNowError(f"{peer_id} answered what is no table: {error}") from error
        self._registry.entries.update({rank: entry for rank, entry in table.entries.items() if rank != self._rank})
        return table

    async def dial(self, table: SwarmTable) -> None:
        """Connect to all members, who must be reached, and to those who are about to be some, where that works.

        Raises:
            OSError: if a member can't be reached.
        """

        async def one(rank: int) -> None:
            entry = table.entries[rank]
            self._streams.know(entry.address, entry.places)
            try:
                await within(self._silence_s, self._connections.connect(rank, PeerAddress(entry.address)))
            except (OSError, EOFError, TransportError, TimeoutError) as error:
                if rank in table.members and not await self._called_back(table, rank):
                    raise OSError(
                        f"replica {self._rank} can't reach replica {rank} ({entry.address}), which is a member: "
                        f"{str(error) or type(error).__name__}. A way to it, or, where both are behind routers that "
                        "let nothing in, a peer with a public address that relays, would work"
                    ) from error

        wanted = [rank for rank in table.entries if rank != self._rank and rank not in self._connections.connected]
        for result in await asyncio.gather(*(one(rank) for rank in wanted), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _called_back(self, table: SwarmTable, rank: int) -> bool:
        """Ask a member that can be reached to let one that can't open the connection; whether it did."""
        question = {"kind": "introduce", "to": rank, "entry": self._mine().to_message()}
        for other in table.members:
            if other == rank:
                continue
            try:
                await ask_peer(self._streams, table.entries[other].address, question)
            except OSError:
                continue
            with contextlib.suppress(TimeoutError):
                await within(self._silence_s, self._connected_to(rank))
                return True
        return False

    async def _connected_to(self, rank: int) -> None:
        while not self._connections.words(
            rank
        ):  # the first says that it knows the connection, as members of a view must
            self._connections.arrived.clear()
            await self._connections.arrived.wait()

    def call_back(self, entry: Entry) -> None:
        """Open the connection that another one can't."""

        async def call() -> None:
            self._streams.know(entry.address, entry.places)
            with contextlib.suppress(OSError, EOFError, TransportError, TimeoutError):
                await within(self._silence_s, self._connections.connect(entry.rank, PeerAddress(entry.address)))

        if entry.rank not in self._connections.connected:
            self._calls.add(task := asyncio.ensure_future(call()))
            task.add_done_callback(self._calls.discard)
