"""For a training loop of one's own: this process as one replica among others that find each other by a name."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diloco.errors import RendezvousError
from diloco.transport.hivemind.connect import connect_swarm
from diloco.transport.hivemind.peer_streams import PeerStreams
from diloco.transport.hivemind.place import Admission, NodePlace, SwarmPlace
from diloco.transport.peers.connected import Connected, join
from diloco.transport.peers.transport import PeerTransport
from diloco.transport.peers.wire import Wire
from diloco.waiting import waiting_for

__all__ = ["connect_peer"]

_LOOK_AGAIN_S = 0.1


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

    All begin together, once there are ``num_replicas``; nobody can come later, since a loop of one's own can't be moved
    to the step of the others. (``diloco train --transport hivemind`` can.) Whoever is lost later is gone: the others go
    on without it. Leaving the ``with`` parts; the others, if any are left, go on.

    Args:
        run: a name, the same for all.
        num_replicas: M, with which training begins.
        identity: file of this peer's private key, made where there is none.
        join_at: addresses of any peers of the run, as they tell them to ``on_address``; empty for the first one.
        replica: m; None: a number that follows from the identity, and is no index into shares of the data.
        secret: the same words for all peers; who does not have them is turned away. "": nobody is.
        allow: identities of the peers that may take part; empty: all.
        on_address: called with each address that others can join at, before they are waited for.
        node: where to listen, instead of every address of this machine.
        wire: any field of `Wire`, such as ``round_timeout_s=60`` or ``facts=...``.

    Raises:
        RendezvousError: if the others don't come in time or don't fit together, or the run is going on already.
        ConfigurationError: if hivemind is not installed, or the key can't be used.
    """
    place = SwarmPlace(
        identity=Path(identity),
        admission=Admission(run, secret, frozenset(allow)),
        node=dataclasses.replace(node or NodePlace(), join=tuple(join_at)),
        replica=replica,
    )
    exchange = Wire(**({"go_on": True, "streams": 1} | wire))
    connected = connect_swarm(place, exchange)
    transport = connected.transport
    try:
        if connected.joining and connected.table.step > 0:
            raise connected.already_running()
        streams = transport.connections.streams
        assert isinstance(streams, PeerStreams)
        for address in transport.connections.call(streams.node.addresses()):
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
                    f"{len(transport.view.members)} of {num_replicas} replicas had come within {timeout_s:g} s. "
                    "Nothing was started."
                )
            time.sleep(_LOOK_AGAIN_S)
