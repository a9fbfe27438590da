"""From settings and a role to a fleet whose rank is connected to all others."""

from __future__ import annotations

from collections.abc import Mapping

from diloco.train.components import make_links
from diloco.train.fleet import TorchFleet
from diloco.train.roles import Role
from diloco.transport.settings import TransportSettings
from diloco.transport.torch_distributed.connect import Place, Wire, connect

__all__ = ["connect_rank"]


def connect_rank(settings: TransportSettings, role: Role, facts: Mapping[str, str], held_step: int) -> TorchFleet:
    """Meet the other ranks.

    Args:
        settings: resolved.
        role: of this process.
        facts: what all ranks must agree on.
        held_step: the newest step that this rank could resume from; -1 for none.

    Raises:
        RendezvousError: if the ranks don't find each other in time or don't fit together.
    """
    place = Place(
        replica=role.replica,
        num_replicas=settings.replicas,
        position=role.position,
        ranks_per_replica=settings.replica_size,
        rendezvous=role.rendezvous,
        torchrun=role.torchrun.master if role.torchrun else None,
        attempt=role.torchrun.attempt if role.torchrun else "0",
    )
    emulated = bool(settings.bandwidth_bits_per_s or settings.latency_s)
    wire = Wire(
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
    return TorchFleet(connect(place, wire, held_step=held_step))
