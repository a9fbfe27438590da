"""The other way round: which bandwidth a compute utilisation needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diloco.simulate.cluster import Cluster
from diloco.simulate.traffic import Traffic
from diloco.simulate.utilization import simulate_cycles

__all__ = ["SEARCHED_BITS_PER_S", "Needed", "bandwidth_needed", "utilization_curve"]

SEARCHED_BITS_PER_S = np.logspace(4, 15, 2201)
"""From 10 kbit/s to 1 Pbit/s, 1.2 % apart."""


@dataclass(frozen=True)
class Needed:
    """What a target asks for.

    Attributes:
        target: a share.
        bandwidth_bits_per_s: the least that reaches it, to 1.2 %; None if none does.
        compute_utilization: at that bandwidth; without one, at the largest.
    """

    target: float
    bandwidth_bits_per_s: float | None
    compute_utilization: float


def utilization_curve(
    traffic: Traffic, cluster: Cluster, bandwidths_bits_per_s: Sequence[float]
) -> NDArray[np.float64]:
    """CU by bandwidth, the same for all replicas.

    Args:
        traffic: without scenarios.
        cluster: its bandwidths do not count.
        bandwidths_bits_per_s: ``(S,)``.
    """
    every = np.asarray(bandwidths_bits_per_s)[:, None]
    cycles = 2 if cluster.jitter == 0 else 8
    return simulate_cycles(
        traffic, dataclasses.replace(cluster, bandwidth_bits_per_s=every), cycles=cycles
    ).compute_utilization


def bandwidth_needed(traffic: Traffic, cluster: Cluster, targets: Sequence[float]) -> tuple[Needed, ...]:
    """The least bandwidth for each target, all else as in ``cluster``."""
    curve = utilization_curve(traffic, cluster, [float(rate) for rate in SEARCHED_BITS_PER_S])
    found = []
    for target in targets:
        reached = np.flatnonzero(curve >= target)
        index = int(reached[0]) if len(reached) else -1
        rate = float(SEARCHED_BITS_PER_S[index]) if len(reached) else None
        found.append(Needed(target, rate, float(curve[index])))
    return tuple(found)
