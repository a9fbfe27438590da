"""The bandwidth that a compute utilisation needs, by method: of any model, and of Streaming DiLoCo's Table 4."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diloco.algorithm.schedule import SyncSchedule
from diloco.errors import ConfigurationError
from diloco.simulate.cluster import Cluster
from diloco.simulate.traffic import Parcel, Traffic, Workload, data_parallel_traffic, layer_releases
from diloco.simulate.utilization import simulate_cycles
from diloco.transport.links import Link

__all__ = [
    "GRID_GBIT_PER_S",
    "METHODS",
    "PAPER",
    "PUBLISHED",
    "SEARCHED_BITS_PER_S",
    "TARGETS",
    "Cell",
    "Method",
    "Needed",
    "bandwidth_needed",
    "method_named",
    "paper_cells",
    "utilization_curve",
]

SEARCHED_BITS_PER_S = np.logspace(4, 15, 2201)  # from 10 kbit/s to 1 Pbit/s, 1.2 % apart


@dataclass(frozen=True)
class Needed:
    """What a target asks for."""

    target: float  # a share
    bandwidth_bits_per_s: float | None  # the least that reaches it, to 1.2 %; None if none does
    compute_utilization: float  # at that bandwidth; without one, at the largest


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
    cluster = dataclasses.replace(cluster, bandwidth_bits_per_s=every)
    return simulate_cycles(traffic, cluster, cycles=cycles).compute_utilization


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


@dataclass(frozen=True)
class Method:
    """A row of the paper's Table 4."""

    name: str  # on the command line
    streaming: bool = False  # fragments in turn; else the whole model at once
    overlap_steps: int = 0  # tau
    codec: str = "bfloat16"  # of its payloads, by default
    data_parallel: bool = False  # gradients at every step instead

    def schedule(
        self,
        workload: Workload,
        inner_steps: int,
        *,
        num_fragments: int | None = None,
        overlap_steps: int | None = None,
    ) -> SyncSchedule:
        """The schedule of this method; by default P is `Workload.default_fragments`, at most H, and tau its own.

        P and tau count only where fragments take turns, and tau only where the method overlaps.
        """
        number = num_fragments or min(workload.default_fragments, inner_steps)
        overlap = self.overlap_steps if overlap_steps is None or not self.overlap_steps else overlap_steps
        return SyncSchedule(
            inner_steps=inner_steps,
            num_fragments=number if self.streaming else 1,
            overlap_steps=overlap if overlap_steps is not None else min(overlap, inner_steps - 1),
        )


METHODS = (
    Method("data-parallel", data_parallel=True),
    Method("diloco"),
    Method("streaming", streaming=True),
    Method("streaming-overlap", streaming=True, overlap_steps=1),
    Method("streaming-overlap-fp4", streaming=True, overlap_steps=1, codec="fp4"),
)


def method_named(name: str) -> Method:
    """The method called ``name``.

    Raises:
        ConfigurationError: for another name.
    """
    for method in METHODS:
        if method.name == name:
            return method
    names = ", ".join(method.name for method in METHODS)
    raise ConfigurationError(f"there is no method {name!r}; choose one of {names}.")


PAPER = "Streaming DiLoCo (arXiv 2501.18512), Table 4: H=100, 3 layers per fragment, tau=1, two replicas"
"""Table 4 states the bandwidth that a compute utilisation needs.

The paper does not give the bits per parameter, the grid of bandwidths, or the time of a reduction. One constant
reproduces the table best: 16 bits per parameter times 0.835, a quarter of that for FP4, on a grid of 50 bandwidths from
0.1 to 1000 Gbit/s, the first of which that suffices is the cell. Since the constant is fitted to the table, agreement
shows that the schedule and the overlap are understood. It is no independent prediction of the payload.
"""

TARGETS = (0.50, 0.80, 0.90, 0.95, 0.99)
GRID_GBIT_PER_S = tuple(float(value) for value in np.logspace(-1, 3, 50))
INNER_STEPS = 100
BITS_PER_PARAMETER = 0.835 * 16
FP4_PART = 1 / 4

MODELS = {
    "1B": Workload(parameters=10**9, layers=24, step_time_s=0.1),
    "100B": Workload(parameters=10**11, layers=108, step_time_s=4.9),
}

PUBLISHED: dict[tuple[str, str], tuple[float, ...]] = {
    ("1B", "data-parallel"): (86.8, 152.6, 184.2, 222.3, 569.0),
    ("1B", "diloco"): (1.4, 6.2, 13.3, 23.3, 86.8),
    ("1B", "streaming"): (1.4, 5.2, 9.1, 16.0, 28.1),
    ("1B", "streaming-overlap"): (1.4, 4.3, 6.2, 9.1, 11.0),
    ("1B", "streaming-overlap-fp4"): (0.4, 0.9, 1.7, 2.0, 3.0),
    ("100B", "data-parallel"): (184.2, 323.8, 390.7, 390.7, 471.5),
    ("100B", "diloco"): (3.0, 11.0, 23.3, 49.4, 184.2),
    ("100B", "streaming"): (2.4, 6.2, 9.1, 11.0, 19.3),
    ("100B", "streaming-overlap"): (1.7, 3.6, 4.3, 5.2, 5.2),
    ("100B", "streaming-overlap-fp4"): (0.5, 0.9, 1.1, 1.1, 1.4),
}
"""(model, method) -> Gbit/s by target, as printed."""


@dataclass(frozen=True)
class Cell:
    """One cell of Table 4, published and simulated."""

    model: str
    method: str
    target: float
    published_gbit_per_s: float  # as printed, with one decimal
    simulated_gbit_per_s: float  # the first point of the grid that suffices
    grid_steps: int  # how far apart the two are on the grid; above 0 where the simulator asks for more
    compute_utilization: float  # simulated, at the simulated bandwidth


def paper_cells() -> tuple[Cell, ...]:
    """All 50 cells, in the table's order."""
    cells: list[Cell] = []
    grid = np.array(GRID_GBIT_PER_S)
    for model, workload in MODELS.items():
        cluster = Cluster.of([Link()] * 2, workload.step_time_s)
        for method in METHODS:
            reached = utilization_curve(_paper_traffic(workload, method), cluster, [float(rate) for rate in 1e9 * grid])
            for target, published in zip(TARGETS, PUBLISHED[model, method.name], strict=True):
                index = int(np.argmax(reached >= target))
                steps = index - int(np.argmin(np.abs(np.log(grid / published))))
                simulated = GRID_GBIT_PER_S[index]
                cells.append(Cell(model, method.name, target, published, simulated, steps, float(reached[index])))
    return tuple(cells)


def _paper_traffic(workload: Workload, method: Method) -> Traffic:
    """Two replicas, the paper's bits per parameter, and each layer sent once its gradient is there."""
    part = FP4_PART if method.codec == "fp4" else 1.0
    model_bytes = part * BITS_PER_PARAMETER * workload.parameters / 8
    if method.data_parallel:
        return data_parallel_traffic(model_bytes, 2, layer_releases(workload.layers, range(workload.layers)))
    schedule = method.schedule(workload, INNER_STEPS)
    each = np.full(2, model_bytes / schedule.num_fragments)
    fragments = workload.fragment_layers(schedule.num_fragments)
    return Traffic(schedule, tuple(Parcel(each, each, layer_releases(workload.layers, layers)) for layers in fragments))
