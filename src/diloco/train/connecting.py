"""How the replicas of a run meet: in process groups, over TCP, or in a swarm over Hivemind's DHT and libp2p."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # torch's stubs lack them
from torch.distributed.device_mesh import init_device_mesh

from diloco.devices import choose_device, choose_threads
from diloco.errors import ConfigurationError
from diloco.protocol import MAX_NAME, Rules
from diloco.train.description import compared
from diloco.train.fleet import Fleet, MetFleet, Swarm
from diloco.train.joining import held_checkpoint, held_step
from diloco.train.processes import Role
from diloco.train.settings import RunSettings
from diloco.transport import (
    NOWHERE,
    Address,
    Admission,
    Directory,
    NetworkSettings,
    NodePlace,
    PeerStatus,
    Place,
    ReplicaGroup,
    RollCall,
    SwarmPlace,
    fresh_store,
    load_key,
    multiaddress,
    open_cluster,
    open_replica_group,
    parse_address,
    read_secret,
)
from diloco.units import diff, visible
from diloco.waiting import waiting_for

_NEW_WINDOW_S, _RESUMED_WINDOW_S = 3.0, 15.0
"""The time that a peer waits for others before it founds a swarm. It is longer after a resume, because machines that
restart together need some time, and the one with the newest checkpoint should be among them."""

_FOLDER = "diloco/folder"  # in the store of torchrun


@dataclass(frozen=True)
class Attempt:
    """The ranks that one torchrun has started, for the first time or again."""

    shared: Store  # torchrun's, which keeps its keys over restarts
    store: Store  # without keys of earlier attempts
    folder: Path  # the run folder
    restarted: bool  # whether an earlier attempt has trained in that folder

    def accept_folder(self, fleet: Fleet) -> None:
        """Confirm that this rank can train in its folder."""
        roll = fleet.roll
        assert isinstance(roll, RollCall), "torchrun has started all ranks"
        roll.meet("run folder", "", roll.silence_s)
        if roll.rank == 0:  # later attempts continue in it
            self.shared.set(_FOLDER, str(self.folder))


def _over_tcp(run: RunSettings, role: Role, folder: Path, facts: Mapping[str, str], _: Attempt | None) -> Fleet:
    """Connect to the other ranks of this replica and to the other replicas; ``folder`` holds the private key."""
    settings, group = run.network, ReplicaGroup(replica=role.replica)
    assert role.rendezvous is not None, "replicas over TCP meet somewhere"
    if settings.replica_size > 1:
        group = _open_group(settings, role, choose_device(run.train.device))
    key = folder / "identity.key"
    try:
        _compare(group, facts)
        with group.all_or_none():  # where one rank can't write, the others don't wait for it among the replicas
            load_key(key)
    except BaseException:
        group.close()
        raise
    place = Place(
        replica=role.replica,
        num_replicas=settings.replicas,
        position=role.position,
        ranks_per_replica=settings.replica_size,
        rendezvous=role.rendezvous,
        listen=settings.listen_at,
        secret=read_secret(settings.secret_file, "network.secret_file"),
        identity=key,
    )
    rules = Rules(
        **_time_outs(settings, compared(run, facts)),
        continue_without_lost=settings.on_loss == "continue",
        together=settings.on_loss != "continue" or settings.replica_size > 1,
    )
    fleet = MetFleet(place, rules, held_step=_held_step(run, role), group=group)
    hosts = {rank: parse_address(entry.address).host for rank, entry in fleet.directory.transport.entries().items()}
    choose_threads([*hosts.values()].count(hosts[place.rank]))
    return fleet


def begin_attempt(role: Role, timeout_s: float, claim: Callable[[], Path]) -> Attempt:
    """Meet the other ranks that torchrun has started.

    Args:
        claim: returns the run folder if this is the first attempt.
    """
    torchrun = role.torchrun
    assert torchrun is not None, "torchrun has started this process"
    shared = TCPStore(torchrun.master.host, torchrun.master.port, is_master=False, timeout=timedelta(seconds=timeout_s))
    store = fresh_store(PrefixStore("diloco", shared), torchrun.rank, torchrun.world_size, timeout_s)
    if role.is_first:
        restarted = shared.check([_FOLDER])
        folder = shared.get(_FOLDER).decode() if restarted else str(claim())
        store.set("beginning", json.dumps([folder, restarted]))
    folder, restarted = json.loads(store.get("beginning"))
    return Attempt(shared, store, Path(folder), restarted)


def _in_process_groups(
    run: RunSettings, role: Role, _: Path, facts: Mapping[str, str], attempt: Attempt | None
) -> Fleet:
    """Connect all ranks that torchrun has started: M replicas of S ranks."""
    settings, torchrun, device = run.network, role.torchrun, choose_device(run.train.device)
    assert torchrun is not None, "torchrun has started this process"
    assert attempt is not None, "begin_attempt has been called"
    timeout = timedelta(seconds=settings.round_timeout)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=attempt.store, rank=torchrun.rank, world_size=torchrun.world_size, timeout=timeout
    )
    choose_threads(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    shape = (settings.replicas, settings.replica_size)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replica", "shard"))
    group = ReplicaGroup(mesh.get_group("shard") if settings.replica_size > 1 else None, replica=role.replica)
    transport, roll = open_cluster(
        mesh.get_group("replica"),
        whole=run.train.parallelism != "fsdp",
        silence_s=settings.silence,
        timeout_s=settings.round_timeout,
        group=group,
    )
    try:
        _compare(group, facts)
        transport.agree(compared(run, facts))
        mine = str(_held_step(run, role))
        steps = dict(enumerate(map(int, roll.meet("checkpoints", mine, settings.start_timeout_s))))
    except BaseException as error:
        roll.close(str(error))
        transport.close()
        raise
    return Fleet([transport], group=group, roll=roll, held_steps=steps, restarted=attempt.restarted)


def _in_swarm(run: RunSettings, role: Role, folder: Path, facts: Mapping[str, str], __: Attempt | None) -> Fleet:
    """Join the swarm of the run, or found it; ``folder`` holds the private key."""
    network, (held_step, held_replica, held_swarm) = run.network, held_checkpoint(run.checkpoint.resume)
    secret = read_secret(network.secret_file, "network.secret_file")
    host, ports = network.listen_at
    listen = multiaddress(str(Address(host or "0.0.0.0", ports[0])), "network.listen")
    place = SwarmPlace(
        identity=folder / "identity.key",
        admission=Admission(str(network.run), secret, frozenset(network.allow)),
        node=NodePlace(
            join=network.join,
            listen=() if network.listen == NOWHERE else (listen,),
            announce=tuple(multiaddress(address, "network.announce") for address in network.announce),
            direct_port=ports[-1] if len(ports) > 1 else 0,
        ),
        replica=held_replica if network.replica is None else network.replica,
        held_swarm=held_swarm,
        founds=role.founds,
        name=visible(platform.node() if network.name is None else network.name, MAX_NAME),
        join_window_s=_NEW_WINDOW_S if held_step < 0 else _RESUMED_WINDOW_S,
        status=PeerStatus(run.train.batch_size * run.train.sequence_length),
    )
    rules = Rules(
        **_time_outs(network, compared(run, facts)),
        continue_without_lost=True,
        together=False,
        late_s=network.late_s,
        split="stop" if network.on_loss == "stop" else "go-on",
    )
    fleet = Swarm(
        place,
        rules,
        held_step=held_step,
        replicas=network.replicas,
        margin=2 * run.sync.inner_steps + 1,
        batch_size=run.train.batch_size,
    )
    fleet.notes = _beginning(held_step, fleet.directory, place, network.replicas)
    return fleet


def _beginning(held_step: int, directory: Directory, place: SwarmPlace, replicas: int) -> tuple[str, ...]:
    """Return a sentence on whether this replica has founded the swarm, and on the use of the checkpoint that it has."""
    if held_step < 0 and directory.joining:
        return ()
    if held_step < 0:
        until = "trains alone until others join" if replicas == 1 else f"waits until {replicas} replicas have joined"
        others = (
            "" if place.node.join else " If others train it already, stop this one and give --join an address of them."
        )
        return (f"It has founded run {place.admission.run!r} and {until}.{others}",)
    if not directory.joining:
        alone = "No other peer was found" if place.node.join else "It knows no other peer (no --join)"
        return (f"{alone}, so it founds a new swarm at step {held_step}. Peers that join adopt its state.",)
    lost = "the work that it had not shared by then is lost"
    if directory.swarm != place.held_swarm and directory.founded_step < held_step:
        lost = f"the others continued from step {directory.founded_step} and do not have the later steps either"
    return (
        f"It adopts the state of the others, which are at step {directory.step}. Its own checkpoint of step "
        f"{held_step} is not used: {lost}.",
    )


NETWORKS: Mapping[str, Callable[[RunSettings, Role, Path, Mapping[str, str], Attempt | None], Fleet]] = {
    "torch": _in_process_groups,
    "tcp": _over_tcp,
    "swarm": _in_swarm,
}
"""Functions by ``--transport`` that connect this process to the others: from the settings, its role, the run folder of
its rank, what must be the same on all ranks, and what torchrun has started, if it has started all replicas."""


def _held_step(run: RunSettings, role: Role) -> int:
    resume = run.checkpoint.resume
    # the smallest step of all ranks counts, so that one rank of each replica has to read the files
    return -1 if resume is None else held_step(role.replica, Path(resume), check=role.position == 0)


def _time_outs(network: NetworkSettings, facts: Mapping[str, str]) -> dict[str, Any]:
    """Return the rules that both networks take from the settings alike."""
    return {
        "heartbeat_s": network.heartbeat_s,
        "silence_s": network.silence,
        "round_timeout_s": network.round_timeout,
        "rendezvous_timeout_s": network.start_timeout_s,
        "min_replicas": network.min_replicas,
        "raise_on_loss": False,
        "facts": facts,
    }


def _open_group(settings: NetworkSettings, role: Role, device: torch.device) -> ReplicaGroup:
    assert role.torchrun is not None, "torchrun has started the ranks of a replica"
    store, timeout_s = role.torchrun.master, settings.start_timeout_s
    with waiting_for(lambda: f"the other ranks of replica {role.replica} at {store}", timeout_s):
        shared = TCPStore(store.host, store.port, is_master=False, timeout=timedelta(seconds=timeout_s))
        return open_replica_group(
            PrefixStore(f"diloco/attempt-{role.torchrun.attempt}", shared),
            replica=role.replica,
            position=role.position,
            size=settings.replica_size,
            device=device,
            timeout_s=timeout_s,
        )


def _compare(group: ReplicaGroup, facts: Mapping[str, str]) -> None:
    """Compare the facts of the ranks of a replica; a rank that does not communicate is compared with no other."""
    for position, text in enumerate(group.gather_texts(json.dumps(dict(facts)))):
        sides = (f"position {number} of replica {group.replica}" for number in (group.position, position))
        if difference := diff(facts, json.loads(text), *sides):
            raise ConfigurationError(f"{difference}; all ranks need the same value.")
