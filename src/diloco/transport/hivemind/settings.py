"""What can be set about a swarm: replicas that find each other, come and go. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from diloco.errors import ConfigurationError

__all__ = ["SwarmSettings"]


@dataclass(frozen=True, kw_only=True)
class SwarmSettings:
    """hivemind: who takes part, and how they find each other."""

    run: Annotated[str | None, arg(aliases=["--run"])] = None
    """Name of the run: peers of the same name train together."""
    join: Annotated[tuple[str, ...], arg(aliases=["--join"])] = ()
    """Addresses of any peers, as they print them (/ip4/.../p2p/...). Empty: this is the first peer."""
    start_replicas: Annotated[int, arg(aliases=["--start-replicas"])] = 1
    """Training begins when so many replicas are there; later it goes on with as few as transport.min_replicas."""
    straggler: Literal["wait", "skip", "grace"] = "wait"
    """A replica whose contribution is late is waited for until transport.round_timeout_s (wait), or until
    swarm.join_window_s (skip, grace); then the others go on without it, and it joins again. With grace, who can't be
    there before the overlap of the first ones ends leaves out the inner steps that don't fit, and contributes what it
    has trained; the same for all peers."""
    join_window_s: float = 30.0
    """How long the others wait for a late contribution where stragglers are skipped or given grace."""
    dynamic_steps: bool = False
    """A replica slower than the fastest takes only as many of the scheduled inner steps as it can in the time that the
    fastest needs for all of them (DyLU), and keeps nobody waiting; its contributions weigh less. The sequences of steps
    that are left out are trained by nobody in this epoch."""
    split: Literal["stop", "go-on"] = "stop"
    """When some replicas can't reach the others: stop: only the larger side goes on; go-on: each side does that has
    transport.min_replicas."""
    secret_file: Path | None = None
    """A file whose content all peers of the run share; who does not have it can neither read nor contribute."""
    allow: tuple[str, ...] = ()
    """Identities of the peers that may take part. Empty: all that know the run's name and secret."""
    identity: Path | None = None
    """File of this peer's private key, made where there is none. Default: identity.key in the run's folder."""
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """Multiaddresses to listen at."""
    announce: tuple[str, ...] = ()
    """Multiaddresses to tell others instead of those listened at."""
    behind_nat: bool = False
    """Listen nowhere: others are reached over connections that this peer opens, and through relays."""
    state_bytes_per_s: float | None = None
    """What all who join or come back get together from this peer of the state that they take over, so that its own
    rounds keep their link. Default: as much as the link carries."""
    relay: bool = True
    """Be reached through other peers where nothing else works, and pass on what others send through this one."""
    direct: Literal["auto", "only", "never"] = "auto"
    """Payloads between peers that can reach each other go over several direct connections (TLS 1.3) instead of libp2p's
    one. only: a peer with which that is impossible counts as lost; never: they all go over libp2p."""
    direct_port: int = 0
    """TCP port at which direct streams are listened for, at the addresses of `listen`; 0 for any."""
    map_ports: bool = True
    """Ask the router to let others in (UPnP)."""

    def __post_init__(self) -> None:
        if self.start_replicas < 1:
            raise ConfigurationError(f"swarm.start_replicas={self.start_replicas} was given; at least 1 is needed.")
        if not 0 <= self.direct_port <= 65535:
            raise ConfigurationError(f"swarm.direct_port={self.direct_port} was given. Use 0 to 65535.")
        if not self.join_window_s > 0:
            raise ConfigurationError(f"swarm.join_window_s={self.join_window_s} was given; it must be positive.")
        if self.state_bytes_per_s is not None and not self.state_bytes_per_s > 0:
            raise ConfigurationError(
                f"swarm.state_bytes_per_s={self.state_bytes_per_s} was given; it must be positive, or left out."
            )
        for address in self.join:
            if "/p2p/" not in address:
                raise ConfigurationError(
                    f"--join {address} was given; use an address as a peer prints it, such as "
                    "/ip4/203.0.113.7/tcp/31330/p2p/QmXoyp..."
                )
