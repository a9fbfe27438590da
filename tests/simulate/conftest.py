"""Fixtures that several test files of the simulator use."""

from __future__ import annotations

import pytest

from diloco.algorithm import SyncSchedule, make_codec
from diloco.simulate import Cluster, Overheads, Span, outer_traffic, simulate, timeline
from diloco.transport import Link


@pytest.fixture(scope="session")
def spans() -> tuple[Span, ...]:
    """Return the spans of Streaming DiLoCo with two replicas on a link that is slow enough to make them wait."""
    schedule = SyncSchedule(inner_steps=20, num_fragments=4, overlap_steps=2)
    traffic = outer_traffic(schedule, [10**6] * 4, [make_codec("float32")], 2)
    spending = Overheads(send_s_per_value=1.5e-7, merge_s_per_value=1.5e-7)
    cluster = Cluster.of([Link(1e7, 0.05)] * 2, [1.0, 1.2], overheads=spending)
    return timeline(simulate(traffic, cluster, steps=50, history=True), cluster, 50)
