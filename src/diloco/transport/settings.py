"""What can be set about the way between replicas. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from diloco.errors import ConfigurationError

__all__ = ["TransportSettings"]


@dataclass(frozen=True, kw_only=True)
class TransportSettings:
    """How replicas exchange their contributions."""

    name: Annotated[Literal["in-process", "torch", "hivemind"], arg(aliases=["--transport"])] = "in-process"
    """in-process: all replicas take turns in this process; torch: torch.distributed; hivemind: the open internet."""
    replicas: Annotated[int, arg(aliases=["--replicas"])] = 4
    """Number of replicas (M)."""
    min_contributors: int | None = None
    """A round with fewer contributions than this is void. Default: all replicas."""
    round_timeout_s: float = 600.0
    """A round that takes longer from its first contribution to its last commit is void."""
    bandwidth_bits_per_s: tuple[float, ...] = ()
    """in-process: emulated bandwidth each way, one value for all replicas or one for each. Empty: unlimited."""
    latency_s: tuple[float, ...] = ()
    """in-process: emulated one-way latency, one value for all replicas or one for each. Empty: none."""
    step_time_s: tuple[float, ...] = ()
    """in-process: compute time of one inner step on the virtual clock, one value for all replicas or one for each."""
    faults: tuple[str, ...] = ()
    """in-process: faults to inject, each "KIND replica=R fragment=P outer_step=K [seconds=S]"; KIND is one of
    drop, late, truncate, non-finite, miss-commit."""

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigurationError(
                f"transport.replicas={self.replicas} was given; at least 1 is needed. Nothing was started."
            )
        least = self.min_contributors
        if least is not None and not 1 <= least <= self.replicas:
            raise ConfigurationError(
                f"transport.min_contributors={least} was given with {self.replicas} replicas; "
                f"1 to {self.replicas} would work. Nothing was started."
            )
        if not self.round_timeout_s > 0:
            raise ConfigurationError(
                f"transport.round_timeout_s={self.round_timeout_s} was given; it must be positive. Nothing was started."
            )
        for name in ("bandwidth_bits_per_s", "latency_s", "step_time_s"):
            values = getattr(self, name)
            if len(values) not in (0, 1, self.replicas):
                raise ConfigurationError(
                    f"transport.{name} has {len(values)} values for {self.replicas} replicas; "
                    f"none, one, or {self.replicas} would work. Nothing was started."
                )
            if any(value < 0 or (value == 0 and name == "bandwidth_bits_per_s") for value in values):
                raise ConfigurationError(
                    f"transport.{name}={values} holds a value that is no time or rate. Nothing was started."
                )
        if (self.bandwidth_bits_per_s or self.latency_s) and not self.step_time_s:
            raise ConfigurationError(
                "transport.bandwidth_bits_per_s or latency_s was given without transport.step_time_s; an emulated link "
                "runs on a virtual clock, which needs the compute time of one inner step. Nothing was started."
            )
