"""Fixtures that several test files of the simulator use."""

from __future__ import annotations

import pytest

from diloco.algorithm.codec import make_codec
from diloco.algorithm.schedule import SyncSchedule
from diloco.simulate.cluster import Cluster
from diloco.simulate.overheads import Overheads
from diloco.simulate.timeline import Span, timeline
from diloco.simulate.traffic import outer_traffic
from diloco.simulate.utilization import simulate
from diloco.transport.links import Link


@pytest.fixture(scope="session")
def spans() -> tuple[Span, ...]:
    """Return the spans of Streaming DiLoCo with two replicas on a link that is slow enough to make them wait."""
    schedule = SyncSchedule(inner_steps=20, num_fragments=4, overlap_steps=2)
    traffic = outer_traffic(schedule, [10**6] * 4, [make_codec("float32")], 2)
    spending = Overheads(send_s_per_value=1.5e-7, merge_s_per_value=1.5e-7)
    cluster = Cluster.of([Link(1e7, 0.05)] * 2, [1.0, 1.2], overheads=spending)
    return timeline(simulate(traffic, cluster, steps=50, history=True), cluster, 50)
