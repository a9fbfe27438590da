"""Builds a fleet that is connected to the other ranks, from settings and a role."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch's stubs lack them

from diloco.devices import choose_threads
from diloco.errors import ConfigurationError
from diloco.protocol import MAX_NAME, Rules
from diloco.train.description import diff
from diloco.train.fleet import TorchFleet
from diloco.train.processes import Role
from diloco.train.session_state import held_checkpoint
from diloco.train.settings import RunSettings
from diloco.train.swarm_fleet import SwarmFleet
from diloco.transport import (
    Admission,
    Connected,
    NetworkSettings,
    NodePlace,
    Place,
    ReplicaGroup,
    SwarmPlace,
    connect,
    multiaddress,
    open_replica_group,
    parse_address,
    read_secret,
)
from diloco.units import visible
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
    settings, group = run.network, ReplicaGroup(replica=role.replica)
    if settings.replica_size > 1:
        group = _open_group(settings, role, device)
        _compare(group, facts)
    each_talks = settings.replica_size == 1 or run.train.parallelism == "fsdp"
    place, rules = _place_and_rules(run, role, settings.replica_size if each_talks else 1, facts)
    connected = None
    if each_talks or group.leads:
        connected = connect(place, rules, held_step=held_step)
        choose_threads(_on_this_machine(connected))
    return TorchFleet(connected, place, rules, group)


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
    network, held = run.network, held_checkpoint(run.checkpoint.resume)
    secret = read_secret(network.secret_file, "network.secret_file")
    host, (first, last) = network.listen_host or "0.0.0.0", network.listen_ports
    listen = multiaddress(f"[{host}]:{first}" if ":" in host else f"{host}:{first}", "network.listen")
    place = SwarmPlace(
        identity=folder / "identity.key",
        admission=Admission(str(network.run), secret, frozenset(network.allow)),
        node=NodePlace(
            join=network.join,
            listen=() if network.behind_nat else (listen,),
            announce=tuple(multiaddress(address, "network.announce") for address in network.announce),
            direct_port=last if last > first else 0,
        ),
        replica=network.replica,
        name=visible(platform.node() if network.name is None else network.name, MAX_NAME),
        join_window_s=_NEW_WINDOW_S if held.step < 0 else _RESUMED_WINDOW_S,
    )
    rules = Rules(
        **_time_outs(network, facts),
        continue_without_lost=True,
        together=False,
        late_s=network.late_s,
        split="stop" if network.on_loss == "stop" else "go-on",
    )
    return SwarmFleet(
        place,
        rules,
        held,
        start_replicas=network.replicas,
        margin=2 * run.sync.inner_steps + 1,
        batch_size=run.train.batch_size,
    )


def _time_outs(network: NetworkSettings, facts: Mapping[str, str]) -> dict[str, Any]:
    """Return the rules that both networks take from the settings alike."""
    return {
        "heartbeat_s": network.heartbeat_s,
        "silence_s": network.silence,
        "round_timeout_s": network.round_timeout,
        "rendezvous_timeout_s": network.start_timeout_s,
        "min_replicas": network.min_replicas,
        "compress": network.compress,
        "raise_on_loss": False,
        "facts": facts,
    }


def _open_group(settings: NetworkSettings, role: Role, device: torch.device) -> ReplicaGroup:
    assert role.inner_store is not None, "a rank of a replica with several ranks has an inner store"
    store, timeout_s = role.inner_store, settings.start_timeout_s
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
    for position, text in enumerate(group.gather_texts(json.dumps(dict(facts)))):
        if difference := diff(facts, json.loads(text)):
            raise ConfigurationError(
                f"Position {position} of replica {group.replica} has {difference} at position {group.position}; all "
                "ranks need the same."
            )


def _on_this_machine(connected: Connected) -> int:
    """Return the number of ranks at the address of this rank, including this one."""
    rank, entries = connected.transport.rules.rank, connected.table.entries
    here = parse_address(entries[rank].address).host
    return sum(parse_address(entry.address).host == here for entry in entries.values())


def _place_and_rules(
    run: RunSettings, role: Role, ranks_per_replica: int, facts: Mapping[str, str]
) -> tuple[Place, Rules]:
    network = run.network
    place = Place(
        replica=role.replica,
        num_replicas=network.replicas,
        position=role.position,
        ranks_per_replica=ranks_per_replica,
        rendezvous=role.rendezvous,
        torchrun=role.torchrun.master if role.torchrun and role.rendezvous is None else None,
        attempt=role.torchrun.attempt if role.torchrun else "0",
        host=network.listen_host,
        ports="-".join(dict.fromkeys(map(str, network.listen_ports))),
        secret=read_secret(network.secret_file, "network.secret_file"),
    )
    rules = Rules(
        **_time_outs(network, facts),
        continue_without_lost=network.on_loss == "continue",
        together=network.on_loss != "continue" or network.replica_size > 1,
    )
    return place, rules
