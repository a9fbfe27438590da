"""The settings of a swarm, whose replicas find each other, join and leave. Importing it does not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from diloco.errors import ConfigurationError

__all__ = ["SwarmSettings"]


@dataclass(frozen=True, kw_only=True)
class SwarmSettings:
    """hivemind: which peers take part, and how they find each other."""

    run: Annotated[str | None, arg(aliases=["--run"])] = None
    """Name of the run; peers that give the same name train together."""
    name: Annotated[str | None, arg(aliases=["--name"])] = None
    """What the other peers call this replica, at most 32 characters. Default: the name of this machine."""
    join: Annotated[tuple[str, ...], arg(aliases=["--join"])] = ()
    """Addresses of any peers of the network, as they print them (/ip4/.../p2p/...). Empty: this is the first peer."""
    start_replicas: Annotated[int, arg(aliases=["--start-replicas"])] = 1
    """Training begins when this many replicas have joined. Later it continues with as few as transport.min_replicas."""
    straggler: Literal["wait", "skip"] = "wait"
    """What happens if a replica's contribution is late. The others wait for it for transport.round_timeout_s (wait) or
    swarm.join_window_s (skip). Then they continue without it, and it rejoins."""
    join_window_s: float = 30.0
    """How long the others wait for a late contribution with the straggler rule skip, in seconds."""
    dynamic_steps: bool = False
    """A replica slower than the fastest takes only as many of the scheduled inner steps as it can in the time that the
    fastest replica needs for all of them (DyLU). No replica waits for it, and its contributions weigh less. The
    sequences of the skipped steps are not trained in this epoch."""
    split: Literal["stop", "go-on"] = "stop"
    """What happens when the network splits. stop: only the larger side continues. go-on: each side with at least
    transport.min_replicas replicas continues."""
    secret_file: Path | None = None
    """A file with a secret that all peers of the run share, as `diloco secret FILE` writes it, readable by its owner
    only. A peer without it can neither read nor contribute."""
    allow: tuple[str, ...] = ()
    """Identities of the peers that may take part. Empty: all peers that know the run's name and secret."""
    identity: Path | None = None
    """File of this peer's private key, created if it does not exist. Default: identity.key in the run's folder."""
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """Multiaddresses to listen at."""
    announce: tuple[str, ...] = ()
    """Multiaddresses to announce to other peers instead of those that this peer listens at."""
    behind_nat: bool = False
    """Do not listen. Other peers are reached over connections that this peer opens, and through relays."""
    state_bytes_per_s: float | None = None
    """Limit on the rate at which this peer serves state to all joining and rejoining replicas together, which keeps
    bandwidth free for its own rounds. Default: no limit."""
    relay: bool = True
    """Use other peers as relays if this peer can't be reached otherwise, and relay the traffic of other peers."""
    direct: Literal["auto", "only", "never"] = "auto"
    """auto: payloads between peers that can reach each other use several direct connections (TLS 1.3) instead of the
    single one of libp2p. only: a peer that can't be connected directly counts as lost. never: all payloads use
    libp2p."""
    direct_port: int = 0
    """TCP port for direct streams, at the addresses of `listen`. 0: any free port."""
    map_ports: bool = True
    """Ask the router to forward ports to this peer (UPnP)."""

    def __post_init__(self) -> None:
        if self.start_replicas < 1:
            raise ConfigurationError(f"swarm.start_replicas must be at least 1, got {self.start_replicas}.")
        if not 0 <= self.direct_port <= 65535:
            raise ConfigurationError(f"swarm.direct_port must be between 0 and 65535, got {self.direct_port}.")
        if not self.join_window_s > 0:
            raise ConfigurationError(f"swarm.join_window_s must be positive, got {self.join_window_s}.")
        if self.state_bytes_per_s is not None and not self.state_bytes_per_s > 0:
            raise ConfigurationError(
                f"swarm.state_bytes_per_s must be positive or omitted, got {self.state_bytes_per_s}."
            )
        for address in self.join:
            if "/p2p/" not in address:
                raise ConfigurationError(
                    "--join must be an address as a peer prints it, such as "
                    f"/ip4/203.0.113.7/tcp/31330/p2p/QmXoyp..., got {address}."
                )
