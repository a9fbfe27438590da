"""How fast the members train, as they tell each other from time to time."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from diloco.protocol.fields import Fields

__all__ = ["Speeds", "speed_message"]


def speed_message(steps_per_s: float) -> dict[str, Any]:
    """What a replica tells the others of itself."""
    return {"kind": "speed", "steps_per_s": repr(steps_per_s)}


class Speeds:
    """What was heard last of each replica. Written in the control thread, read in any.

    >>> speeds = Speeds()
    >>> speeds.hear(1, speed_message(2.5))
    >>> speeds.known
    {1: 2.5}
    """

    def __init__(self) -> None:
        self.known: Mapping[int, float] = {}

    def hear(self, replica: int, message: Mapping[str, Any]) -> None:
        """``replica`` says so of itself.

        Raises:
            ValueError: it is no finite, positive number; what was known before stays.
        """
        steps_per_s = Fields(message).number_in_text("steps_per_s")
        if not (steps_per_s > 0 and math.isfinite(steps_per_s)):
            raise ValueError(f"its 'steps_per_s' is {steps_per_s}, and should be a finite number above 0")
        self.known = {**self.known, replica: steps_per_s}

    def keep(self, members: Collection[int]) -> None:
        """Forget who is no member."""
        self.known = {replica: speed for replica, speed in self.known.items() if replica in members}
