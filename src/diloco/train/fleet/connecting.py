"""Builds a fleet that is connected to the other ranks, from settings and a role."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch's stubs lack them

from diloco.errors import ConfigurationError
from diloco.train.components import make_links
from diloco.train.fleet.swarm_fleet import SwarmFleet
from diloco.train.fleet.torch_fleet import TorchFleet
from diloco.train.resuming import held_checkpoint
from diloco.train.roles import Role
from diloco.train.settings import RunSettings
from diloco.train.torch_threads import PeerThreads, choose_threads
from diloco.transport import (
    Admission,
    Connected,
    NodePlace,
    Place,
    ReplicaGroup,
    SwarmPlace,
    TcpWire,
    TransportSettings,
    Wire,
    connect,
    open_replica_group,
    parse_address,
    read_secret,
)
from diloco.waiting import waiting_for

__all__ = ["connect_peer", "connect_rank"]

_NEW_WINDOW_S, _RESUMED_WINDOW_S = 3.0, 15.0
"""The time that a peer waits for others before it founds a swarm. It is longer after a resume, because machines that
restart together need some time, and the one with the newest checkpoint should be among them."""


def connect_rank(
    run: RunSettings, role: Role, facts: Mapping[str, str], held_step: int, device: torch.device
) -> TorchFleet:
    """Connect to the other ranks of this replica, then to those of the other replicas.

    Args:
        facts: the facts on which all ranks must agree.
        held_step: the newest step from which this rank could resume; -1 for none.

    Raises:
        RendezvousError: if the ranks don't find each other in time or their facts differ.
    """
    settings, group = run.transport, ReplicaGroup(replica=role.replica)
    if settings.replica_size > 1:
        group = _open_group(settings, role, device)
        _compare(group, facts)
    each_talks = settings.replica_size == 1 or run.train.parallelism == "fsdp"
    place, wire = _place_and_wire(settings, role, settings.replica_size if each_talks else 1, facts)
    connected = None
    if each_talks or group.leads:
        connected = connect(place, wire, held_step=held_step)
        choose_threads(run.train.threads, _on_this_machine(connected))
    return TorchFleet(connected, place, wire, group)


def connect_peer(run: RunSettings, folder: Path, facts: Mapping[str, str]) -> SwarmFleet:
    """Join the swarm that ``run.swarm`` names, or found it.

    Args:
        folder: the run folder, which holds the private key unless the settings name another file.
        facts: the facts on which all replicas must agree.

    Raises:
        RendezvousError: if the other replicas can't be found or joined.
        ConfigurationError: if the secret or the key can't be used.
        CheckpointError: if the checkpoint to resume from can't be read.
    """
    settings, swarm, held = run.transport, run.swarm, held_checkpoint(run.checkpoint.resume)
    secret = read_secret(swarm.secret_file, "network.secret_file")
    place = SwarmPlace(
        identity=swarm.identity or folder / "identity.key",
        admission=Admission(str(swarm.run), secret, frozenset(swarm.allow)),
        node=NodePlace(
            join=swarm.join,
            listen=() if swarm.behind_nat else swarm.listen,
            announce=swarm.announce,
            map_ports=swarm.map_ports,
            relay=swarm.relay,
            direct=swarm.direct,
            direct_port=swarm.direct_port,
        ),
        replica=settings.replica,
        join_window_s=_NEW_WINDOW_S if held.step < 0 else _RESUMED_WINDOW_S,
    )
    wire = Wire(
        streams=settings.streams or 0,
        **_exchange(settings, facts),
        continue_without_lost=True,
        comes_back=True,
        late_s=settings.round_timeout_s if swarm.straggler == "wait" else swarm.join_window_s,
        split=swarm.split,
        state_bytes_per_s=swarm.state_bytes_per_s,
    )
    return SwarmFleet(
        place,
        wire,
        held,
        start_replicas=swarm.start_replicas,
        margin=2 * run.sync.inner_steps + 1,
        batch_size=run.train.batch_size,
        threads=PeerThreads(run.train.threads),
    )


def _exchange(settings: TransportSettings, facts: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that every kind of wire takes."""
    names = ("piece_bytes", "heartbeat_s", "silence_s", "round_timeout_s", "rendezvous_timeout_s", "min_contributors")
    chosen = {name: getattr(settings, name) for name in (*names, "min_replicas", "pace", "compress")}
    return {**chosen, "raise_on_loss": False, "facts": facts}


def _open_group(settings: TransportSettings, role: Role, device: torch.device) -> ReplicaGroup:
    assert role.inner_store is not None, "a rank of a replica with several ranks has an inner store"
    store, timeout_s = role.inner_store, settings.rendezvous_timeout_s
    attempt = role.torchrun.attempt if role.torchrun else "0"
    with waiting_for(lambda: f"the other ranks of replica {role.replica} at {store}", timeout_s):
        shared = TCPStore(store.host, store.port, is_master=False, timeout=timedelta(seconds=timeout_s))
        return open_replica_group(
            PrefixStore(f"diloco/attempt-{attempt}", shared),
            replica=role.replica,
            position=role.position,
            size=settings.replica_size,
            device=device,
            timeout_s=timeout_s,
        )


def _compare(group: ReplicaGroup, facts: Mapping[str, str]) -> None:
    """Compare the facts of the ranks of a replica; a rank that does not communicate is compared with no other."""
    first, *others = (json.loads(text) for text in group.gather_texts(json.dumps(dict(facts))))
    for position, each in enumerate(others, 1):
        for name in first:
            if each.get(name) != first[name]:
                raise ConfigurationError(
                    f"Position 0 of replica {group.replica} has {name} = {first[name]} and position {position} has "
                    f"{name} = {each.get(name)}; all ranks need the same."
                )


def _on_this_machine(connected: Connected) -> int:
    """Return the number of ranks at the address of this rank, including this one."""
    rank, entries = connected.transport.rules.rank, connected.table.entries
    here = parse_address(entries[rank].address).host
    return sum(parse_address(entry.address).host == here for entry in entries.values())


def _place_and_wire(
    settings: TransportSettings, role: Role, ranks_per_replica: int, facts: Mapping[str, str]
) -> tuple[Place, TcpWire]:
    place = Place(
        replica=role.replica,
        num_replicas=settings.replicas,
        position=role.position,
        ranks_per_replica=ranks_per_replica,
        rendezvous=role.rendezvous,
        torchrun=role.torchrun.master if role.torchrun and role.rendezvous is None else None,
        attempt=role.torchrun.attempt if role.torchrun else "0",
    )
    emulated = bool(settings.bandwidth_bits_per_s or settings.latency_s)
    wire = TcpWire(
        host=settings.host or "",
        ports=settings.ports,
        interface=settings.interface or "",
        secret=read_secret(settings.secret_file, "network.secret_file"),
        streams=settings.streams or 0,
        **_exchange(settings, facts),
        continue_without_lost=settings.on_failure == "continue",
        comes_back=settings.on_failure == "continue" and settings.replica_size == 1,
        link=make_links(settings)[role.replica] if emulated else None,
    )
    return place, wire
