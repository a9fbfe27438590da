"""Peers of a swarm, each with its own threads, daemon and connections, in one process and on loopback."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from diloco.protocol import Rules
from diloco.transport import (
    Admission,
    Directory,
    NodePlace,
    PeerReport,
    PeerStatus,
    PeerStreams,
    PeerTransport,
    SwarmPlace,
    connect,
    join,
    open_status_client,
)
from tests.transport.wires import at_once

LIMIT_S = 60.0
"""Far longer than anything here takes, even on a busy machine."""

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


class Swarms:
    """Makes and ends peers.

    Args:
        keys: a folder of private keys, one per replica number, because keys take long to make.
    """

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
        listen: Sequence[str] = LOOPBACK,
        held_step: int = -1,
        held_swarm: str = "",
        join_window_s: float = 0.5,
        **rules: Any,
    ) -> Directory:
        """Start a peer that knows ``known``.

        Args:
            at: further addresses that the peer knows.
            hidden: whether no other peer can open a connection to it.
            listen: multiaddresses to listen at.
        """
        status = PeerStatus()
        status.seen["name"] = f"peer {number}"
        place = SwarmPlace(
            identity=self._keys / f"{number}.key",
            admission=Admission(run, secret, allowed),
            node=NodePlace(
                join=(*at, *(address for each in known for address in self.addresses_of(each))),
                listen=() if hidden else tuple(listen),
                map_ports=False,
            ),
            replica=number,
            held_swarm=held_swarm,
            join_window_s=join_window_s,
            status=status,
        )
        connected = connect(place, Rules(**(QUICK | rules)), held_step=held_step)
        self.transports.append(connected.transport)
        return connected

    def key(self, number: int) -> Path:
        return self._keys / f"{number}.key"

    def addresses_of(self, transport: PeerTransport) -> tuple[str, ...]:
        """Return the addresses at which a peer can be reached."""
        return transport.connections.call(streams_of(transport).node.addresses())

    def look(self, number: int, known: Sequence[PeerTransport], run: str = "run") -> list[PeerReport]:
        """Return what an observer sees that does not take part."""
        at = tuple(address for each in known for address in self.addresses_of(each))
        place = NodePlace(join=at, listen=LOOPBACK, map_ports=False)

        async def ask() -> list[PeerReport]:
            async with open_status_client(
                self._keys / f"{number}.key", place, Admission(run, "", frozenset())
            ) as client:
                return await client.ask()

        return asyncio.run(ask())

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


def wait_for_members(transport: PeerTransport, number: int) -> None:
    """Wait until the view has this many members."""
    changed = threading.Condition()

    def note(following: object) -> None:
        with changed:
            changed.notify_all()

    transport.on_change = note
    with changed:
        assert changed.wait_for(lambda: len(transport.view.members) == number, LIMIT_S), transport.view
