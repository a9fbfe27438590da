"""Payload links between peers: over TCP if one peer can reach the other, else over libp2p."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

from diloco.protocol import Store
from diloco.transport.address import Address
from diloco.transport.connections.link import PeerLink, PeerLinks
from diloco.transport.connections.streams import Stream
from diloco.transport.swarm.peer_streams import PeerStreams

__all__ = ["SwarmLinks"]

_TURN = "your turn to dial"


class SwarmLinks(PeerLinks):
    """Links of which each uses the first route that works.

    The end of lower rank tries to reach the other one over TCP. If it can't, it is the other's turn, which uses libp2p
    if it can't either.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._places: WeakKeyDictionary[PeerLink, list[Address]] = WeakKeyDictionary()  # of links over TCP
        self._first: WeakKeyDictionary[PeerLink, Stream] = WeakKeyDictionary()  # a stream that is already open

    @property
    def _streams(self) -> PeerStreams:
        return cast(PeerStreams, self.connections.streams)

    def receive(self, rank: int, topic: str, content: bytes) -> None:
        """Dial from now on, as a peer of lower rank can't."""
        link = self.by_rank.get(rank)
        if link is not None and topic == _TURN and rank < self.connections.rank and not link.dials:
            link.dials = True
            if link.started:
                self.begin_stripes(link)

    def make(self, rank: int) -> PeerLink:
        link = super().make(rank)
        link.dials = self.connections.rank < rank
        return link

    def begin_stripes(self, link: PeerLink) -> None:
        if link.dials:
            link.keeping.append(self.connections.begin(self._choose(link)))

    async def open_stripe(self, link: PeerLink) -> Stream:
        if first := self._first.pop(link, None):
            return first
        if places := self._places.get(link):
            return await self._open_directly(link, places)
        return await super().open_stripe(link)

    async def _choose(self, link: PeerLink) -> None:
        """Choose a route, and keep stripes over it; or leave both to the other end."""
        streams, entry = self._streams, self.connections.entries.get(link.rank)
        places = streams.places_of(entry)
        try:
            self._first[link] = await self._open_directly(link, places if streams.place.direct else ())
            self._places[link] = places
        except OSError as error:
            link.why = str(error)
            if streams.port and self.connections.rank < link.rank:
                link.dials = False
                self.connections.send(link.rank, Store(_TURN, b""))
                return
            link.single = True
        link.keeping.clear()  # of this task, which is about to end
        super().begin_stripes(link)

    async def _open_directly(self, link: PeerLink, places: Sequence[Address]) -> Stream:
        if (connection := self.connections.get(link.rank)) is None:
            raise OSError(f"rank {link.rank} is not connected")
        return self.connections.keep(await self._streams.open_directly(connection.address.host, places))
