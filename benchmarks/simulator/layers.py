"""``python -m benchmarks.simulator.layers``: would it help to send each layer while the backward pass runs?

Table 4 of Streaming DiLoCo assumes it. The same schedules and payloads are simulated as this package sends them, after
the inner step.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.markdown import table
from diloco.plan import IDEAL, Deployment, Parcel, simulate
from diloco.transport import Link
from tests.plan.test_paper_table import GRID, MODELS, PUBLISHED, TARGETS, traffic


def needed(name: str, method: str, *, by_layer: bool, more_overlap: int = 0) -> list[float]:
    """Return the bandwidth of the grid, in Gbit/s, from which each target is reached."""
    parameters, layers, step_s = MODELS[name]
    schedule, parcels = traffic(parameters, layers, method)
    schedule = replace(schedule, overlap_steps=schedule.overlap_steps + more_overlap)
    if not by_layer:
        parcels = tuple(Parcel(each.sent_bytes, each.received_bytes) for each in parcels)
    steps: dict[str, Any] = {"steps": 5 * schedule.inner_steps, "measure_from": 3 * schedule.inner_steps}
    place = Deployment(links=(Link(1e9),) * 2, step_time_s=(step_s,) * 2, conditions=IDEAL)
    sites = [replace(place, links=(Link(1e9 * rate),) * 2) for rate in GRID]
    reached = np.array([simulate(schedule, parcels, site, **steps).compute_utilization for site in sites])
    return [float(GRID[np.argmax(reached >= target)]) if (reached >= target).any() else np.inf for target in TARGETS]


def main() -> None:
    rows, alike = [], 0
    for name, method in PUBLISHED:
        by_layer, after = (needed(name, method, by_layer=way) for way in (True, False))
        alike += sum(round(mine, 1) == theirs for mine, theirs in zip(after, PUBLISHED[name, method], strict=True))
        cells = (f"{early:.1f} / {late:.1f}" for early, late in zip(by_layer, after, strict=True))
        rows.append([name, method, *cells])
        if "overlap" in method:
            longer = needed(name, method, by_layer=False, more_overlap=1)
            rows.append([name, f"{method}, one step more", *(f"{rate:.1f}" for rate in longer)])
    print(table(["model", "method", *(f"{target:.0%}" for target in TARGETS)], rows))
    print(f"\nSent after the step, {alike} of {len(PUBLISHED) * len(TARGETS)} cells are those of Table 4.")


if __name__ == "__main__":
    main()
