"""How payloads get from one peer to another: over direct streams where one can reach the other, else over libp2p."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diloco.errors import TransportError
from diloco.protocol.fields import json_object
from diloco.transport.connections.connection_manager import ConnectionManager
from diloco.transport.connections.link_manager import LinkManager
from diloco.transport.connections.opened_link import LinkRequest, OpenedLink, Route
from diloco.transport.connections.reliable_link import ReliableLink
from diloco.transport.connections.streams import Stream
from diloco.transport.hivemind.direct_streams import hosts_in
from diloco.transport.hivemind.peer_streams import PeerStreams
from diloco.transport.links import Link
from diloco.transport.peers.threads import Mailbox
from diloco.units import visible

__all__ = ["PayloadRoutes"]

_FORGET_S = 600.0  # a peer that could not be reached directly is not tried again for so long


class PayloadRoutes(LinkManager):
    """Opens links, each over a way on which both of its ends agree.

    Each tells the other how it can be reached. The end of the lower rank tries first, then the other; where neither
    reaches the other, libp2p does.

    Args:
        mailbox: where the other peers' words come in.
        patience_s, paces, emulated: as of `LinkManager`.
    """

    def __init__(
        self,
        connections: ConnectionManager,
        streams: PeerStreams,
        mailbox: Mailbox,
        patience_s: float,
        *,
        paces: bool = True,
        emulated: Link | None = None,
    ) -> None:
        super().__init__(connections, patience_s, paces=paces, emulated=emulated)
        self._streams = streams
        self._mailbox = mailbox
        self._unreachable: dict[str, tuple[float, str]] = {}  # peer -> until when it is not tried again, and why

    def open_link(self, request: LinkRequest) -> ReliableLink:
        """As `OpenLink` says."""
        mode, me = self._streams.place.direct, self._connections.entries[self._connections.rank]
        peer = str(self.address_of(request.rank))  # its entry may still be on its way
        offer = {} if mode == "never" else self._streams.direct.offer(peer, hosts_in(me.places))
        self._tell(request, "direct", {"wanted": mode != "never", "offer": offer})
        theirs = self._told(request, "direct")
        why = "one of the two wants no direct streams (swarm.direct)"
        if mode != "never" and theirs.get("wanted") is True:
            why = "neither can be reached directly"
            for turn, tries in (("first", request.first), ("second", not request.first)):
                if not (theirs.get("offer") if tries else offer):
                    continue  # who listens nowhere is not tried, as both know
                if tries:
                    way, why = self._try(peer, theirs.get("offer"))
                    self._tell(request, turn, {"reached": way is not None})
                    if way is not None:
                        return self.open_over(way, request)
                elif self._told(request, turn).get("reached") is True:
                    return self.open_over(Route("direct streams", dials=False), request)
        if mode == "only":
            raise TransportError(
                f"replica {request.rank} ({peer}) has no direct way to this one: {why}. swarm.direct='only' allows no "
                "other. Let one of the two be reached at its swarm.direct_port, or use swarm.direct='auto'"
            )
        streams = request.streams if request.chosen else 1
        return self.open_over(Route(f"libp2p ({why})", single=True), replace(request, streams=streams))

    def _try(self, peer: str, offer: object) -> tuple[Route | None, str]:
        """A way to a peer that has made an offer, or why there is none."""
        until_s, why = self._unreachable.get(peer, (0.0, ""))
        if time.monotonic() < until_s:
            return None, why

        try:
            first = self._connections.call(self._open_directly(offer))
        except OSError as error:
            if self._streams.place.direct != "only":  # there is no other way: it is tried at every view
                self._unreachable[peer] = time.monotonic() + _FORGET_S, str(error)
            return None, str(error)
        return Route("direct streams", dials=True, offer=offer, first=[first]), ""

    async def open_connection(self, opened: OpenedLink) -> Stream:
        route = opened.route
        if route.first:
            return route.first.pop()
        return await (super().open_connection(opened) if route.offer is None else self._open_directly(route.offer))

    async def _open_directly(self, offer: object) -> Stream:
        return self._connections.keep(await self._streams.direct.open(offer))

    def _tell(self, request: LinkRequest, what: str, words: Mapping[str, Any]) -> None:
        connections, message = self._connections, {"kind": "store", "key": f"{request.key}/{what}"}
        connections.post(connections.send, request.rank, message, json.dumps(words).encode())

    def _told(self, request: LinkRequest, what: str) -> dict[str, Any]:
        said = self._mailbox.take(f"{request.key}/{what}@{request.rank}", request.timeout_s)
        try:
            return json_object(said)
        except ValueError as error:
            words = visible(str(error))
            raise TransportError(f"what replica {request.rank} says about streams can't be read: {words}") from error
