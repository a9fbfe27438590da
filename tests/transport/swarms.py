"""Peers of a swarm, each with its own threads, daemon and connections, in one process and on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from diloco.protocol import Rules
from diloco.transport import (
    Admission,
    Directory,
    NodePlace,
    PeerStreams,
    PeerTransport,
    SwarmPlace,
    connect,
    join,
    load_identity,
)
from tests.transport.relays import frame
from tests.transport.wires import LIMIT_S, at_once, wait_for_members

HIVEMIND_LEAVES_CONNECTIONS = pytest.mark.filterwarnings(
    # a peer that ends in the middle of a request leaves its connection to the daemon to the garbage collector
    "ignore::pytest.PytestUnraisableExceptionWarning"
)

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
QUICK: dict[str, Any] = {
    "heartbeat_s": 0.2,
    "silence_s": 10.0,
    "round_timeout_s": LIMIT_S,
    "rendezvous_timeout_s": LIMIT_S,
    "continue_without_lost": True,
}


def streams_of(transport: PeerTransport) -> PeerStreams:
    streams = transport.connections.streams
    assert isinstance(streams, PeerStreams)
    return streams


def over_libp2p(transports: Sequence[PeerTransport]) -> bool:
    """Return whether payloads go over libp2p, where a second stripe would be useless."""
    return any(peer.link.single for each in transports for peer in each.connections.peers.values())


class Swarms:
    """Makes and ends peers, with a folder of private keys, one per replica number, because keys take long to make."""

    def __init__(self, keys: Path) -> None:
        self._keys = keys
        self.transports: list[PeerTransport] = []

    def peer(
        self,
        number: int,
        known: Sequence[PeerTransport] = (),
        *,
        run: str = "run",
        secret: str = "",
        allowed: frozenset[str] = frozenset(),
        at: Sequence[str] = (),
        hidden: bool = False,
        founds: bool = False,
        held_step: int = -1,
        held_swarm: str = "",
        join_window_s: float = 0.5,
        **rules: Any,
    ) -> Directory:
        """Start a peer that knows ``known``.

        Args:
            at: further addresses that the peer knows.
            hidden: whether no other peer can open a connection to it.
        """
        place = SwarmPlace(
            identity=self._keys / f"{number}.key",
            admission=Admission(run, secret, allowed),
            node=NodePlace(join=(*at, *self.addresses_of(*known)), listen=() if hidden else LOOPBACK, map_ports=False),
            replica=number,
            held_swarm=held_swarm,
            founds=founds,
            join_window_s=join_window_s,
            name=f"peer {number}",
        )
        connected = connect(place, Rules(**(QUICK | rules)), held_step=held_step)
        self.transports.append(connected.transport)
        return connected

    def key(self, number: int) -> Path:
        return self._keys / f"{number}.key"

    def addresses_of(self, *transports: PeerTransport) -> tuple[str, ...]:
        """Return the addresses at which peers can be reached."""
        told = [each.connections.call(streams_of(each).node.addresses()) for each in transports]
        return tuple(address for addresses in told for address in addresses)

    @asynccontextmanager
    async def stranger(self, number: int, member: PeerTransport, admission: Admission) -> AsyncIterator[PeerStreams]:
        """The streams of a process that is in the network and takes no part."""
        at = NodePlace(join=self.addresses_of(member), listen=(), map_ports=False)
        streams = PeerStreams(load_identity(self.key(number)), at, admission)
        await streams.listen(lambda *_: asyncio.sleep(0))
        try:
            yield streams
        finally:
            await streams.close()

    def meet(self, num_replicas: int, **options: Any) -> list[PeerTransport]:
        """Start this many peers in one view."""
        first = self.peer(0, **options)
        assert not first.joining
        later = at_once([lambda m=m: self._joined(m, first.transport, options) for m in range(1, num_replicas)])
        for each in later:
            if isinstance(each, Exception):
                raise each
        transports = [first.transport, *later]
        for transport in transports:
            wait_for_members(transport, num_replicas)
        for transport in transports:
            transport.tick()  # rounds of the last view begin one step after the joiners have entered
        return transports

    def _joined(self, number: int, first: PeerTransport, options: dict[str, Any]) -> PeerTransport:
        connected = self.peer(number, [first], **options)
        assert connected.joining
        join(connected, LIMIT_S)
        return connected.transport

    def close(self) -> None:
        at_once([transport.close for transport in self.transports])


async def answer_to(stream: tuple[asyncio.StreamReader, asyncio.StreamWriter], *messages: object) -> bytes:
    """Return what the other end of a stream says to messages; b"" if it closes the stream."""
    reader, writer = stream
    writer.write(b"".join(map(frame, messages)))
    try:
        return await asyncio.wait_for(reader.read(1 << 14), LIMIT_S)
    finally:
        writer.close()
