"""The ``monitor`` section of the settings: what a run prints and writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import arg

from diloco.errors import ConfigurationError, nearest

__all__ = ["MonitorSettings", "WandbSettings"]


@dataclass(frozen=True, kw_only=True)
class WandbSettings:
    """Settings of Weights & Biases, which is not imported while the mode is off."""

    mode: Annotated[Literal["off", "online", "offline"], arg(aliases=["--wandb"])] = "off"
    """online: send the run to Weights & Biases while it trains; offline: write it to the run folder, to be uploaded
    later with `wandb sync`."""
    project: str = "diloco"
    """Project that the run belongs to."""
    entity: str | None = None
    """User or team. Default: the owner of the API key."""
    name: str | None = None
    """Name of the run. Default: the name of its folder. If replicas are processes, replicas N > 0 append
    "-replica-N"; a peer of a swarm appends the name of its host."""
    group: str | None = None
    """Group that the replicas of one run are shown in. Default: network.run, or the name."""
    tags: tuple[str, ...] = ()
    """Labels to find the run by."""
    replicas: Literal["all", "first"] = "all"
    """Which replicas to send if replicas are processes. all: each replica is a run, in one group; first: only replica
    0."""
    every_steps: int | None = None
    """Steps between two points. Default: monitor.every_steps."""
    finish_timeout_s: float = 60.0
    """Seconds that the end of a run waits at most for unsent data, which then stays in the folder for `wandb sync`."""

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_steps < 1:
            raise ConfigurationError(f"monitor.wandb.every_steps must be at least 1, got {self.every_steps}.")
        if not self.finish_timeout_s > 0:
            raise ConfigurationError(f"monitor.wandb.finish_timeout_s must be positive, got {self.finish_timeout_s}.")


@dataclass(frozen=True, kw_only=True)
class MonitorSettings:
    """Settings of what a run prints and writes while it trains."""

    console: Literal["auto", "live", "plain", "quiet"] = "auto"
    """live: a progress display; plain: a line every monitor.every_steps steps; auto: live on a terminal, else plain;
    quiet: no output."""
    every_steps: int = 10
    """Steps between two lines of plain output and between two points in TensorBoard."""
    tensorboard: bool = True
    """Write TensorBoard files next to metrics.jsonl."""
    sinks: tuple[str, ...] = ()
    """Additional event sinks, each given as MODULE:NAME or FILE.py:NAME of a function or class that takes the run
    folder and returns a diloco.events.Sink."""
    wandb: WandbSettings = field(default_factory=WandbSettings)

    def __post_init__(self) -> None:
        if self.console not in (consoles := ("auto", "live", "plain", "quiet")):
            hint = nearest(str(self.console), consoles)
            raise ConfigurationError(f"monitor.console={self.console!r} is unknown; {hint}")
        if self.every_steps < 1:
            raise ConfigurationError(f"monitor.every_steps must be at least 1, got {self.every_steps}.")
