"""Ways into a swarm: as a replica with a training loop of one's own, and as a peer that trains nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diloco.errors import RendezvousError
from diloco.transport.hivemind.connect import connect_swarm
from diloco.transport.hivemind.identity import load_identity
from diloco.transport.hivemind.node import Node
from diloco.transport.hivemind.place import Admission, NodePlace, SwarmPlace
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
    """A transport to the other replicas of ``run``, wherever they are; libp2p finds and connects them.

    All begin together, once there are ``num_replicas``. Nobody can join later, since your training loop can't be moved
    to the step of the others (``diloco train --transport hivemind`` can). A replica that is lost later stays lost, and
    the others go on without it. At the end of the ``with`` this replica leaves, and the others go on.

    Args:
        run: a name, the same for all.
        num_replicas: M, with which training begins.
        identity: file of this peer's private key; made if it does not exist.
        join_at: addresses of any peers of the run, as ``on_address`` got them; empty for the first one.
        replica: m; None: a number that follows from the identity, which is no index into shares of the data.
        secret: the same words for all peers; a peer without them is turned away. "": none is.
        allow: identities of the peers that may take part; empty: all.
        on_address: called with each address at which others can join, before they are waited for.
        node: where to listen, instead of every address of this machine.
        wire: any field of `Wire`, such as ``round_timeout_s=60`` or ``facts=...``.

    Raises:
        RendezvousError: if the others don't come in time or don't fit together, or the run has begun already.
        ConfigurationError: if hivemind is not installed, or the key can't be used.
    """
    place = SwarmPlace(
        identity=Path(identity),
        admission=Admission(run, secret, frozenset(allow)),
        node=dataclasses.replace(node or NodePlace(), join=tuple(join_at)),
        replica=replica,
    )
    exchange = Wire(**({"go_on": True} | wire))
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
        transport.close_to_joiners("its replicas have begun together, in a loop of their own")
        yield transport
        connected.finish()
        transport.leave()
    finally:
        transport.close()


def _wait_for(connected: Connected, num_replicas: int, timeout_s: float) -> None:
    transport, deadline_s = connected.transport, time.monotonic() + timeout_s
    with waiting_for(lambda: f"{num_replicas} replicas, {len(transport.view.members)} of which are there,", timeout_s):
        while len(transport.view.members) < num_replicas:
            if transport.failure is not None:
                raise transport.failure
            if time.monotonic() > deadline_s:
                raise RendezvousError(
                    f"{len(transport.view.members)} of {num_replicas} replicas had come within {timeout_s:g} s."
                )
            time.sleep(_CHECK_S)


async def run_peer(identity: Path, place: NodePlace, ready: Callable[[tuple[str, ...]], None]) -> None:
    """Run a peer that trains nothing and that others find each other through, until cancelled.

    Args:
        identity: file of its private key.
        place: where it is.
        ready: called with its addresses, once it can be reached.

    Raises:
        RendezvousError, TransportError: if it can't be started.
    """
    node = await Node.start(load_identity(identity), place)
    try:
        ready(await node.addresses())
        await asyncio.Event().wait()
    finally:
        await node.close()
