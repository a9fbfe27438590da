"""The held-out losses of runs, as numbers and in tables."""

import math
from collections.abc import Mapping
from typing import Any


def heldout_loss(row: Mapping[str, Any]) -> float:
    """Return the loss of a row; infinite if its run diverged, where JSON has "NaN" or "Infinity"."""
    loss = float(row["heldout_loss"])
    return loss if math.isfinite(loss) else math.inf


def in_words(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else "diverged"


def gap(ratio: float) -> str:
    """Return by how much a loss exceeds another one, from their quotient."""
    if ratio == 0:
        return "the other diverged"
    return f"{100 * (ratio - 1):+.2f} %" if math.isfinite(ratio) else "diverged"
