"""Roles of processes: train all replicas, start the ranks of a run, be one rank, or be a peer of a swarm."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from diloco.errors import ConfigurationError
from diloco.transport import Address, NetworkSettings, parse_address

__all__ = ["INNER_STORE", "POSITION", "Role", "TorchRun", "read_torchrun", "role_of"]

POSITION, INNER_STORE = "DILOCO_POSITION", "DILOCO_INNER_STORE"
"""Variables by which the launcher tells a rank its position within its replica, and where these ranks meet."""


@dataclass(frozen=True)
class TorchRun:
    """The environment that ``torchrun`` sets for the processes it starts."""

    rank: int  # among all processes that it started, on all machines
    world_size: int
    local_rank: int  # among those on this machine
    master: Address  # address of its store
    attempt: str  # the number of times that it has restarted this group of processes


def read_torchrun(environment: Mapping[str, str]) -> TorchRun | None:
    """Return the environment set by ``torchrun``, or None if it did not start this process.

    >>> read_torchrun({}) is None
    True
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    try:
        return TorchRun(
            int(environment["RANK"]),
            int(environment["WORLD_SIZE"]),
            int(environment["LOCAL_RANK"]),
            Address(environment["MASTER_ADDR"], int(environment["MASTER_PORT"])),
            environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
    except (KeyError, ValueError) as error:
        raise ConfigurationError(
            f"The environment set by torchrun is not usable ({error!r}). It must set RANK, WORLD_SIZE, LOCAL_RANK, "
            "MASTER_ADDR and MASTER_PORT."
        ) from error


@dataclass(frozen=True)
class Role:
    """The role of this process."""

    # ``alone``: train all replicas here; ``launcher``: start a process for every rank; ``rank``: be one rank;
    # ``peer``: be a replica of a swarm
    kind: Literal["alone", "launcher", "rank", "peer"]
    replica: int = 0  # for a rank, as is `position`
    position: int = 0
    rendezvous: Address | None = None  # where the ranks meet; None under a ``torchrun`` of all replicas
    torchrun: TorchRun | None = None  # the environment set by ``torchrun``, if it started this process
    inner_store: Address | None = None  # where the ranks of one replica meet, if it has more than one
    local_rank: int = 0  # index of this process on its machine, if known

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0 of the run."""
        return self.replica == 0 and self.position == 0


def role_of(settings: NetworkSettings, torchrun: TorchRun | None) -> Role:
    """Return the role of a process.

    Raises:
        ConfigurationError: if the settings don't match the way in which the process was started.

    >>> role_of(NetworkSettings(transport="torch", replicas=2), None).kind
    'launcher'
    >>> mine = TorchRun(1, 4, 1, Address("127.0.0.1", 29500), "0")
    >>> one = role_of(NetworkSettings(transport="torch", replicas=2, replica_size=4, replica=1, join=("a:1",)), mine)
    >>> one.replica, one.position, str(one.rendezvous)
    (1, 1, 'a:1')
    """
    if settings.transport != "torch":
        if torchrun is not None and torchrun.world_size > 1:
            raise ConfigurationError(
                f"torchrun started {torchrun.world_size} processes, but network.transport={settings.transport!r} uses "
                "a single one. Use --transport torch."
            )
        return Role("alone" if settings.transport == "in-process" else "peer")
    size = settings.replica_size
    of_one_replica = settings.replica is not None and settings.rendezvous is not None
    if torchrun is not None and not (of_one_replica and torchrun.world_size == size > 1):
        if torchrun.world_size != settings.num_ranks:
            raise ConfigurationError(
                f"torchrun started {torchrun.world_size} processes, but {settings.replicas} replicas of {size} ranks "
                f"need {settings.num_ranks}. Leave out --replicas, start that many processes, or start one torchrun "
                "per replica with --replica and --join."
            )
        replica, position = divmod(torchrun.rank, size)
        return Role("rank", replica, position, torchrun=torchrun, inner_store=torchrun.master if size > 1 else None)
    if settings.replica is None and settings.rendezvous is None:
        return Role("launcher")
    if settings.replica is None:
        raise ConfigurationError(
            f"network.join={settings.rendezvous!r} needs --replica. Pass --replica 0, 1, ... on each "
            "machine, or leave out both to start all replicas here."
        )
    if settings.rendezvous is None:
        raise ConfigurationError(
            f"network.replica={settings.replica} needs network.join. Pass --join HOST:PORT, an "
            "address of the machine of replica 0."
        )
    inner_store = torchrun.master if torchrun is not None else None
    position = 0
    if POSITION in os.environ:  # set by the launcher
        position, store = int(os.environ[POSITION]), os.environ.get(INNER_STORE)
        inner_store = None if store is None else parse_address(store, key=INNER_STORE)
    if size > 1 and inner_store is None:
        raise ConfigurationError(
            f"network.replica={settings.replica} can't start the {size} processes of a replica. Start them with "
            "torchrun, or leave out --replica to start all replicas here with one command."
        )
    return Role(
        "rank",
        settings.replica,
        position if torchrun is None else torchrun.rank,
        parse_address(settings.rendezvous, key="network.join"),
        torchrun=torchrun,
        inner_store=inner_store,
        local_rank=settings.replica * size + position,
    )
