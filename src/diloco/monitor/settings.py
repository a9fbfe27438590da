"""What can be set about watching a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["MonitorSettings"]


@dataclass(frozen=True, kw_only=True)
class MonitorSettings:
    """What a run shows and writes while it goes on."""

    console: Literal["auto", "live", "plain", "quiet"] = "auto"
    """live: a progress display; plain: a line now and then; auto: live on a terminal, plain elsewhere."""
    every_steps: int = 10
    """Steps between two lines of plain output and between two points in TensorBoard."""
    tensorboard: bool = True
    """Write TensorBoard files beside metrics.jsonl."""
