"""The ``monitor`` section of the settings: what a run prints and writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from diloco.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class MonitorSettings:
    """What a run prints and writes while it trains."""

    console: Literal["auto", "live", "plain", "quiet"] = "auto"
    """live: a progress display; plain: a line every monitor.every_steps steps; auto: live on a terminal, else plain;
    quiet: no output."""
    verbose: Annotated[bool, arg(aliases=["--verbose"])] = False
    """Also print the details: all facts about the run at its start, and reasons in full."""
    every_steps: int = 10
    """Steps between two lines of plain output."""
    sinks: Annotated[tuple[str, ...], arg(aliases=["--sinks"])] = ()
    """Further sinks of the run's events: tensorboard, wandb (both need pip install 'diloco[monitor]'; wandb reads its
    own WANDB_* variables), or your own as MODULE:NAME or FILE.py:NAME of what takes the run folder and returns a
    diloco.events.Sink."""

    def __post_init__(self) -> None:
        if self.every_steps < 1:
            raise ConfigurationError(f"monitor.every_steps must be at least 1, got {self.every_steps}.")
