"""Peers of a swarm, each with its own threads, daemon and connections, in one process and on loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from diloco.transport.hivemind.connect import SwarmPlace, connect_swarm
from diloco.transport.hivemind.gate import Gate
from diloco.transport.hivemind.node import NodePlace
from diloco.transport.hivemind.peer_streams import PeerStreams
from diloco.transport.peers.connected import Connected, join
from diloco.transport.peers.transport import PeerTransport
from diloco.transport.peers.wire import Wire
from tests.transport.wires import at_once

__all__ = ["LOOPBACK", "QUICK", "Swarms"]

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
QUICK: dict[str, Any] = {
    "heartbeat_s": 0.2,
    "silence_s": 5.0,
    "round_timeout_s": 20.0,
    "rendezvous_timeout_s": 20.0,
    "go_on": True,
}


class Swarms:
    """Makes peers, and ends them.

    Args:
        keys: a folder of private keys, one for each number; they take long to make.
    """

    def __init__(self, keys: Path) -> None:
        self._keys = keys
        self._open: list[PeerTransport] = []

    def peer(
        self,
        number: int,
        known: Sequence[PeerTransport] = (),
        *,
        run: str = "run",
        secret: str = "",
        allowed: frozenset[str] = frozenset(),
        hidden: bool = False,
        held_step: int = -1,
        swarm: str = "",
        **wire: Any,
    ) -> Connected:
        """Start a peer that knows ``known``.

        Args:
            hidden: whether nobody can open a connection to it.
        """
        place = SwarmPlace(
            identity=self._keys / f"{number}.key",
            gate=Gate(run, secret, allowed),
            node=NodePlace(
                join=tuple(address for each in known for address in addresses(each)),
                listen=() if hidden else LOOPBACK,
                map_ports=False,
            ),
            replica=number,
            swarm=swarm,
            join_window_s=0.5,
        )
        connected = connect_swarm(place, Wire(**(QUICK | wire)), held_step=held_step)
        self._open.append(connected.transport)
        return connected

    def meet(self, num_replicas: int, **options: Any) -> list[PeerTransport]:
        """So many peers in one view."""
        first = self.peer(0, **options)
        assert not first.joining
        later = at_once([lambda m=m: self._joined(m, first.transport, options) for m in range(1, num_replicas)])
        for each in later:
            if isinstance(each, Exception):
                raise each
        transports = [first.transport, *later]
        for transport in transports:
            _Changes(transport).wait_for(lambda members: len(members) == num_replicas)
        for transport in transports:
            transport.tick()  # rounds of the last view begin one step after those who joined have come
        return transports

    def _joined(self, number: int, first: PeerTransport, options: dict[str, Any]) -> PeerTransport:
        connected = self.peer(number, [first], **options)
        assert connected.joining
        join(connected, 20.0)
        return connected.transport

    def close(self) -> None:
        at_once([transport.close for transport in self._open])


class _Changes:
    """Waits for views."""

    def __init__(self, transport: PeerTransport) -> None:
        self._transport = transport
        self._changed = threading.Condition()
        transport.on_change = self._note

    def _note(self, following: object) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, holds: Callable[[tuple[int, ...]], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: holds(self._transport.view.members), 20.0), self._transport.view


def addresses(transport: PeerTransport) -> tuple[str, ...]:
    """Where a peer can be reached."""
    streams = transport.board.streams
    assert isinstance(streams, PeerStreams)
    return transport.board.call(streams.node.addresses())
