"""Connecting a training loop of your own to the other replicas over TCP."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch.distributed as dist

from diloco.algorithm import check_choice, check_replica
from diloco.errors import ConfigurationError
from diloco.transport.address import parse_address
from diloco.transport.base import Transport
from diloco.transport.leader import LeaderTransport
from diloco.transport.peers.transport import PeerTransport
from diloco.transport.replica_group import ReplicaGroup
from diloco.transport.torch_distributed.connect import Place, TcpWire, connect

__all__ = ["connect_replica"]


@contextmanager
def connect_replica(
    *,
    replica: int,
    num_replicas: int,
    rendezvous: str,
    ranks: Literal["alone", "whole", "sharded"] = "alone",
    on_failure: Literal["stop", "continue"] = "stop",
    facts: Mapping[str, str] | None = None,
    **wire: Any,
) -> Iterator[Transport]:
    """Connect to the other replicas, which do the same in processes of their own, and yield the transport.

    The end of the ``with`` block waits until all replicas have reached it. Replicas that take more steps are notified
    that this one left, and treat it as lost. After an error the connections end at once.

    Args:
        replica: number m of this replica, counted from 0.
        num_replicas: number of replicas M.
        rendezvous: ``HOST:PORT`` of a machine that all replicas can reach; replica 0 listens there.
        ranks: ``alone``: this process is a whole replica, and torch.distributed may be used for anything else.
            Otherwise all ranks of torch.distributed form the replica, and all of them must call this function.
            ``whole``: each rank holds the whole model (DistributedDataParallel), and the first rank communicates for
            all. ``sharded``: each rank holds shards of the model (FSDP2) and communicates for its shards.
        on_failure: what happens when a replica is lost. ``stop``: every later round raises `ReplicaLostError` on the
            others. ``continue``: the others continue in a smaller view.
        facts: what must be the same on all replicas, name -> value; a difference raises before training starts.
        wire: any field of `TcpWire`, such as ``streams=2`` or ``round_timeout_s=60``.

    Raises:
        ConfigurationError: if an argument can't work; at the call, before any connection.
        RendezvousError: if the replicas do not find each other in time, are incompatible, or already train.
            (`diloco.transport.torch_distributed.connect.connect` can join a running training.)

    >>> with connect_replica(replica=0, num_replicas=1, rendezvous="127.0.0.1:0") as transport:
    ...     transport.view
    View(id=0, members=(0,))
    """
    check_choice("ranks", ranks, ("alone", "whole", "sharded"))
    check_choice("on_failure", on_failure, ("stop", "continue"))
    check_replica(replica, num_replicas)
    settings = TcpWire.of(wire, continue_without_lost=on_failure == "continue", facts=facts or {})
    group = ReplicaGroup(_process_group(), replica=replica) if ranks != "alone" else ReplicaGroup(replica=replica)
    position, size = (group.position, group.size) if ranks == "sharded" else (0, 1)
    place = Place(
        replica=replica,
        num_replicas=num_replicas,
        position=position,
        ranks_per_replica=size,
        rendezvous=parse_address(rendezvous, key="the rendezvous"),
    )
    opened: list[PeerTransport] = []

    def begin() -> None:
        connected = connect(place, settings)
        opened.append(connected.transport)
        if connected.joining:
            raise connected.already_running()

    def end() -> None:
        opened[0].finish()

    led = ranks == "whole" and group.size > 1
    try:
        if led:
            group.done_by_leader(begin)
            yield LeaderTransport(group, opened[0] if opened else None)
            group.done_by_leader(end)
        else:
            begin()
            yield opened[0]
            end()
    finally:
        for transport in opened:
            transport.close()


def _process_group() -> dist.ProcessGroup | None:
    """Return a group of all ranks of torch.distributed that supports CPU tensors; None for a lone rank."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and not dist.is_initialized():
        raise ConfigurationError(
            f"A launcher has started {launched} processes (WORLD_SIZE), but torch.distributed is not initialised, so "
            "each process would act as a whole replica. Call init_process_group first, or create "
            "TrainingArguments(...) or Accelerator(), which call it."
        )
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    backend = "cpu:gloo,cuda:nccl" if "nccl" in dist.get_backend() else "gloo"
    group = dist.new_group(backend=backend)
    assert isinstance(group, dist.ProcessGroup), "every rank is in it"
    return group
