"""What real runs were measured to spend, and how far predictions were off."""

from __future__ import annotations

from diloco.simulate.cluster import Overheads

__all__ = ["MEASURED", "accuracy"]

MEASURED = Overheads(goodput=0.92, round_trips=1.0)


def accuracy() -> str:
    """How far predictions were off, in words."""
    return "not compared yet"
