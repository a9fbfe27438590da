"""The settings of the transport between replicas. Importing this module does not load torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from diloco.errors import ConfigurationError

__all__ = ["TransportSettings"]


@dataclass(frozen=True, kw_only=True)
class TransportSettings:
    """How replicas exchange their contributions."""

    name: Annotated[Literal["in-process", "torch", "hivemind"], arg(aliases=["--transport"])] = "in-process"
    """in-process: all replicas take turns in this process. torch: each replica is a process of its own (or several),
    connected over TCP. hivemind: replicas find each other in a DHT and may join and leave at any time, without a
    coordinator."""
    replicas: Annotated[int, arg(aliases=["--replicas"])] = 4
    """Number of replicas (M). For hivemind, see swarm.start_replicas."""
    mean_codec: Literal["auto", "float32", "bfloat16", "int8", "fp4"] = "auto"
    """Codec with which the replica that sums a slice of the values sends its mean, in rounds where summing slices
    moves fewer bytes than sending every contribution to every replica. auto: int8 with 8 or more replicas whose
    contributions take less than 16 bits per value, else float32. A block of int8 and fp4 has codec.block_size values, a
    block of auto has 256."""
    min_contributors: int | None = None
    """A round with fewer contributions than this is void. Default: all replicas."""
    round_timeout_s: float = 600.0
    """A round is void if it takes longer than this from its first contribution to its last commit, in seconds."""
    replica_size: Annotated[int, arg(aliases=["--replica-size"])] = 1
    """torch: number of processes (ranks) of one replica."""
    on_failure: Annotated[Literal["stop", "continue"], arg(aliases=["--on-failure"])] = "stop"
    """torch: what happens when a replica is lost. stop: all replicas save their state and stop. continue: the others
    continue in a smaller view, and the lost replica rejoins by itself or may be started again."""
    min_replicas: int = 1
    """torch, hivemind: after a loss, training continues only if at least this many replicas are left."""
    restarts: int = 0
    """torch: how often the command that started a replica restarts it if it ends early."""
    replica: Annotated[int | None, arg(aliases=["--replica"])] = None
    """torch: start only this replica here; the others are started elsewhere with the same --rendezvous. hivemind: the
    number of this replica; by default it follows from the peer's identity."""
    position: int = 0
    """torch: with --replica, the position of this process within its replica."""
    inner_store: str | None = None
    """torch: HOST:PORT of the store at which the processes of a replica rendezvous. The command that starts them sets
    it."""
    rendezvous: Annotated[str | None, arg(aliases=["--rendezvous"])] = None
    """torch: HOST:PORT at which all replicas rendezvous; replica 0 listens there. To join a running training, give the
    address of any of its replicas."""
    host: str | None = None
    """torch: address of this machine to listen at. Default: the one from which the route to the rendezvous starts."""
    ports: str = "0"
    """torch: port to listen at, or a range FIRST-LAST to choose from. 0: any free port."""
    secret_file: Path | None = None
    """torch: a file with a secret that all replicas share, as `diloco secret FILE` writes it, readable by its owner
    only. A process without it is rejected before it can send any message. The secret does not encrypt traffic and does
    not protect torch's stores; see the page on security."""
    interface: str | None = None
    """torch: network interface on which payload connections are accepted. Default: the address of all other
    connections."""
    streams: int | None = None
    """Payload connections to each other replica; if two replicas choose different numbers, the larger one counts.
    Default: one where the round trip is short. Elsewhere about four to all replicas together if TCP keeps its rate
    (bbr). If loss and pauses slow TCP down (cubic and others), sixteen at first, and then as many as the measured round
    trips and losses justify, up to 64 to all replicas together."""
    pace: bool = True
    """If TCP keeps its rate (bbr), send payloads at 97 % of the rate that the uplink has reached when it was full,
    instead of repeatedly filling the queues of routers. Higher rates are tried from time to time."""
    compress: bool = True
    """torch, hivemind: compress payloads without loss (zstd) where the network limits the transfer. This saves about
    10 to 15 % of fp4 and 5 % of int8."""
    piece_bytes: int = 524_288
    """torch, hivemind: payloads are sent in pieces of about this many bytes. Small payloads are divided into smaller
    pieces, so that there are about sixteen, but none below 256 KiB."""
    heartbeat_s: float = 2.0
    """torch, hivemind: interval between heartbeats, in seconds."""
    silence_s: float = 15.0
    """torch, hivemind: a replica from which nothing is received for this many seconds counts as lost."""
    give_up_after_s: Annotated[float | None, arg(aliases=["--give-up-after"])] = None
    """A replica that has lost the others searches for them for this many seconds, then saves its state and ends.
    Default: it never stops searching. torch: only with on_failure "continue"."""
    rendezvous_timeout_s: float = 300.0
    """torch, hivemind: the longest time that replicas wait for each other at the start, in seconds."""
    bandwidth_bits_per_s: tuple[float, ...] = ()
    """Emulated bandwidth in each direction, one value for all replicas or one per replica. Empty: unlimited.
    in-process: emulated on a virtual clock; torch: sending is delayed."""
    latency_s: tuple[float, ...] = ()
    """Emulated one-way latency in seconds, one value for all replicas or one per replica. Empty: none."""
    step_time_s: tuple[float, ...] = ()
    """in-process: compute time of one inner step on the virtual clock in seconds, one value for all replicas or one per
    replica."""
    faults: tuple[str, ...] = ()
    """in-process: faults to inject, each "KIND replica=R fragment=P outer_step=K [seconds=S]"; KIND is one of
    drop, late, truncate, non-finite, miss-commit."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks of all replicas (M x S)."""
        return self.replicas * self.replica_size

    def __post_init__(self) -> None:
        most = None if self.name == "hivemind" else self.replicas
        for name, low, high in (
            ("replicas", 1, None),
            ("min_contributors", 1, self.replicas),
            ("replica_size", 1, None),
            ("min_replicas", 1, most),
            ("restarts", 0, None),
            ("replica", 0, None if most is None else most - 1),
            ("position", 0, self.replica_size - 1),
            ("streams", 1, 64),
            ("piece_bytes", 4096, None),
            ("give_up_after_s", 0, None),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= (math.inf if high is None else high):
                allowed = f"at least {low}" if high is None else f"between {low} and {high}"
                raise ConfigurationError(f"transport.{name} must be {allowed}, got {value}.")
        in_order = 0 < self.heartbeat_s < self.silence_s / 2 and self.silence_s < self.round_timeout_s
        if self.name != "in-process" and not in_order:
            raise ConfigurationError(
                "transport.heartbeat_s must be positive and less than half of transport.silence_s, and "
                "transport.silence_s must be less than transport.round_timeout_s, got heartbeat_s="
                f"{self.heartbeat_s}, silence_s={self.silence_s} and round_timeout_s={self.round_timeout_s}."
            )
        if not self.rendezvous_timeout_s > 0:
            raise ConfigurationError(
                f"transport.rendezvous_timeout_s must be positive, got {self.rendezvous_timeout_s}."
            )
        for name in ("bandwidth_bits_per_s", "latency_s", "step_time_s"):
            values = getattr(self, name)
            if len(values) not in (0, 1, self.replicas):
                raise ConfigurationError(
                    f"transport.{name} must have no value, one value, or one per replica ({self.replicas}), got "
                    f"{len(values)} values."
                )
            if any(value < 0 or (value == 0 and name == "bandwidth_bits_per_s") for value in values):
                least = "positive" if name == "bandwidth_bits_per_s" else "at least 0"
                raise ConfigurationError(f"The values of transport.{name} must be {least}, got {values}.")
        if self.name == "in-process" and (self.bandwidth_bits_per_s or self.latency_s) and not self.step_time_s:
            raise ConfigurationError(
                "transport.bandwidth_bits_per_s and transport.latency_s need transport.step_time_s, because an "
                "emulated link runs on a virtual clock, which needs the compute time of one inner step."
            )
