"""Payload links between peers: over direct streams if one peer can reach the other, else over libp2p."""

from __future__ import annotations

import time
from typing import Any

from diloco.errors import TransportError
from diloco.protocol import MessageError, Store, WireMessage, decode, encode
from diloco.transport.connections.connection_manager import ConnectionManager
from diloco.transport.connections.link_manager import LinkManager
from diloco.transport.connections.opened_link import LinkRequest, OpenedLink, Route
from diloco.transport.connections.reliable_link import ReliableLink
from diloco.transport.connections.streams import Stream
from diloco.transport.hivemind.direct_streams import DirectOffer, hosts_in
from diloco.transport.hivemind.peer_streams import PeerStreams
from diloco.transport.peers.background import Mailbox

__all__ = ["PayloadRoutes"]

_FORGET_S = 600.0  # how long a peer that could not be reached directly is not tried again


class Wanted(WireMessage):
    """Whether the sender wants direct streams, and what the receiver needs to open them; None: it does not listen."""

    wanted: bool
    offer: DirectOffer | None


class Reached(WireMessage):
    """Whether the sender has opened a stream to the receiver."""

    reached: bool


class PayloadRoutes(LinkManager):
    """Opens links, each over a route on which both ends agree.

    Each end sends the other its direct addresses. The end of lower rank tries to connect first, then the other. If
    neither can connect, the link uses libp2p.

    Args:
        connections: the control connections of this peer.
        streams: the streams of this peer.
        mailbox: receives the messages of the other peers.
        patience_s, compresses: as in `LinkManager`.
    """

    def __init__(
        self,
        connections: ConnectionManager,
        streams: PeerStreams,
        mailbox: Mailbox,
        patience_s: float,
        *,
        compresses: bool = True,
    ) -> None:
        super().__init__(connections, patience_s, compresses=compresses)
        self._streams = streams
        self._mailbox = mailbox
        self._unreachable: dict[str, tuple[float, str]] = {}  # peer -> the time before which it is not tried, and why

    def open_link(self, request: LinkRequest) -> ReliableLink:
        """Open a link as described by `OpenLink`."""
        mode, me = self._streams.place.direct, self._connections.entries[self._connections.rank]
        peer = str(self.address_of(request.rank))  # the peer's entry may still be in transit
        offer = None if mode == "never" else self._streams.direct.offer(peer, hosts_in(me.places))
        self._tell(request, "direct", Wanted(mode != "never", offer))
        theirs = self._told(request, "direct", Wanted)
        why = "one of the two peers does not use direct streams"
        if mode != "never" and theirs.wanted:
            why = "neither can be reached directly"
            for turn, tries in (("first", request.first), ("second", not request.first)):
                if not (theirs.offer if tries else offer):
                    continue  # both ends know that a peer without an offer does not listen
                if tries:
                    route, why = self._try(peer, theirs.offer)
                    self._tell(request, turn, Reached(route is not None))
                    if route is not None:
                        return self.open_over(route, request)
                elif self._told(request, turn, Reached).reached:
                    return self.open_over(Route("direct streams", dials=False), request)
        if mode == "only":
            raise TransportError(
                f"there is no direct connection between replica {request.rank} ({peer}) and this one: {why}. "
                "direct='only' allows no other. Make the port for direct streams of one of the two reachable (LAST of "
                "network.listen HOST:FIRST-LAST), or use direct='auto'"
            )
        return self.open_over(Route(f"libp2p ({why})", single=True), request)

    def _try(self, peer: str, offer: DirectOffer) -> tuple[Route | None, str]:
        """Return a route to a peer that has made an offer and "", or None and the reason."""
        until_s, why = self._unreachable.get(peer, (0.0, ""))
        if time.monotonic() < until_s:
            return None, why

        try:
            first = self._connections.call(self._open_directly(offer))
        except OSError as error:
            if self._streams.place.direct != "only":  # with "only" there is no alternative, so every view tries again
                self._unreachable[peer] = time.monotonic() + _FORGET_S, str(error)
            return None, str(error)
        return Route("direct streams", dials=True, offer=offer, first=[first]), ""

    async def open_connection(self, opened: OpenedLink) -> Stream:
        route = opened.route
        if route.first:
            return route.first.pop()
        return await (super().open_connection(opened) if route.offer is None else self._open_directly(route.offer))

    async def _open_directly(self, offer: DirectOffer) -> Stream:
        return self._connections.keep(await self._streams.direct.open(offer))

    def _tell(self, request: LinkRequest, topic: str, content: WireMessage) -> None:
        connections, message = self._connections, Store(f"{request.key}/{topic}", encode(content))
        connections.post(connections.send, request.rank, message)

    def _told(self, request: LinkRequest, topic: str, expected: Any) -> Any:
        data = self._mailbox.take(f"{request.key}/{topic}@{request.rank}", request.timeout_s)
        try:
            return decode(data, expected)
        except MessageError as error:
            raise TransportError(f"replica {request.rank} sent an unreadable message about streams: {error}") from error
