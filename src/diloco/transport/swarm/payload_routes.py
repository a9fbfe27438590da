"""Payload links between peers: over direct streams if one peer can reach the other, else over libp2p."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any, cast
from weakref import WeakKeyDictionary

from diloco.errors import TransportError
from diloco.protocol import Store, WireMessage, decode, encode
from diloco.transport.connections.link import PeerLink, PeerLinks
from diloco.transport.connections.streams import Stream
from diloco.transport.swarm.direct_streams import DirectOffer, hosts_in
from diloco.transport.swarm.peer_streams import PeerStreams

__all__ = ["SwarmLinks"]


class Wanted(WireMessage):
    """Whether the sender wants direct streams, and what the receiver needs to open them; None: it does not listen."""

    wanted: bool
    offer: DirectOffer | None


class Reached(WireMessage):
    """Whether the sender has opened a stream to the receiver."""

    reached: bool


_TOPICS: dict[str, type[WireMessage]] = {"direct": Wanted, "first": Reached, "second": Reached}


class SwarmLinks(PeerLinks):
    """Links of which each uses a route on which both ends agree.

    Each end sends the other its direct addresses. The end of lower rank tries to connect first, then the other. If
    neither can connect, the link uses libp2p.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # link -> topic -> what the peer says about it, once it does
        self._told: WeakKeyDictionary[PeerLink, dict[str, asyncio.Future[Any]]] = WeakKeyDictionary()
        self._offers: WeakKeyDictionary[PeerLink, DirectOffer] = WeakKeyDictionary()
        self._first: WeakKeyDictionary[PeerLink, Stream] = WeakKeyDictionary()  # a stream that is already open

    @property
    def _streams(self) -> PeerStreams:
        return cast(PeerStreams, self.connections.streams)

    def receive(self, rank: int, topic: str, content: bytes) -> None:
        link = self.by_rank.get(rank)
        if link is None or topic not in _TOPICS:
            return
        message = decode(content, _TOPICS[topic])
        if not (told := self._topics(link)[topic]).done():
            told.set_result(message)

    def begin_stripes(self, link: PeerLink) -> None:
        link.keeping.append(self.connections.begin(self._agree(link)))

    async def open_stripe(self, link: PeerLink) -> Stream:
        if (first := self._first.pop(link, None)) is not None:
            return first
        offer = self._offers.get(link)
        return await (super().open_stripe(link) if offer is None else self._open_directly(offer))

    def _topics(self, link: PeerLink) -> dict[str, asyncio.Future[Any]]:
        return self._told.setdefault(link, defaultdict(self.connections.loop.create_future))

    async def _agree(self, link: PeerLink) -> None:
        """Agree on a route with the peer, and open the first stripe if that is up to this end."""
        try:
            async with asyncio.timeout(self.rules.connect_timeout_s):
                await self._choose(link)
        except TimeoutError:
            self.connections.drop(link.rank, "it has not agreed on a route for payloads")
            return
        except (OSError, TransportError) as error:
            self.connections.drop(link.rank, str(error))
            return
        link.keeping.clear()
        super().begin_stripes(link)

    async def _choose(self, link: PeerLink) -> None:
        mode, me = self._streams.place.direct, self.connections.entries[self.connections.rank]
        peer, first = str(self.address_of(link.rank)), self.connections.rank < link.rank
        offer = None if mode == "never" else self._streams.direct.offer(peer, hosts_in(me.places))
        self._tell(link, "direct", Wanted(mode != "never", offer))
        theirs: Wanted = await self._topics(link)["direct"]
        why = "one of the two peers does not use direct streams"
        if mode != "never" and theirs.wanted:
            why = "neither can be reached directly"
            for turn, tries in (("first", first), ("second", not first)):
                there = theirs.offer if tries else offer
                if there is None:
                    continue  # both ends know that a peer without an offer does not listen
                if tries:
                    try:
                        self._first[link], self._offers[link] = await self._open_directly(there), there
                    except OSError as error:
                        why = str(error)
                    self._tell(link, turn, Reached(link in self._first))
                reached = link in self._first if tries else (await self._topics(link)[turn]).reached
                if reached:
                    link.description, link.dials = "direct streams", tries
                    return
        if mode == "only":
            raise TransportError(
                f"there is no direct connection between replica {link.rank} ({peer}) and this one: {why}. "
                "direct='only' allows no other. Make the port for direct streams of one of the two reachable (LAST of "
                "network.listen HOST:FIRST-LAST), or use direct='auto'"
            )
        link.description, link.single = f"libp2p ({why})", True

    async def _open_directly(self, offer: DirectOffer) -> Stream:
        return self.connections.keep(await self._streams.direct.open(offer))

    def _tell(self, link: PeerLink, topic: str, content: WireMessage) -> None:
        self.connections.send(link.rank, Store(topic, encode(content)))
