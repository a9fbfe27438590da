"""The stripes to the peers with which a rank exchanges payloads: who opens them, and how many."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from typing import Annotated

from msgspec import Meta

from diloco.errors import TransportError
from diloco.membership import Rank, View
from diloco.protocol import Refused, WireMessage
from diloco.transport.connections.connection_manager import ConnectionManager
from diloco.transport.connections.limits import pauses
from diloco.transport.connections.pace import MOST_STRIPES, streams_to_each
from diloco.transport.connections.peer import Peer
from diloco.transport.connections.streams import Done, Stream, ask, pack
from diloco.transport.connections.stripe import Stripe

_RETRY_S, _RETRY_PART = 0.2, 4  # pauses before the first stripe is dialled again; at most the patience / 4
_RETRY_MORE_S, _RETRY_MORE_AT_MOST_S = 1.0, 30.0  # the same for each other one


class LinkAsked(WireMessage, tag="link"):
    token: Annotated[str, Meta(min_length=1, max_length=64)]  # of the control connection
    rank: Rank  # of the sender
    number: Annotated[int, Meta(ge=0, lt=MOST_STRIPES)]  # of the stripe


class PeerLinks:
    """Everything runs in the control thread."""

    def __init__(self, connections: ConnectionManager) -> None:
        self.connections = connections
        self.rules = connections.rules
        self._wanted: frozenset[int] = frozenset()  # ranks to which there are to be stripes
        connections.services[LinkAsked] = self._serve

    @property
    def by_rank(self) -> dict[int, Peer]:
        """The connected peers with which this rank exchanges payloads. For any thread."""
        return {rank: peer for rank, peer in list(self.connections.peers.items()) if self.is_peer(rank)}

    def is_peer(self, rank: int) -> bool:
        """Return whether a rank of another replica is at the position of this one."""
        size = self.rules.ranks_per_replica
        return rank % size == self.rules.position and rank // size != self.rules.replica

    def peers(self, view: View) -> list[int]:
        return [rank for rank in self.rules.ranks(view.members) if self.is_peer(rank)]

    def want(self, ranks: Collection[int]) -> None:
        """Keep stripes to these ranks from now on, as they are members."""
        self._wanted = frozenset(ranks)
        for peer in self.connections.peers.values():
            self.begin(peer)
            if peer.link.wanted:
                self._keep_enough(peer)

    def begin(self, peer: Peer) -> None:
        """Open the first stripe to a peer, if it is wanted now."""
        was_wanted, peer.link.wanted = peer.link.wanted, peer.rank in self._wanted
        if peer.link.wanted and not was_wanted:
            peer.link.bare_s = self.connections.loop.time()
            if peer.link.dials:
                self.keep_at_least(peer, 1)

    async def open_stripe(self, peer: Peer) -> Stream:
        """Open a connection for one more stripe."""
        return await self.connections.reach(peer.address, self.connections.streams.identity(peer.writer))

    def _keep_enough(self, peer: Peer) -> None:
        """Keep as many stripes as the number of peers leaves to each, if the first one shows that many are of use."""
        number = streams_to_each(len(self._wanted))
        for task in peer.link.keeping[number:]:
            task.cancel()
        del peer.link.keeping[number:]
        if peer.link.dials and not peer.link.single and not all(stripe.near for stripe in peer.link.stripes.values()):
            self.keep_at_least(peer, number)

    def keep_at_least(self, peer: Peer, number: int) -> None:
        peer.link.keeping += [
            self.connections.begin(self._keep(peer, each)) for each in range(len(peer.link.keeping), number)
        ]

    async def _keep(self, peer: Peer, index: int) -> None:
        """Maintain one stripe: dial it, and dial it again when it ends."""
        clock = self.connections.loop
        times = (_RETRY_S, self.rules.silence_s / _RETRY_PART) if index == 0 else (_RETRY_MORE_S, _RETRY_MORE_AT_MOST_S)
        seed = f"{self.connections.rank} {peer.rank} {index}"
        pauses_s = pauses(*times, seed)
        while peer.link.dials and not peer.link.ended:
            began_s = clock.time()
            try:
                async with asyncio.timeout(self.rules.connect_timeout_s):
                    stream = await self.open_stripe(peer)
                    await ask(stream, LinkAsked(peer.token, self.connections.rank, index), Done)
                await self._use(peer, index, *stream)
            except (OSError, EOFError, TimeoutError, TransportError, ValueError) as error:
                peer.link.why = str(error) or type(error).__name__
            if clock.time() - began_s > 2 * (pause_s := next(pauses_s)):  # it was open for a while
                pauses_s = pauses(*times, seed)
                pause_s = next(pauses_s)
            await asyncio.sleep(pause_s)

    async def _serve(self, request: LinkAsked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        streams, peer = self.connections.streams, self.connections.peers.get(request.rank)
        if peer is not None and streams.identity(peer.writer) != streams.identity(writer):
            return
        if peer is None or peer.token != request.token or request.rank not in self._wanted or peer.link.dials:
            with contextlib.suppress(OSError):
                writer.write(pack(Refused("the other side does not expect this connection yet")))
                await writer.drain()
            return
        self.connections.vouch(writer)
        writer.write(pack(Done()))
        await self._use(peer, request.number, reader, writer)

    async def _use(self, peer: Peer, index: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        transport = writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        reader.feed_eof()  # so that `read` returns what has already arrived without waiting for more
        already = await reader.read()
        stripe = Stripe(peer.link, transport, self.rules.silence_s, compresses=self.rules.compress)
        try:
            if peer.link.ended:
                return
            stripe.begin(already)
            if stripe.ended.done() or peer.link.ended:  # by what has already arrived
                return
            peer.link.add(index, stripe)
            self._keep_enough(peer)
            await asyncio.shield(stripe.ended)  # so that one that is no longer wanted gives its parts back, too
        finally:
            stripe.end()
            writer.close()
