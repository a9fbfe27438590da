"""For a training loop of one's own: this process as one replica among others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from diloco.transport.address import parse_address
from diloco.transport.peers.connected import Connected
from diloco.transport.peers.transport import PeerTransport
from diloco.transport.torch_distributed.connect import Place, TcpWire, connect

__all__ = ["connect_replica", "replica_connection"]


@contextmanager
def connect_replica(
    *,
    replica: int,
    num_replicas: int,
    rendezvous: str,
    on_failure: Literal["stop", "continue"] = "stop",
    facts: Mapping[str, str] | None = None,
    **wire: Any,
) -> Iterator[PeerTransport]:
    """A transport to the other replicas, which run the same in processes of their own, here or elsewhere.

    Leaving the ``with`` waits until all replicas have come as far, and parts. An error on its way out parts at once.

    Args:
        replica: m, counted from 0.
        num_replicas: M.
        rendezvous: ``HOST:PORT`` of a machine that all can reach; replica 0 listens there.
        on_failure: when a replica is lost, ``stop``: every round from then on raises `ReplicaLostError` on the others;
            ``continue``: they go on in a smaller view.
        facts: what must be the same on all replicas, name -> value; a difference is refused before anything starts.
        wire: any field of `TcpWire`, such as ``streams=2`` or ``round_timeout_s=60``.

    Raises:
        RendezvousError: if the replicas don't find each other in time or don't fit together, or a run is going on
            already (`replica_connection` can join it).

    >>> with connect_replica(replica=0, num_replicas=1, rendezvous="127.0.0.1:0") as transport:
    ...     transport.view
    View(id=0, members=(0,))
    """
    connected = replica_connection(
        replica=replica,
        num_replicas=num_replicas,
        rendezvous=rendezvous,
        on_failure=on_failure,
        facts=facts or {},
        **wire,
    )
    transport = connected.transport
    try:
        if connected.joining:
            raise connected.already_running()
        yield transport
        transport.meet("finished", 0)
    finally:
        transport.close()


def replica_connection(
    *,
    replica: int,
    num_replicas: int,
    rendezvous: str,
    on_failure: Literal["stop", "continue"] = "stop",
    facts: Mapping[str, str] | None = None,
    **wire: Any,
) -> Connected:
    """As `connect_replica`, to be closed by the caller, and also for a replica that comes back to a run.

    Where ``joining`` is true, take over the others' state and become one of them::

        diloco = DiLoCo(model, optimizer, transport=connected.transport, ...)
        if connected.joining:
            diloco.take_over(connected.transport.view.members)
            diloco.steps = join(connected, timeout_s=60)
    """
    place = Place(
        replica=replica, num_replicas=num_replicas, rendezvous=parse_address(rendezvous, key="the rendezvous")
    )
    return connect(place, TcpWire(go_on=on_failure == "continue", facts=facts or {}, **wire))
