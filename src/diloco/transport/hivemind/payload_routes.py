"""How payloads get from one peer to another: over direct streams where one can reach the other, else over libp2p."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diloco.errors import TransportError
from diloco.protocol.fields import json_object
from diloco.protocol.registry import Entry
from diloco.transport.hivemind.direct_streams import hosts_in
from diloco.transport.hivemind.peer_streams import PeerStreams
from diloco.transport.peers.connection_manager import ConnectionManager
from diloco.transport.peers.data_link import LinkRequest
from diloco.transport.peers.link_manager import LinkManager
from diloco.transport.peers.opened_link import Route
from diloco.transport.peers.reliable_link import ReliableLink
from diloco.transport.peers.streams import Stream
from diloco.transport.peers.threads import Mailbox
from diloco.units import visible

__all__ = ["PayloadRoutes"]

_FORGET_S = 600.0  # a peer that could not be reached directly is not tried again for so long


class PayloadRoutes:
    """Opens links, each over a way on which both of its ends agree.

    Each tells the other how it can be reached. The end of the lower rank tries first, then the other; where neither
    reaches the other, libp2p does.

    Args:
        entries: rank -> its entry; kept up to date by the caller.
        mailbox: where the other peers' words come in.
    """

    def __init__(
        self,
        connections: ConnectionManager,
        streams: PeerStreams,
        entries: Mapping[int, Entry],
        mailbox: Mailbox,
        links: LinkManager,
    ) -> None:
        self._connections = connections
        self._streams = streams
        self._entries = entries
        self._mailbox = mailbox
        self._links = links
        self._unreachable: dict[str, tuple[float, str]] = {}  # peer -> until when it is not tried again, and why

    def open_link(self, request: LinkRequest) -> ReliableLink:
        """As `OpenLink` says."""
        mode, me = self._streams.place.direct, self._entries[self._connections.rank]
        peer = str(self._links.address_of(request.rank))  # its entry may still be on its way
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
                        return self._links.open_link(request, way)
                elif self._told(request, turn).get("reached") is True:
                    return self._links.open_link(request, Route("direct streams", dials=False))
        if mode == "only":
            raise TransportError(
                f"replica {request.rank} ({peer}) has no direct way to this one: {why}. swarm.direct='only' allows no "
                "other. Let one of the two be reached at its swarm.direct_port, or use swarm.direct='auto'"
            )
        streams = request.streams if request.chosen else 1
        return self._links.open_link(replace(request, streams=streams), Route(f"libp2p ({why})", single=True))

    def _try(self, peer: str, offer: object) -> tuple[Route | None, str]:
        """A way to a peer that has made an offer, or why there is none."""
        until_s, why = self._unreachable.get(peer, (0.0, ""))
        if time.monotonic() < until_s:
            return None, why

        async def opening() -> Stream:
            return self._connections.keep(await self._streams.direct.open(offer))

        try:
            first = [self._connections.call(opening())]
        except OSError as error:
            if self._streams.place.direct != "only":  # there is no other way: it is tried at every view
                self._unreachable[peer] = time.monotonic() + _FORGET_S, str(error)
            return None, str(error)

        async def opened() -> Stream:
            return first.pop() if first else await opening()

        return Route("direct streams", dials=True, open=opened), ""

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
