"""Table 4 of Streaming DiLoCo (2501.18512): the bandwidth that a compute utilisation needs, published and simulated.

The paper does not state bits per parameter, the grid of bandwidths, or how long a reduction takes. What reproduces it
best is one constant: 16 bits per parameter times 0.835, a quarter of that for FP4, on a grid of 50 bandwidths from 0.1
to 1000 Gbit/s, of which the first that suffices is the cell. The constant is fitted to the table, so that agreement
shows that the schedule and the overlap are understood, and is no independent prediction of the payload.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diloco.simulate.cluster import Cluster
from diloco.simulate.compute_graph import StepGraph
from diloco.simulate.traffic import Parcel, Traffic, data_parallel_traffic, layer_releases
from diloco.simulate.utilization import simulate_cycles
from diloco.simulate.workload import METHODS, Method, Workload

__all__ = ["GRID_GBIT_PER_S", "PAPER", "PUBLISHED", "TARGETS", "Cell", "paper_cells"]

PAPER = "Streaming DiLoCo (arXiv 2501.18512), Table 4: H=100, 3 layers per fragment, tau=1, two replicas"

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
    """One cell, published and simulated.

    Attributes:
        model, method, target: which.
        published_gbit_per_s: as printed, with one decimal.
        simulated_gbit_per_s: the first point of the grid that suffices.
        grid_steps: how far apart the two are on the grid; above 0 where the simulator asks for more.
        compute_utilization: simulated, at the simulated bandwidth.
    """

    model: str
    method: str
    target: float
    published_gbit_per_s: float
    simulated_gbit_per_s: float
    grid_steps: int
    compute_utilization: float


def paper_cells() -> tuple[Cell, ...]:
    """All 50 cells, in the table's order."""
    cells: list[Cell] = []
    grid = np.array(GRID_GBIT_PER_S)
    for model, workload in MODELS.items():
        cluster = Cluster(
            bandwidth_bits_per_s=1e9 * grid[:, None],
            latency_s=np.zeros(2),
            step_time_s=np.full(2, workload.step_time_s),
            half_duplex=np.zeros(2, dtype=bool),
        )
        for method in METHODS:
            reached = simulate_cycles(_traffic(workload, method), cluster).compute_utilization
            for target, published in zip(TARGETS, PUBLISHED[model, method.name], strict=True):
                index = int(np.argmax(reached >= target))
                nearest = int(np.argmin(np.abs(np.log(grid / published))))
                cells.append(
                    Cell(
                        model,
                        method.name,
                        target,
                        published,
                        GRID_GBIT_PER_S[index],
                        index - nearest,
                        float(reached[index]),
                    )
                )
    return tuple(cells)


def _traffic(workload: Workload, method: Method) -> Traffic:
    """The paper's: two replicas, its bits per parameter, each layer from when its gradient is there."""
    graph = StepGraph(num_layers=workload.layers)
    part = FP4_PART if method.codec == "fp4" else 1.0
    model_bytes = part * BITS_PER_PARAMETER * workload.parameters / 8
    if method.data_parallel:
        return data_parallel_traffic(model_bytes, 2, layer_releases(graph, range(workload.layers)))
    schedule = method.schedule(workload, INNER_STEPS)
    each = np.full(2, model_bytes / schedule.num_fragments)
    fragments = workload.fragment_layers(schedule.num_fragments)
    return Traffic(schedule, tuple(Parcel(each, each, layer_releases(graph, layers)) for layers in fragments))
