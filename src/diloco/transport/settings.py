"""What can be set about the way between replicas. No torch here."""

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
    """in-process: all replicas take turns in this process; torch: each is a process of its own, over
    torch.distributed; hivemind: each finds the others in a DHT, comes and goes, with nobody in charge."""
    replicas: Annotated[int, arg(aliases=["--replicas"])] = 4
    """Number of replicas (M). hivemind: see swarm.start_replicas."""
    mean_codec: Literal["auto", "float32", "bfloat16", "int8", "fp4"] = "auto"
    """What the mean of a part of the values is encoded as, by the replica that sums that part, where this moves fewer
    bytes than sending everything to everybody. auto: int8 among 8 replicas or more whose contributions take less than
    16 bits a value, else float32. Blocks of int8 and fp4 have codec.block_size values, those of auto 256."""
    mean_error_feedback: bool = False
    """Keep what `mean_codec` lost and add it to the next mean; 4 bytes per parameter, shared out over the replicas."""
    min_contributors: int | None = None
    """A round with fewer contributions than this is void. Default: all replicas."""
    round_timeout_s: float = 600.0
    """A round that takes longer from its first contribution to its last commit is void."""
    replica_size: Annotated[int, arg(aliases=["--replica-size"])] = 1
    """torch: processes (ranks) of one replica."""
    on_failure: Annotated[Literal["stop", "continue"], arg(aliases=["--on-failure"])] = "stop"
    """torch: when a replica is lost: stop: all save and stop; continue: the others go on in a smaller view, and the
    lost one comes back by itself, or may be started again."""
    min_replicas: int = 1
    """torch: fewer replicas than this never go on."""
    restarts: int = 0
    """torch: how often a replica that ended is started again by the command that started it."""
    replica: Annotated[int | None, arg(aliases=["--replica"])] = None
    """torch: start only this replica here; the others are started elsewhere with the same --rendezvous."""
    position: int = 0
    """torch: with --replica: which of its processes this is."""
    inner_store: str | None = None
    """torch: HOST:PORT of the store at which the processes of a replica meet; the command that starts them sets it."""
    rendezvous: Annotated[str | None, arg(aliases=["--rendezvous"])] = None
    """torch: HOST:PORT that all replicas meet at: replica 0 listens there; for a replica that joins a run, the address
    of any other."""
    host: str | None = None
    """torch: address of this machine to listen at. Default: the one that the way to the rendezvous begins at."""
    ports: str = "0"
    """torch: port to listen at: 0 for any, or FIRST-LAST."""
    secret_file: Path | None = None
    """torch: a file whose content all replicas share; who does not have it is turned away before it can say anything.
    It does not encrypt, and does not cover the stores of torch: see the page on security."""
    interface: str | None = None
    """torch: network interface of the payload connections. Default: they come in where all others do."""
    streams: int | None = None
    """Payload connections to each other replica; of what two choose, the larger counts. Default: one over short ways;
    else about four in all where TCP keeps its rate (bbr), and at first sixteen where loss and pauses slow it down
    (cubic and others), then as many as the round trips and losses that show make useful, up to 64 in all."""
    pace: bool = True
    """Where TCP keeps its rate (bbr), payloads leave at 97 % of the rate that the way out has shown when it was full,
    instead of filling the queues of routers again and again. More is tried now and then."""
    piece_bytes: int = 524_288
    """torch: payloads travel in pieces of about this size, or smaller, so that there are sixteen."""
    heartbeat_s: float = 2.0
    """torch: replicas tell each other that they are there, this often."""
    silence_s: float = 15.0
    """torch: a replica that was not heard of for so long counts as lost."""
    give_up_after_s: Annotated[float | None, arg(aliases=["--give-up-after"])] = None
    """A replica that has lost the others looks for them for so long, and then saves its state and ends. Default: it
    never gives up. torch: with on_failure "continue"."""
    rendezvous_timeout_s: float = 300.0
    """torch: the longest that replicas wait for each other at the start."""
    bandwidth_bits_per_s: tuple[float, ...] = ()
    """Emulated bandwidth each way, one value for all replicas or one for each. Empty: unlimited. in-process: on a
    virtual clock; torch: sending is held back."""
    latency_s: tuple[float, ...] = ()
    """Emulated one-way latency, one value for all replicas or one for each. Empty: none."""
    step_time_s: tuple[float, ...] = ()
    """in-process: compute time of one inner step on the virtual clock, one value for all replicas or one for each."""
    faults: tuple[str, ...] = ()
    """in-process: faults to inject, each "KIND replica=R fragment=P outer_step=K [seconds=S]"; KIND is one of
    drop, late, truncate, non-finite, miss-commit."""

    @property
    def num_ranks(self) -> int:
        """M x S."""
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
                works = f"at least {low}" if high is None else f"{low} to {high}"
                raise ConfigurationError(f"transport.{name}={value} was given. Use {works}.")
        in_order = 0 < self.heartbeat_s < self.silence_s / 2 and self.silence_s < self.round_timeout_s
        if self.name != "in-process" and not in_order:
            raise ConfigurationError(
                f"transport.heartbeat_s={self.heartbeat_s}, silence_s={self.silence_s} and round_timeout_s="
                f"{self.round_timeout_s} were given. Each must be shorter than the next, and two heartbeats must fit "
                "into a silence."
            )
        if not self.rendezvous_timeout_s > 0:
            raise ConfigurationError(
                f"transport.rendezvous_timeout_s={self.rendezvous_timeout_s} was given. It must be positive."
            )
        for name in ("bandwidth_bits_per_s", "latency_s", "step_time_s"):
            values = getattr(self, name)
            if len(values) not in (0, 1, self.replicas):
                raise ConfigurationError(
                    f"transport.{name} has {len(values)} values for {self.replicas} replicas. Give none, one, or "
                    f"{self.replicas}."
                )
            if any(value < 0 or (value == 0 and name == "bandwidth_bits_per_s") for value in values):
                raise ConfigurationError(f"transport.{name}={values} has an invalid value.")
        if self.name == "in-process" and (self.bandwidth_bits_per_s or self.latency_s) and not self.step_time_s:
            raise ConfigurationError(
                "transport.bandwidth_bits_per_s or latency_s was given without transport.step_time_s. An emulated link "
                "runs on a virtual clock, which needs the compute time of one inner step."
            )
