"""Weights of contributions, proportional to the steps that a replica trained since its last contribution in a mean.

The next pseudo-gradient contains all work that no mean contains yet, whether its round was void or excluded it, and so
does the weight. A replica that joined in the middle of a window weighs less than one that trained all of it; a replica
whose last round was void weighs twice as much.
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
"""Bounds of weights. Weights multiply float32 values, where far smaller or larger ones would become 0 or infinite."""

MOST_WINDOWS = 8
"""The most full windows that a contribution may weigh: its own and the work of seven void rounds."""


def contribution_weight(base_weight: float, trained: float, scheduled: int) -> float:
    """Return ``w = base_weight * trained / scheduled``, bounded to 1e-18 to 1e18.

    The weight is exactly ``base_weight`` for a replica that trained all scheduled steps. A replica that trained nothing
    has the least weight, 1e-18: its part of the mean vanishes in rounding if others trained, and the mean is over all
    replicas if none did. Withdrawing its contribution instead would make a round void if all replicas are needed.

    >>> contribution_weight(1.0, 100.0, 100), contribution_weight(2.0, 25.0, 100), contribution_weight(1.0, 200.0, 100)
    (1.0, 0.5, 2.0)
    >>> contribution_weight(1.0, 0.0, 100)
    1e-18
    """
    if trained <= 0:
        return LEAST_WEIGHT
    return min(GREATEST_WEIGHT, max(LEAST_WEIGHT, base_weight * (trained / scheduled)))


def bounded_weights(weights: Mapping[int, float], base_weights: Mapping[int, float]) -> dict[int, float]:
    """Return ``min(w, 8 b)`` by replica, where b is its base weight, or the second largest base weight if that is less.

    Replicas report their own weights. The bound limits each to eight full windows, and its window to that of another
    replica. It affects an honest replica only after more than seven lost rounds in a row, or if its base weight is more
    than eight times that of any other.

    >>> bounded_weights({0: 1.0, 1: 1e18, 2: 2.0}, {0: 1.0, 1: 1e18, 2: 1.0})
    {0: 1.0, 1: 8.0, 2: 2.0}
    """
    bases = sorted(base_weights[replica] for replica in weights)
    second = bases[-2] if len(bases) > 1 else GREATEST_WEIGHT
    return {
        replica: min(weight, MOST_WINDOWS * min(base_weights[replica], second)) for replica, weight in weights.items()
    }


def check_base_weight(base_weight: float) -> float:
    """Return ``base_weight``, or raise `ConfigurationError` if it is out of range."""
    check_number("weight", base_weight, LEAST_WEIGHT, GREATEST_WEIGHT)
    return base_weight


class TrainedSteps:
    """The inner steps of each fragment that a replica trained and no mean contains yet.

    Like the residual of error feedback, the count follows the rounds. Submitted steps are removed once a round with
    them is applied (`commit`); until then they are part of the next contribution as well. Sums of whole steps are
    exact.

    >>> steps = TrainedSteps(num_fragments=1)
    >>> for _ in range(3):
    ...     steps.add(1.0)
    >>> steps.submit(0)  # and its round is void
    3.0
    >>> steps.add(1.0)
    >>> steps.submit(0)
    4.0
    >>> steps.add(1.0)  # while the round is in flight
    >>> steps.commit(0)
    >>> steps.submit(0)
    1.0
    """

    def __init__(self, num_fragments: int) -> None:
        self._since = [0.0] * num_fragments
        self._submitted = [0.0] * num_fragments

    def add(self, trained: float) -> None:
        """Count an inner step of which the fraction ``trained``, 0 to 1, was trained.

        Raises:
            ConfigurationError: if ``trained`` is out of range. Nothing was counted.
        """
        if not 0 <= trained <= 1:
            raise ConfigurationError(
                f"trained must be from 0 (none of the inner step was trained) to 1 (all of it), got {trained}. "
                "The step was not counted."
            )
        self._since = [steps + trained for steps in self._since]

    def submit(self, fragment: int) -> float:
        """Return the number of steps that a contribution of the fragment contains if it is made now."""
        self._submitted[fragment] += self._since[fragment]
        self._since[fragment] = 0.0
        return self._submitted[fragment]

    def commit(self, fragment: int) -> None:
        """Remove the submitted steps, which a mean now contains."""
        self._submitted[fragment] = 0.0

    def forget(self, fragment: int) -> None:
        """Remove all steps of a fragment whose local parameters were replaced."""
        self._since[fragment] = self._submitted[fragment] = 0.0

    def state_dict(self) -> dict[str, list[float]]:
        """Return the steps by fragment: those since the last contribution, and those submitted but in no mean yet."""
        return {"since": list(self._since), "handed_in": list(self._submitted)}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Load the state that `state_dict` returned.

        Raises:
            CheckpointError: if it is damaged or belongs to another number of fragments. Nothing was loaded.
        """
        given = state or {}
        lists = [given.get(name) for name in ("since", "handed_in")]
        if not all(isinstance(each, list) and len(each) == len(self._since) and _are_steps(each) for each in lists):
            raise CheckpointError(
                f"The trained steps of the saved state must be two lists, 'since' and 'handed_in', of "
                f"{len(self._since)} numbers of at least 0, got {state!r}. Nothing was loaded."
            )
        self._since, self._submitted = ([float(steps) for steps in given[name]] for name in ("since", "handed_in"))


def _are_steps(values: list[Any]) -> bool:
    return all(isinstance(steps, int | float) and steps >= 0 and math.isfinite(steps) for steps in values)
