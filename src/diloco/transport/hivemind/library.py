"""Entry points to a swarm: for a replica with a training loop of your own, and for a peer that does not train."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diloco.algorithm import check_whole
from diloco.errors import ConfigurationError, RendezvousError
from diloco.membership import MOST_RANK
from diloco.transport.hivemind.connect import connect_swarm
from diloco.transport.hivemind.identity import load_identity
from diloco.transport.hivemind.node import Node
from diloco.transport.hivemind.peer_config import Admission, NodePlace, SwarmPlace
from diloco.transport.peers.connected import Connected, Wire, join
from diloco.transport.peers.transport import PeerTransport
from diloco.waiting import waiting_for

__all__ = ["connect_peer", "run_peer"]

_CHECK_S = 0.1


@contextmanager
def connect_peer(
    *,
    run: str,
    num_replicas: int,
    identity: str | Path,
    join_at: Sequence[str] = (),
    replica: int | None = None,
    secret: str = "",
    allow: Sequence[str] = (),
    on_address: Callable[[str], None] = print,
    node: NodePlace | None = None,
    **wire: Any,
) -> Iterator[PeerTransport]:
    """Find the other replicas of ``run``, connect to them over libp2p, and yield the transport.

    All replicas begin together, as soon as ``num_replicas`` are connected. No replica can join later, because your
    training loop can't be moved to the step of the others (``diloco train --transport hivemind`` can do that). A
    replica that is lost later stays lost, and the others continue without it. At the end of the ``with`` block this
    replica leaves, and the others continue.

    Args:
        run: name of the run, the same for all replicas.
        num_replicas: number of replicas M with which training begins.
        identity: file of this peer's private key, created if it does not exist.
        join_at: addresses of any peers of the run, as passed to ``on_address``; empty for the first peer.
        replica: number m of this replica. None derives a number from the identity, which can't serve as an index into
            shards of the data.
        secret: the text of a file that ``diloco secret`` has written, or ``passphrase:`` and words of your own, the
            same for all peers; peers without it are rejected. "" means no secret.
        allow: identities of the peers that may take part; empty means all.
        on_address: called with each address at which others can join, before waiting for them.
        node: where to listen, if not at every address of this machine.
        wire: any field of `Wire`, such as ``round_timeout_s=60`` or ``facts=...``.

    Raises:
        RendezvousError: if the others do not join in time or are incompatible, or the run has already begun.
        ConfigurationError: if an argument can't work, Hivemind is not installed, or the key or the secret can't be
            used.
    """
    check_whole("num_replicas", num_replicas, 1)
    if replica is not None and check_whole("replica", replica, 0) > MOST_RANK:
        raise ConfigurationError(f"replica must be at most {MOST_RANK}, got {replica}.")
    exchange = Wire.of(wire, continue_without_lost=True)
    place = SwarmPlace(
        identity=Path(identity),
        admission=Admission(run, secret, frozenset(allow)),
        node=dataclasses.replace(node or NodePlace(), join=tuple(join_at)),
        replica=replica,
    )
    connected = connect_swarm(place, exchange)
    transport = connected.transport
    try:
        if connected.joining and connected.table.step > 0:
            raise connected.already_running()
        for address in transport.connections.call(connected.node.addresses()):
            on_address(address)
        with waiting_for(lambda: f"the members of run {run!r} to let this peer in", exchange.rendezvous_timeout_s):
            if connected.joining and join(connected, exchange.rendezvous_timeout_s) > 0:
                raise connected.already_running()
        _wait_for(connected, num_replicas, exchange.rendezvous_timeout_s)
        place.status.seen["state"] = "training"
        transport.on_report = place.status.add
        transport.close_to_joiners("its replicas run a training loop that no other replica can join")
        yield transport
        connected.finish()
        transport.leave()
    finally:
        transport.close()


def _wait_for(connected: Connected, num_replicas: int, timeout_s: float) -> None:
    transport, deadline_s = connected.transport, time.monotonic() + timeout_s
    with waiting_for(
        lambda: f"{num_replicas} replicas, {len(transport.view.members)} of which have joined,", timeout_s
    ):
        while len(transport.view.members) < num_replicas:
            if transport.failure is not None:
                raise transport.failure
            if time.monotonic() > deadline_s:
                raise RendezvousError(
                    f"{len(transport.view.members)} of {num_replicas} replicas joined within {timeout_s:g} s. Start "
                    "the missing ones, or choose a longer rendezvous_timeout_s."
                )
            time.sleep(_CHECK_S)


async def run_peer(identity: Path, place: NodePlace, ready: Callable[[tuple[str, ...]], None]) -> None:
    """Run a peer that does not train, through which others find each other, until cancelled.

    Args:
        identity: file of the peer's private key.
        place: where the peer listens, and the peers that it knows.
        ready: called with the peer's addresses once it can be reached.

    Raises:
        RendezvousError, TransportError: if the peer can't be started.
    """
    node = await Node.start(load_identity(identity), place)
    try:
        ready(await node.addresses())
        await asyncio.Event().wait()
    finally:
        await node.close()
