"""Encrypted streams over libp2p for control connections and payload links, with admitted peers only."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from diloco.protocol import Entry
from diloco.transport.address import Address
from diloco.transport.connections.streams import Accept, Stream, within
from diloco.transport.secret import PROOF_BYTES, TurnedAwayError
from diloco.transport.swarm.direct_streams import DirectStreams, hosts_in
from diloco.transport.swarm.identity import Identity
from diloco.transport.swarm.node import Node
from diloco.transport.swarm.peer_config import Admission, NodePlace

__all__ = ["PeerAddress", "PeerStreams"]

_PROOF_S = 10.0
_MOST_KNOWN = 4096  # anyone may store records in the DHT, under a new identity each time


@dataclass(frozen=True)
class PeerAddress(Address):
    """The identity of a peer, which is all that others need to reach it.

    >>> str(PeerAddress("12D3KooW"))
    '12D3KooW'
    """

    port: int = 0

    def __str__(self) -> str:
        return self.host


class PeerStreams:
    """The streams of one peer."""

    def __init__(self, identity: Identity, place: NodePlace, admission: Admission) -> None:
        self.place = place
        self._identity = identity
        self._others: WeakKeyDictionary[asyncio.StreamWriter, str] = WeakKeyDictionary()
        self.direct = DirectStreams(identity.peer_id, self._others)  # streams without libp2p
        self._admission = admission
        self._known: dict[str, tuple[str, ...]] = {}
        self._hosts: WeakKeyDictionary[asyncio.StreamWriter, str] = WeakKeyDictionary()
        self._unproven: WeakSet[asyncio.StreamWriter] = WeakSet()
        self._accept: Accept | None = None
        self._node: Node | None = None

    @property
    def node(self) -> Node:
        """The running peer, once `listen` has started it."""
        assert self._node is not None, "listen must be called first"
        return self._node

    @property
    def direct_description(self) -> str:
        """A description of the routes of payloads, for display."""
        if self.place.direct == "never":
            return "over libp2p (direct='never')"
        origin = f"accepted at port {self.direct.port}" if self.direct.port else "opened by this peer only"
        otherwise = "; no other route" if self.place.direct == "only" else "; over libp2p where they are impossible"
        return f"direct streams (TLS 1.3), {origin}{otherwise}"

    def know(self, peer_id: str, addresses: tuple[str, ...]) -> None:
        """Remember addresses of a peer, in case the network does not find it by itself; of the last 4096 peers."""
        if addresses:
            self._known.pop(peer_id, None)
            self._known[peer_id] = addresses
            if len(self._known) > _MOST_KNOWN:
                del self._known[next(iter(self._known))]

    async def listen(self, accept: Accept, *where: Any) -> PeerAddress:
        """Start the peer. Streams from peers that are not on the list are closed at once."""
        self._node = await Node.start(self._identity, self.place)
        self._accept = accept
        if self.place.direct != "never":
            hosts = [host for each in self.place.listen for host in hosts_in([each])]
            await self.direct.listen(hosts, self.place.direct_port, self._take_direct)
        await self._node.handle(self._take)
        return PeerAddress(self._node.peer_id)

    async def open(self, address: Address) -> Stream:
        peer_id, me = address.host, self.node.peer_id
        if not self._admission.admits(peer_id):
            raise OSError(f"{peer_id} is not on the list of peers that may take part (network.allow)")
        reader, writer = await self.node.open(peer_id, self._known.get(peer_id, ()))
        try:
            writer.write(self._admission.proof(me, peer_id))
            proof = await within(_PROOF_S, reader.readexactly(PROOF_BYTES))
            if not self._admission.accepts(proof, peer_id, me):
                raise TurnedAwayError(f"{peer_id} belongs to another run, or has another secret")
        except (asyncio.IncompleteReadError, TimeoutError, ConnectionError) as error:
            writer.close()
            raise TurnedAwayError(
                f"{peer_id} rejected this peer: it belongs to another run, has another secret, does not list this peer "
                "in network.allow, or has just ended"
            ) from error
        except BaseException:
            writer.close()
            raise
        self._others[writer] = peer_id
        return reader, writer

    def address(self, text: str) -> PeerAddress:
        return PeerAddress(text)

    def payload_address(self, entry: Entry) -> PeerAddress:
        return PeerAddress(entry.address)

    def calls_back_at(self, entry: Entry) -> PeerAddress:
        self.know(entry.address, entry.places)
        return PeerAddress(entry.address)

    def identity(self, writer: asyncio.StreamWriter) -> str:
        """Return the identity of the other end, which libp2p has authenticated."""
        return self._others.get(writer, "nobody")

    def origins(self, writer: asyncio.StreamWriter) -> tuple[str, ...]:
        return tuple(filter(None, (self.identity(writer), self._hosts.get(writer, ""))))

    def tune(self, writer: asyncio.StreamWriter, silence_s: float) -> None:
        """Do nothing, because the daemon tunes its connections itself."""

    async def refuse(self) -> None:
        self._accept = None
        await self.direct.refuse()

    async def close(self) -> None:
        if self._node is not None:
            await self._node.close()

    async def admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if writer not in self._unproven:  # a direct stream, whose other end is already authenticated
            return True
        peer_id, me = self.identity(writer), self.node.peer_id
        if not self._admission.accepts(await reader.readexactly(PROOF_BYTES), peer_id, me):
            return False
        self._unproven.discard(writer)
        writer.write(self._admission.proof(me, peer_id))
        return True

    async def _take_direct(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place = writer.get_extra_info("peername")
        self._hosts[writer] = str(place[0]) if place else ""
        await self._hand_over(reader, writer)

    async def _take(self, peer_id: str, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._others[writer], self._hosts[writer] = peer_id, host
        self._unproven.add(writer)
        await self._hand_over(reader, writer)

    async def _hand_over(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._accept is None or not self._admission.admits(self.identity(writer)):
            writer.close()
        else:
            await self._accept(reader, writer)
