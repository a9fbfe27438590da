"""From settings and a role to a fleet whose rank is connected to all others."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch's stubs lack them

from diloco.train.components import make_links
from diloco.train.fleet import TorchFleet
from diloco.train.leader_fleet import LeaderFleet
from diloco.train.roles import Role
from diloco.train.settings import RunSettings
from diloco.transport.peers.connected import Connected
from diloco.transport.replica_group import ReplicaGroup, open_replica_group
from diloco.transport.settings import TransportSettings
from diloco.transport.torch_distributed.connect import Place, TcpWire, connect

__all__ = ["connect_rank"]


def connect_rank(
    run: RunSettings, role: Role, facts: Mapping[str, str], held_step: int, device: torch.device
) -> TorchFleet | LeaderFleet:
    """Meet the other ranks: those of this replica first, then those of the others.

    Args:
        run: resolved.
        role: of this process.
        facts: what all ranks must agree on.
        held_step: the newest step that this rank could resume from; -1 for none.
        device: to train on.

    Raises:
        RendezvousError: if the ranks don't find each other in time or don't fit together.
    """
    settings, group = run.transport, ReplicaGroup(replica=role.replica)
    if settings.replica_size > 1:
        group = _open_group(settings, role, device)
    if settings.replica_size == 1 or run.train.parallelism == "fsdp":
        return TorchFleet(_connect(settings, role, settings.replica_size, facts, held_step), group)
    leader = TorchFleet(_connect(settings, role, 1, facts, held_step)) if group.leads else None
    return LeaderFleet(group, leader)


def _open_group(settings: TransportSettings, role: Role, device: torch.device) -> ReplicaGroup:
    assert role.inner_store is not None, "the role of a rank of several says where they meet"
    store = TCPStore(
        role.inner_store.host,
        role.inner_store.port,
        is_master=False,
        timeout=timedelta(seconds=settings.rendezvous_timeout_s),
    )
    attempt = role.torchrun.attempt if role.torchrun else "0"
    return open_replica_group(
        PrefixStore(f"diloco/attempt-{attempt}", store),
        replica=role.replica,
        position=role.position,
        size=settings.replica_size,
        device=device,
        timeout_s=settings.rendezvous_timeout_s,
    )


def _connect(
    settings: TransportSettings, role: Role, ranks_per_replica: int, facts: Mapping[str, str], held_step: int
) -> Connected:
    place = Place(
        replica=role.replica,
        num_replicas=settings.replicas,
        position=role.position,
        ranks_per_replica=ranks_per_replica,
        rendezvous=role.rendezvous,
        torchrun=role.torchrun.master if role.torchrun else None,
        attempt=role.torchrun.attempt if role.torchrun else "0",
    )
    emulated = bool(settings.bandwidth_bits_per_s or settings.latency_s)
    wire = TcpWire(
        host=settings.host or "",
        ports=settings.ports,
        interface=settings.interface or "",
        streams=settings.streams or 0,
        piece_bytes=settings.piece_bytes,
        heartbeat_s=settings.heartbeat_s,
        silence_s=settings.silence_s,
        round_timeout_s=settings.round_timeout_s,
        rendezvous_timeout_s=settings.rendezvous_timeout_s,
        min_contributors=settings.min_contributors,
        min_replicas=settings.min_replicas,
        go_on=settings.on_failure == "continue",
        raise_on_loss=False,
        link=make_links(settings)[role.replica] if emulated else None,
        facts=facts,
    )
    return connect(place, wire, held_step=held_step)
