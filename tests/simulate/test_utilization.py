"""The simulator compared with the in-process transport on its virtual clock, and properties of all simulations."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.algorithm import Contribution, RoundId, Send, SyncSchedule, make_codec
from diloco.errors import ConfigurationError
from diloco.simulate import (
    Cluster,
    Overheads,
    Simulated,
    Traffic,
    data_parallel_traffic,
    outer_traffic,
    simulate,
    simulate_cycles,
)
from diloco.transport import InProcessTransport, Link, Pending, VirtualNetwork

FP4, FLOAT32 = make_codec("fp4"), make_codec("float32")


@st.composite
def schedules(draw: st.DrawFn) -> SyncSchedule:
    inner_steps = draw(st.integers(1, 12))
    return SyncSchedule(
        inner_steps=inner_steps,
        num_fragments=draw(st.integers(1, min(4, inner_steps))),
        overlap_steps=draw(st.integers(0, inner_steps)),
    )


links = st.builds(
    Link,
    bandwidth_bits_per_s=st.floats(1e3, 1e7),
    latency_s=st.sampled_from([0.0, 0.03, 0.5]),
    half_duplex=st.booleans(),
)
sizes = st.lists(st.integers(1, 3000), min_size=4, max_size=4)
one_link = st.tuples(st.floats(1e3, 1e7), st.floats(0, 1))


def run_in_process(
    schedule: SyncSchedule, fragment_sizes: list[int], network: VirtualNetwork, steps: int, codec: str
) -> None:
    """Drive a transport as `DiLoCo` does, without a model."""
    num_replicas, encoder = len(network.links), make_codec(codec)
    hub = InProcessTransport(num_replicas, network=network, round_timeout_s=math.inf)
    pending: list[dict[int, Pending]] = [{} for _ in range(num_replicas)]

    def send(replica: int, action: Send) -> None:
        numel = fragment_sizes[action.fragment]
        given = Contribution(
            round=RoundId(action.fragment, action.outer_step),
            replica=replica,
            codec=encoder,
            numel=numel,
            payload=encoder.encode(torch.zeros(numel)),
        )
        pending[replica][action.fragment] = hub.endpoint(replica).average(given)

    for step in range(1, steps + 1):
        actions = schedule.actions(step)
        first = list(itertools.takewhile(lambda action: isinstance(action, Send), actions))
        for replica in range(num_replicas):
            hub.endpoint(replica).tick()
            for action in first:
                send(replica, action)
        for replica in range(num_replicas):
            for action in actions[len(first) :]:
                if isinstance(action, Send):
                    send(replica, action)
                else:
                    pending[replica].pop(action.fragment).wait()
    for replica in range(num_replicas):
        for left in pending[replica].values():
            left.wait()


@settings(max_examples=60, deadline=None)
@given(
    schedules(),
    sizes,
    st.lists(links, min_size=1, max_size=4),
    st.lists(st.floats(0.01, 2), min_size=4, max_size=4),
    st.sampled_from(["float32", "fp4"]),
    st.integers(1, 40),
)
def test_it_is_the_virtual_clock(
    schedule: SyncSchedule, fragment_sizes: list[int], ways: list[Link], times: list[float], codec: str, steps: int
) -> None:
    """For any schedule and unequal links and speeds, with a wait at the end for the rounds in flight."""
    network = VirtualNetwork(ways, times[: len(ways)])
    fragment_sizes = fragment_sizes[: schedule.num_fragments]
    run_in_process(schedule, fragment_sizes, network, steps, codec)
    uplinks = [way.uplink for way in ways]
    traffic = outer_traffic(schedule, fragment_sizes, [make_codec(codec)], len(ways), uplinks=uplinks)
    result = simulate(traffic, Cluster.of(ways, times[: len(ways)]), steps=steps, drain=True)
    assert result.waited_s == pytest.approx(np.array(network.wait_s), rel=1e-9, abs=1e-9)
    assert result.compute_s + result.waited_s == pytest.approx(np.array(network.now_s), rel=1e-9)
    mean = sum(map(network.compute_utilization, range(len(ways)))) / len(ways)
    assert result.compute_utilization == pytest.approx(mean)


def test_all_wait_less_for_a_slow_uplink_that_is_known() -> None:
    """Among 20, 100 and 100 Mbit/s: (M - 1) / M * (n + m) bytes at 20 Mbit/s, or n bytes with nothing to sum."""
    ways = [Link(20e6), Link(100e6), Link(100e6)]
    waited_s = []
    for known in ([], [way.uplink for way in ways]):
        traffic = outer_traffic(SyncSchedule(inner_steps=10), [768_000], [FLOAT32], 3, uplinks=known)
        result = simulate(traffic, Cluster.of(ways, 0.1), steps=10)
        waited_s.append(result.waited_s.tolist())
    assert waited_s == [pytest.approx([2 / 3 * 2 * 8 * 3.072e6 / 20e6] * 3), pytest.approx([8 * 3.072e6 / 20e6] * 3)]


def over(schedule: SyncSchedule, fragment_sizes: list[int], bandwidth: float, latency: float, **more: Any) -> Simulated:
    """Simulate three identical replicas, with 50 steps of 0.1 s."""
    traffic = outer_traffic(schedule, fragment_sizes[: schedule.num_fragments], [more.pop("codec", FP4)], 3)
    return simulate(traffic, Cluster.of([Link(bandwidth, latency)] * 3, 0.1, **more), steps=50)


@settings(max_examples=50, deadline=None)
@given(schedules(), sizes, one_link, st.floats(1, 100), st.floats(0, 1), st.floats(0, 0.4))
def test_a_worse_link_or_a_larger_payload_never_helps(
    schedule: SyncSchedule, fragments: list[int], way: tuple[float, float], slower: float, more_s: float, jitter: float
) -> None:
    bandwidth, latency = way
    good = over(schedule, fragments, bandwidth, latency, jitter=jitter).compute_utilization
    for worse in (
        over(schedule, fragments, bandwidth / slower, latency, jitter=jitter),
        over(schedule, fragments, bandwidth, latency + more_s, jitter=jitter),
        over(schedule, fragments, bandwidth, latency, jitter=jitter, codec=FLOAT32),
        over(schedule, fragments, bandwidth, latency, jitter=jitter, overheads=Overheads(goodput=1 / slower)),
        over(schedule, fragments, bandwidth, latency, jitter=jitter, overheads=Overheads(round_trips=more_s)),
    ):
        assert worse.compute_utilization <= good + 1e-9


@settings(max_examples=30, deadline=None)
@given(schedules(), sizes, one_link, st.floats(0, 0.4))
def test_more_overlap_never_lowers_the_utilisation(
    schedule: SyncSchedule, fragments: list[int], way: tuple[float, float], jitter: float
) -> None:
    reached = [
        over(dataclasses.replace(schedule, overlap_steps=tau), fragments, *way, jitter=jitter).compute_utilization
        for tau in range(schedule.inner_steps)
    ]
    assert reached == pytest.approx(sorted(reached), abs=1e-9)


@settings(deadline=None)
@given(schedules(), sizes)
def test_an_infinite_link_costs_nothing(schedule: SyncSchedule, fragments: list[int]) -> None:
    assert over(schedule, fragments, math.inf, 0.0).compute_utilization == 1


@settings(deadline=None)
@given(schedules(), sizes, one_link, st.integers(1, 6))
def test_what_is_sent_is_received_and_is_what_the_schedule_says(
    schedule: SyncSchedule, fragments: list[int], way: tuple[float, float], num_replicas: int
) -> None:
    traffic = outer_traffic(schedule, fragments[: schedule.num_fragments], [FP4], num_replicas)
    result = simulate(traffic, Cluster.of([Link(*way)] * num_replicas, 0.1), steps=50)
    assert result.sent_bytes.sum() == result.received_bytes.sum()
    rounds = [schedule.rounds_of(fragment, 50) for fragment in range(schedule.num_fragments)]
    expected = sum(count * parcel.sent_bytes for count, parcel in zip(rounds, traffic.parcels, strict=True))
    assert (result.sent_bytes == expected).all()


def test_one_fragment_without_overlap_is_diloco_by_hand() -> None:
    """A round of 4 MB at 8 Mbit/s takes 4 s, and 2 x 0.25 s of latency for payload and vote, after every 10 steps."""
    traffic = outer_traffic(SyncSchedule(inner_steps=10), [1_000_000], [FLOAT32], 2)
    result = simulate_cycles(traffic, Cluster.of([Link(8e6, 0.25)] * 2, 1.0))
    assert result.compute_utilization == pytest.approx(10 / 14.5)
    assert (result.stall_per_round_s, result.wall_s) == (pytest.approx(4.5), pytest.approx(29.0))
    assert result.sent_bytes_per_s == pytest.approx(4e6 / 14.5)


def test_payload_leaves_while_the_step_goes_on_where_it_is_ready() -> None:
    """Half of the payload is ready after half of a step of 1 s, so a transfer of 4 s ends 3.5 s after the step."""
    link, half = [Link(8e6)] * 2, ((0.5, 0.5), (1.0, 0.5))
    early = simulate_cycles(data_parallel_traffic(4e6, 2, half), Cluster.of(link, 1.0))
    late = simulate_cycles(data_parallel_traffic(4e6, 2), Cluster.of(link, 1.0))
    assert (early.stall_per_round_s, late.stall_per_round_s) == (pytest.approx(3.5), pytest.approx(4.0))


def test_overheads_are_no_compute() -> None:
    traffic = outer_traffic(SyncSchedule(inner_steps=10), [1000], [FLOAT32], 2)
    spending = Overheads(send_s_per_value=1e-4, merge_s_per_value=2e-4)
    result = simulate_cycles(traffic, Cluster.of([Link()] * 2, 1.0, overheads=spending))
    assert result.spent_s / result.rounds == pytest.approx(np.full(2, 0.1 + 0.2))
    assert result.compute_utilization == pytest.approx(10 / 10.3)


def test_scenarios_do_not_touch_each_other() -> None:
    schedule = SyncSchedule(inner_steps=8, num_fragments=2, overlap_steps=2)
    codecs, rates = [FP4, FLOAT32], np.array([1e4, 1e5])
    together = simulate(
        outer_traffic(schedule, [900, 1200], codecs, 3),
        dataclasses.replace(Cluster.of([Link()] * 3, 0.1), bandwidth_bits_per_s=rates[:, None]),
        steps=40,
    )
    for index, codec in enumerate(codecs):
        alone = outer_traffic(schedule, [900, 1200], [codec], 3)
        one = simulate(alone, Cluster.of([Link(rates[index])] * 3, 0.1), steps=40)
        assert one.compute_utilization == together.compute_utilization[index]
        assert (one.waited_s == together.waited_s[index]).all()


def test_jitter_is_drawn_by_seed_and_makes_the_fast_wait_for_the_slow() -> None:
    traffic = outer_traffic(SyncSchedule(inner_steps=5), [1], [FLOAT32], 8)
    steady, one, again, other = (
        simulate(traffic, Cluster.of([Link()] * 8, 1.0, jitter=jitter, seed=seed), steps=500).compute_utilization
        for jitter, seed in ((0.0, 0), (0.3, 1), (0.3, 1), (0.3, 2))
    )
    assert one == again != other
    assert 0.7 < one < steady == 1


def test_nothing_to_measure_is_refused() -> None:
    traffic: Traffic = data_parallel_traffic(1.0, 2)
    with pytest.raises(ConfigurationError, match="measure_from must be at least 0 and less than steps"):
        simulate(traffic, Cluster.of([Link()] * 2, 1.0), steps=5, measure_from=5)


@pytest.mark.parametrize("times", [[1.0], [1.0, 0.0], [1.0, math.nan]])
def test_clusters_that_are_none_are_refused(times: list[float]) -> None:
    with pytest.raises(ConfigurationError, match="one link and one step time above 0 s per replica"):
        Cluster.of([Link()] * 2, times)
