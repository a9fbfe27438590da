"""The weight of a contribution: by what its replica trained since its last contribution that counted.

Work that is in no mean yet is part of the next pseudo-gradient, whether its round was void or went on without it, and
so it is part of the weight: a replica that joined in the middle of a window counts for less than one that trained all
of it, and a replica whose last round was void counts twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from diloco.algorithm.numbers import check_number
from diloco.errors import CheckpointError, ConfigurationError

__all__ = [
    "GREATEST_WEIGHT",
    "LEAST_WEIGHT",
    "TrainedSteps",
    "bounded_weights",
    "check_base_weight",
    "contribution_weight",
]

LEAST_WEIGHT, GREATEST_WEIGHT = 1e-18, 1e18
"""Weights multiply values in float32: far beyond these, they would become 0 or infinite there."""

MOST_WINDOWS = 8
"""A contribution weighs at most as much as so many full windows: the work of seven void rounds and its own."""


def contribution_weight(base_weight: float, trained: float, scheduled: int) -> float:
    """``w = base_weight * trained / scheduled``, within 1e-18 to 1e18.

    Exactly ``base_weight`` for a replica that trained all that was scheduled. One that trained nothing weighs the least
    that a contribution can, 1e-18: among others that trained, its part of the mean is lost in rounding; if none
    did, the mean is over all of them. It is not withdrawn: that would make a round void where all replicas are needed.

    Args:
        base_weight: what a full window of this replica weighs.
        trained: inner steps of full batches since its last contribution of the fragment that counted.
        scheduled: inner steps from one round of the fragment to the next.

    >>> contribution_weight(1.0, 100.0, 100), contribution_weight(2.0, 25.0, 100), contribution_weight(1.0, 200.0, 100)
    (1.0, 0.5, 2.0)
    >>> contribution_weight(1.0, 0.0, 100)
    1e-18
    """
    if trained <= 0:
        return LEAST_WEIGHT
    return min(GREATEST_WEIGHT, max(LEAST_WEIGHT, base_weight * (trained / scheduled)))


def bounded_weights(weights: Mapping[int, float], base_weights: Mapping[int, float]) -> dict[int, float]:
    """``min(w, 8 b)``, where b is the replica's base weight, or the second largest of all base weights if that is less.

    A replica says itself what it weighs. So nobody weighs more than eight full windows, and nobody's window more than
    that of some other replica. An honest replica is not affected, unless more than seven of its rounds in a row came to
    nothing, or its base weight is more than eight times that of any other.

    Args:
        weights: replica -> w, of all contributors.
        base_weights: replica -> what it calls a full window.

    >>> bounded_weights({0: 1.0, 1: 1e18, 2: 2.0}, {0: 1.0, 1: 1e18, 2: 1.0})
    {0: 1.0, 1: 8.0, 2: 2.0}
    """
    bases = sorted(base_weights[replica] for replica in weights)
    second = bases[-2] if len(bases) > 1 else GREATEST_WEIGHT
    return {
        replica: min(weight, MOST_WINDOWS * min(base_weights[replica], second)) for replica, weight in weights.items()
    }


def check_base_weight(base_weight: float) -> float:
    """``base_weight``, if it can be one; `ConfigurationError` if not."""
    check_number("weight", base_weight, LEAST_WEIGHT, GREATEST_WEIGHT)
    return base_weight


class TrainedSteps:
    """Inner steps that one replica trained and no mean has taken yet, for each fragment.

    Like error feedback's residual it follows the rounds: what is handed in counts as taken once its round is applied
    with it (`commit`); until then it is in the next contribution again. Sums of whole steps are exact.

    >>> steps = TrainedSteps(num_fragments=1)
    >>> for _ in range(3):
    ...     steps.add(1.0)
    >>> steps.submit(0)  # and its round is void
    3.0
    >>> steps.add(1.0)
    >>> steps.submit(0)
    4.0
    >>> steps.add(1.0)  # while the round is on its way
    >>> steps.commit(0)
    >>> steps.submit(0)
    1.0
    """

    def __init__(self, num_fragments: int) -> None:
        self._since = [0.0] * num_fragments
        self._submitted = [0.0] * num_fragments

    def add(self, trained: float) -> None:
        """Count an inner step; ``trained`` is the share of it that was trained, 0 to 1.

        Raises:
            ConfigurationError: for anything but 0 to 1. Nothing was counted.
        """
        if not 0 <= trained <= 1:
            raise ConfigurationError(
                f"trained={trained} was given for an inner step; it must be from 0 (nothing of it was trained) to 1 "
                "(all of it). The step was not counted."
            )
        self._since = [steps + trained for steps in self._since]

    def submit(self, fragment: int) -> float:
        """The steps that a contribution of the fragment holds, which is made now."""
        self._submitted[fragment] += self._since[fragment]
        self._since[fragment] = 0.0
        return self._submitted[fragment]

    def commit(self, fragment: int) -> None:
        """The mean took what was handed in."""
        self._submitted[fragment] = 0.0

    def forget(self, fragment: int) -> None:
        """The work of the fragment is gone: its local parameters were replaced."""
        self._since[fragment] = self._submitted[fragment] = 0.0

    def state_dict(self) -> dict[str, list[float]]:
        """Steps by fragment: those since the last contribution, and those handed in that no mean has taken."""
        return {"since": list(self._since), "handed_in": list(self._submitted)}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take over what `state_dict` gave.

        Raises:
            CheckpointError: if it is damaged, or of another number of fragments. Nothing was loaded.
        """
        given = state or {}
        lists = [given.get(name) for name in ("since", "handed_in")]
        if not all(isinstance(each, list) and len(each) == len(self._since) and _are_steps(each) for each in lists):
            raise CheckpointError(
                f"the saved state has {state!r} as the steps trained of each fragment; it must have two lists, 'since' "
                f"and 'handed_in', of {len(self._since)} numbers from 0 on. Nothing was loaded."
            )
        self._since, self._submitted = ([float(steps) for steps in given[name]] for name in ("since", "handed_in"))


def _are_steps(values: list[Any]) -> bool:
    return all(isinstance(steps, int | float) and steps >= 0 and math.isfinite(steps) for steps in values)
