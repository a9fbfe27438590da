"""The settings of the network between replicas. Importing this module does not load torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta
from tyro.conf import arg

from diloco.algorithm import check_ranges, check_whole
from diloco.errors import ConfigurationError
from diloco.traits import Trait
from diloco.transport.address import parse_address, parse_listen
from diloco.units import Duration, Rate

NOWHERE = "nowhere"  # of a peer behind a router, to which nobody can connect


@dataclass(frozen=True, kw_only=True)
class TransportTraits:
    """What holds for a transport. Settings, commands and checkpoints decide by this, not by its name."""

    starts: Literal["alone", "torchrun", "launched", "peer"]
    """Who starts the processes. alone: one has all replicas; torchrun: one torchrun starts all; launched: one for each
    replica, by this command or with ``--replica`` on its machine; peer: one for each, whenever somebody likes."""
    meets: bool = False  # whether processes meet at addresses, over links between sites (``--join``, ``--listen``)
    elastic: bool = False  # whether replicas come and go while the others train
    replicas_of_ranks: bool = False  # whether a replica may be several processes
    goes_on: bool = True  # whether the others can go on after a loss

    @property
    def alone(self) -> bool:
        """Whether one process has all replicas."""
        return self.starts == "alone"


TRANSPORTS: Mapping[str, TransportTraits] = {
    "in-process": TransportTraits(starts="alone", replicas_of_ranks=True),
    "torch": TransportTraits(starts="torchrun", replicas_of_ranks=True, goes_on=False),
    "tcp": TransportTraits(starts="launched", meets=True, replicas_of_ranks=True),
    "swarm": TransportTraits(starts="peer", meets=True, elastic=True),
}
"""The transports that ``--transport`` may name; `diloco.train.NETWORKS` connects them."""

if TYPE_CHECKING:
    TransportName = str
else:
    TransportName = Literal[tuple(TRANSPORTS)]


def transports(**traits: object) -> tuple[str, ...]:
    """Return the transports that have these traits.

    >>> transports(meets=True)
    ('tcp', 'swarm')
    """
    names = []
    for name, transport in TRANSPORTS.items():
        if all(getattr(transport, trait) == value for trait, value in traits.items()):
            names.append(name)
    return tuple(names)


@dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """How replicas find each other and exchange their contributions."""

    transport: Annotated[TransportName, arg(aliases=["--transport"])] = "in-process"
    """in-process: all replicas here; torch: those of one torchrun (NCCL, gloo); tcp: a process per replica; swarm: they
    join and leave."""
    replicas: Annotated[int, Meta(ge=1), arg(aliases=["--replicas"])] = 4
    """Number of replicas (M). swarm: how many must have joined before training begins, by default 1."""
    replica: Annotated[int | None, Meta(ge=0), arg(aliases=["--replica"]), Trait.OF_PROCESS] = None
    """tcp: start only this replica here, with --join."""
    replica_size: Annotated[int, Meta(ge=1), arg(aliases=["--replica-size"])] = 1
    """torch, tcp: number of processes (ranks) of one replica."""
    on_loss: Annotated[Literal["stop", "continue"], arg(aliases=["--on-loss"])] = "stop"
    """tcp: what the others do when a replica is lost. swarm: what the smaller side of a split network does."""
    min_replicas: Annotated[int, Meta(ge=1)] = 1
    """After a loss, training continues only if at least this many replicas are left."""
    run: Annotated[str | None, arg(aliases=["--run"]), Trait.NO_PLACE] = None
    """swarm: name of the run; peers that give the same name train together."""
    name: Annotated[str | None, arg(aliases=["--name"]), Trait.NO_PLACE, Trait.OF_MACHINE] = None
    """swarm: what the other peers call this replica. Default: the name of this machine."""
    join: Annotated[tuple[str, ...], arg(aliases=["--join"]), Trait.OF_PROCESS] = ()
    """tcp: HOST:PORT at which all replicas meet, where replica 0 listens. swarm: addresses of any peers."""
    listen: Annotated[str | None, Trait.OF_PROCESS] = None
    """HOST:PORT or HOST:FIRST-LAST to listen at, such as 0.0.0.0:31330; port 0 is any free one. swarm uses FIRST for
    libp2p and LAST for direct connections. nowhere (swarm): others are reached over connections that this peer opens,
    and through relays. Default: any free port."""
    announce: Annotated[tuple[str, ...], Trait.OF_PROCESS] = ()
    """swarm: addresses HOST:PORT to announce to other peers instead of those that this peer listens at."""
    secret_file: Annotated[Path | None, arg(aliases=["--secret-file"]), Trait.OF_MACHINE] = None
    """A file with a secret that all replicas share, as `diloco secret FILE` writes it. Others are rejected."""
    allow: Annotated[tuple[str, ...], Trait.NO_PLACE] = ()
    """swarm: identities of the peers that may take part. Empty: all that know the run's name and secret."""
    round_timeout: Annotated[Duration, Meta(gt=0)] = 600.0
    """A round is void if a replica takes longer than this from its contribution to its vote."""
    silence: Annotated[Duration, Meta(gt=0)] = 15.0
    """A replica from which nothing is received for this long counts as lost."""
    straggler: Literal["wait", "skip", "dynamic"] = "wait"
    """swarm: what happens if a contribution is late. wait: the round is void after `round_timeout`; skip: the others
    continue without that replica after twice `silence`, and it rejoins. dynamic: a replica slower than the fastest
    takes only as many inner steps as it can in the time of the fastest, and weighs less (DyLU)."""

    @property
    def traits(self) -> TransportTraits:
        """What holds for the transport."""
        return TRANSPORTS[self.transport]

    @property
    def elastic(self) -> bool:
        return self.traits.elastic

    @property
    def num_ranks(self) -> int:
        """The number of ranks of all replicas (M x S)."""
        return self.replicas * self.replica_size

    @property
    def rendezvous(self) -> str | None:
        """tcp: HOST:PORT at which replicas meet."""
        return self.join[0] if self.join else None

    @property
    def heartbeat_s(self) -> float:
        """The interval between heartbeats: seven of them in `silence`."""
        return self.silence / 7.5

    @property
    def start_timeout_s(self) -> float:
        """How long replicas wait for each other at the start: half of `round_timeout`."""
        return self.round_timeout / 2

    @property
    def join_timeout_s(self) -> float:
        """How long a replica asks to join: longer than members refuse it after a loss by silence, three times that.

        >>> NetworkSettings(round_timeout=30.0, silence=8.0).join_timeout_s
        32.0
        """
        return max(self.start_timeout_s, 4 * self.silence)

    @property
    def late_s(self) -> float:
        return 2 * self.silence if self.straggler == "skip" else max(self.round_timeout, 2 * self.silence)

    @property
    def listen_at(self) -> tuple[str, range]:
        """The host and the ports to listen at, as `parse_listen` returns them."""
        nowhere = self.listen == NOWHERE and self.traits.starts == "peer"
        return parse_listen(":0" if self.listen is None or nowhere else self.listen)

    def __post_init__(self) -> None:
        check_ranges(self, "network.")
        if not self.elastic:
            check_whole("network.min_replicas", self.min_replicas, 1, self.replicas)
            check_whole("network.replica", self.replica or 0, 0, self.replicas - 1)
        if not self.traits.alone and not self.silence < self.round_timeout:
            raise ConfigurationError(
                "network.silence must be less than network.round_timeout, got "
                f"{Duration(self.silence)} and {Duration(self.round_timeout)}."
            )
        _ = self.listen_at  # raises
        if self.traits.starts == "launched" and len(self.join) > 1:
            name = self.transport
            raise ConfigurationError(f"--join must be one address HOST:PORT with --transport {name}, got {self.join}.")
        for address in self.announce:
            multiaddress(address, "network.announce")
        for address in self.join if self.traits.starts == "peer" else ():
            if "/p2p/" not in address:
                raise ConfigurationError(
                    "--join must be an address as a peer prints it, such as "
                    f"/ip4/203.0.113.7/tcp/31330/p2p/QmXoyp..., got {address}."
                )


@dataclass(frozen=True, kw_only=True)
class EmulateSettings:
    """in-process: slow links and slow computers, emulated on a virtual clock."""

    bandwidth: Annotated[tuple[Rate, ...], Meta(gt=0)] = ()
    """Bandwidth in each direction, such as 100Mbit: one value for all replicas or one per replica. Default: unlimited.
    """
    latency: Annotated[tuple[Duration, ...], Meta(ge=0)] = ()
    """One-way latency, such as 20ms: one value for all replicas or one per replica. Default: none."""
    step_time: Annotated[tuple[Duration, ...], Meta(ge=0)] = ()
    """Compute time of one inner step on the virtual clock, one value for all replicas or one per replica."""

    def check(self, network: NetworkSettings) -> None:
        """Check the number of values.

        Raises:
            ConfigurationError: there are too many or too few, or something is emulated without a virtual clock.
        """
        for name in ("bandwidth", "latency", "step_time"):
            values = getattr(self, name)
            if values and not network.traits.alone:
                raise ConfigurationError(
                    f"emulate.{name} can't be used with network.transport={network.transport!r}, because only replicas "
                    "in one process share a virtual clock. Use --transport in-process, or leave it out."
                )
            if len(values) not in (0, 1, network.replicas):
                raise ConfigurationError(
                    f"emulate.{name} must have no value, one value, or one per replica ({network.replicas}), got "
                    f"{len(values)} values."
                )
        if (self.bandwidth or self.latency) and not self.step_time:
            raise ConfigurationError(
                "emulate.bandwidth and emulate.latency need emulate.step_time, such as 250ms, because an emulated link "
                "runs on a virtual clock, which needs the compute time of one inner step."
            )


def multiaddress(text: str, name: str) -> str:
    """Return the address HOST:PORT as libp2p writes it.

    >>> multiaddress("203.0.113.7:31330", "--listen"), multiaddress("[::]:0", "--listen")
    ('/ip4/203.0.113.7/tcp/31330', '/ip6/::/tcp/0')
    >>> multiaddress("example.org:31330", "network.announce")
    '/dns/example.org/tcp/31330'

    Raises:
        ConfigurationError: the text is not an address; ``name`` is the setting.
    """
    if text.startswith("/"):
        return text
    address = parse_address(text, key=name)
    kind = "ip4" if re.fullmatch(r"[0-9.]+", address.host) else "dns"
    if ":" in address.host:
        kind = "ip6"
    return f"/{kind}/{address.host}/tcp/{address.port}"
