"""Control connections and payload links over libp2p: encrypted, and only with peers that are admitted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from diloco.errors import TransportError
from diloco.transport.address import Address
from diloco.transport.hivemind.identity import Identity
from diloco.transport.hivemind.node import Node
from diloco.transport.hivemind.place import PROOF_BYTES, Admission, NodePlace
from diloco.transport.peers.streams import Accept, within

__all__ = ["PeerAddress", "PeerStreams"]

_PROOF_S = 10.0
_MOST_UNPROVEN = 64
"""Of more streams than this at a time that have proved nothing yet, the newest are refused."""


@dataclass(frozen=True)
class PeerAddress(Address):
    """A peer's identity, which is all that others need to reach it.

    >>> str(PeerAddress("12D3KooW"))
    '12D3KooW'
    """

    port: int = 0

    def __str__(self) -> str:
        return self.host


class PeerStreams:
    """Streams of one peer.

    Args:
        identity: its own.
        place: where it is.
        admission: who may open streams.
    """

    def __init__(self, identity: Identity, place: NodePlace, admission: Admission) -> None:
        self.identity_of_mine = identity
        self._place = place
        self._admission = admission
        self._others: WeakKeyDictionary[asyncio.StreamWriter, str] = WeakKeyDictionary()
        self._known: dict[str, tuple[str, ...]] = {}
        self._unproven = 0
        self._accept: Accept | None = None
        self._node: Node | None = None

    @property
    def node(self) -> Node:
        """The running peer; `listen` comes first."""
        assert self._node is not None, "listen comes first"
        return self._node

    def know(self, peer_id: str, addresses: tuple[str, ...]) -> None:
        """Addresses of a peer that the network may not find by itself."""
        if addresses:
            self._known[peer_id] = addresses

    async def listen(self, accept: Accept, *where: Any) -> PeerAddress:
        """Start the peer. Streams of peers that are not admitted end before anything of them is read."""
        self._node = await Node.start(self.identity_of_mine, self._place)
        self._accept = accept
        await self._node.handle(self._admit)
        return PeerAddress(self._node.peer_id)

    async def open(self, address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        peer_id, me = address.host, self.node.peer_id
        if not self._admission.admits(peer_id):
            raise OSError(f"{peer_id} is not on the list of peers that may take part (swarm.allow)")
        reader, writer = await self.node.open(peer_id, self._known.get(peer_id, ()))
        try:
            writer.write(self._admission.proof(me, peer_id))
            proof = await within(_PROOF_S, reader.readexactly(PROOF_BYTES))
            if not self._admission.accepts(proof, peer_id, me):
                raise OSError(f"{peer_id} belongs to another run, or has another secret")
        except (asyncio.IncompleteReadError, TimeoutError, ConnectionError) as error:
            writer.close()
            raise OSError(
                f"{peer_id} turned this peer away: it belongs to another run, has another secret or a list of peers "
                "without this one, or has just ended"
            ) from error
        except BaseException:
            writer.close()
            raise
        self._others[writer] = peer_id
        return reader, writer

    def address(self, text: str) -> PeerAddress:
        return PeerAddress(text)

    def identity(self, writer: asyncio.StreamWriter) -> str:
        """As libp2p has proved it."""
        return self._others.get(writer, "nobody")

    def tune(self, writer: asyncio.StreamWriter, silence_s: float) -> None:
        """The daemon tunes its connections itself."""

    async def refuse(self) -> None:
        self._accept = None

    async def close(self) -> None:
        if self._node is not None:
            await self._node.close()

    async def _admit(self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        me = self.node.peer_id
        accept = self._accept
        if accept is None or not self._admission.admits(peer_id) or self._unproven >= _MOST_UNPROVEN:
            writer.close()
            return
        self._unproven += 1
        try:
            proof = await within(_PROOF_S, reader.readexactly(PROOF_BYTES))
            if not self._admission.accepts(proof, peer_id, me):
                raise TransportError("it does not know the secret")
            writer.write(self._admission.proof(me, peer_id))
        except (OSError, EOFError, TimeoutError, TransportError):
            writer.close()
            return
        finally:
            self._unproven -= 1
        self._others[writer] = peer_id
        await accept(reader, writer)
