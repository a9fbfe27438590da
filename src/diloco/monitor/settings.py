"""Settings of watching a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import arg

from diloco.errors import ConfigurationError, nearest

__all__ = ["MonitorSettings", "WandbSettings"]


@dataclass(frozen=True, kw_only=True)
class WandbSettings:
    """Weights & Biases, which is not imported while the mode is off."""

    mode: Annotated[Literal["off", "online", "offline"], arg(aliases=["--wandb"])] = "off"
    """online: send the run to Weights & Biases while it goes on; offline: write it to the run folder, from where
    `wandb sync` sends it."""
    project: str = "diloco"
    """Project that the run belongs to."""
    entity: str | None = None
    """User or team. Default: that of the API key."""
    name: str | None = None
    """Name of the run. Default: that of its folder; replica N of several processes has "-replica-N" behind it."""
    group: str | None = None
    """What the replicas of one run stand together under. Default: swarm.run, or the name."""
    tags: tuple[str, ...] = ()
    """Labels to find the run by."""
    replicas: Literal["all", "first"] = "all"
    """Where replicas are processes: all: each is a run in one group; first: only replica 0 is a run."""
    every_steps: int | None = None
    """Steps between two points. Default: monitor.every_steps."""
    finish_timeout_s: float = 60.0
    """The longest that the end of a run waits for what is not sent yet; that stays in the folder, for `wandb sync`."""

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_steps < 1:
            raise ConfigurationError(f"monitor.wandb.every_steps={self.every_steps} must be at least 1.")
        if not self.finish_timeout_s > 0:
            raise ConfigurationError(f"monitor.wandb.finish_timeout_s={self.finish_timeout_s} must be positive.")


@dataclass(frozen=True, kw_only=True)
class MonitorSettings:
    """What a run shows and writes while it goes on."""

    console: Literal["auto", "live", "plain", "quiet"] = "auto"
    """live: a progress display; plain: a line now and then; auto: live on a terminal, plain elsewhere."""
    every_steps: int = 10
    """Steps between two lines of plain output and between two points in TensorBoard."""
    tensorboard: bool = True
    """Write TensorBoard files beside metrics.jsonl."""
    sinks: tuple[str, ...] = ()
    """Listeners of your own, each MODULE:NAME or FILE.py:NAME; called with the run's folder, it returns a
    diloco.events.Sink."""
    wandb: WandbSettings = field(default_factory=WandbSettings)

    def __post_init__(self) -> None:
        if self.console not in (consoles := ("auto", "live", "plain", "quiet")):
            hint = nearest(str(self.console), consoles)
            raise ConfigurationError(f"monitor.console={self.console!r} is unknown; {hint}")
        if self.every_steps < 1:
            raise ConfigurationError(f"monitor.every_steps={self.every_steps} must be at least 1.")
