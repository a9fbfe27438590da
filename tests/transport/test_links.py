"""Emulated links: times that can be checked by hand, on a virtual clock."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.errors import ConfigurationError, RoundVoidError
from diloco.transport import InProcessTransport, Link, VirtualNetwork
from tests.transport.contract import SIZE, contribution

MEGABYTE_PER_S = 8e6


def commit_s(network: VirtualNetwork, size: int, at_s: float = 0.0) -> float:
    """Return when a round is committed in which each replica sends and receives ``size`` bytes."""
    replicas = len(network.links)
    return network.commit_time_s([at_s] * replicas, [size] * replicas, [size] * replicas)


def test_bandwidth_latency_and_vote_add_up() -> None:
    """2 MB at 1 MB/s, then 0.1 s of latency and 0.1 s for the vote."""
    emulated = network(MEGABYTE_PER_S, 0.1)
    assert commit_s(emulated, 2_000_000, at_s=1.0) == pytest.approx(1.0 + 2.0 + 0.1 + 0.1)
    assert emulated.state_dict()["links"][0] == [pytest.approx(3.0), pytest.approx(3.1)]


@given(
    num_replicas=st.integers(1, 5),
    bandwidth=st.floats(1e3, 1e12),
    slower=st.floats(1, 100),
    latency=st.floats(0, 1),
    more=st.floats(0, 1),
    size=st.integers(0, 10**9),
)
def test_a_worse_link_never_helps(
    num_replicas: int, bandwidth: float, slower: float, latency: float, more: float, size: int
) -> None:
    times = [1.0] * num_replicas
    good = commit_s(VirtualNetwork([Link(bandwidth, latency)] * num_replicas, times), size)
    bad = commit_s(VirtualNetwork([Link(bandwidth / slower, latency + more)] * num_replicas, times), size)
    assert bad >= good >= 0


def network(bandwidth: float, latency_s: float = 0.0, step_time_s: float = 1.0) -> VirtualNetwork:
    return VirtualNetwork([Link(bandwidth, latency_s)] * 2, [step_time_s] * 2)


def test_what_is_overlapped_is_not_waited_for() -> None:
    """4 kB at 1 kB/s take 4 s; 3 steps of 1 s pass before the merge, so the replica waits 1 s: CU = 3 / 4."""
    emulated = network(8_000.0)
    hub = InProcessTransport(2, network=emulated)
    endpoints = [hub.endpoint(m) for m in range(2)]
    pending = [endpoint.average(contribution(m)) for m, endpoint in enumerate(endpoints)]
    for _ in range(3):
        for endpoint in endpoints:
            endpoint.tick()
    extra_s = (2 * 4 + 2) / 1000
    assert contribution(0).payload.numel() == 4 * SIZE
    assert [each.wait().wait_s for each in pending] == [pytest.approx(1.0 + extra_s)] * 2
    assert emulated.compute_utilization(0) == pytest.approx(3 / (4 + extra_s))


def test_a_round_slower_than_the_timeout_is_void() -> None:
    hub = InProcessTransport(2, network=network(8_000.0), round_timeout_s=3.9)
    pending = [hub.endpoint(m).average(contribution(m)) for m in range(2)]
    with pytest.raises(RoundVoidError, match=r"it would take 4\.01 s, but the limit is 3\.9 s"):
        pending[0].wait()


def test_clocks_and_rounds_in_flight_survive_a_checkpoint() -> None:
    """The bytes of a round in flight already occupy the link; saving must not send them twice."""

    def through(stop: bool) -> list[float]:
        hub = InProcessTransport(2, network=network(8_000.0))
        pending = [hub.endpoint(m).average(contribution(m)) for m in range(2)]
        if stop:
            state = hub.state_dict()
            hub = InProcessTransport(2, network=network(8_000.0))
            hub.load_state_dict(state)
            pending = [hub.endpoint(m).average(contribution(m)) for m in range(2)]
        for m in range(2):
            hub.endpoint(m).tick()
        later = [hub.endpoint(m).average(contribution(m, fragment=1)) for m in range(2)]
        return [each.wait().wait_s for each in (*pending, *later)]

    assert through(stop=True) == through(stop=False)


@pytest.mark.parametrize(
    ("bandwidth", "latency"), [(0.0, 0.0), (-1.0, 0.0), (1.0, -1.0), (math.nan, 0.0), (1.0, math.inf)]
)
def test_links_that_are_none_are_refused(bandwidth: float, latency: float) -> None:
    with pytest.raises(ConfigurationError, match="must have a positive bandwidth"):
        Link(bandwidth, latency)
