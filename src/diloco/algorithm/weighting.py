"""Weights of contributions, proportional to the steps that a replica trained since its last contribution in a mean.

The next pseudo-gradient contains all work that no mean contains yet, whether its round was void or excluded it, and so
does the weight. A replica that joined in the middle of a window weighs less than one that trained all of it; a replica
whose last round was void weighs twice as much.
"""

from __future__ import annotations

from collections.abc import Mapping

from diloco.algorithm.numbers import check_number

__all__ = [
    "GREATEST_WEIGHT",
    "LEAST_WEIGHT",
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
