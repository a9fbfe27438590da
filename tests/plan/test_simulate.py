"""The simulator compared with the in-process transport on its virtual clock, and properties of all simulations."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.algorithm import Codec, Contribution, RoundId, Send, SyncSchedule, Uplink, make_codec
from diloco.errors import ConfigurationError
from diloco.plan import IDEAL, Deployment, Parcel, Simulated, Traffic, fragment_sizes, simulate
from diloco.transport import InProcessTransport, Link, Pending, VirtualNetwork

FP4, FLOAT32 = make_codec("fp4"), make_codec("float32")
TWO_CYCLES: Any = {"steps": 50, "measure_from": 30}  # of 10 steps, in the steady state


def parcels_of(
    schedule: SyncSchedule, sizes: Sequence[int], codec: Codec, replicas: int, uplinks: Sequence[Uplink] = ()
) -> tuple[Parcel, ...]:
    return Traffic(schedule=schedule, fragment_sizes=tuple(sizes), codec=codec).parcels(replicas, uplinks)


def site(links: Sequence[Link], *times_s: float, **how: float) -> Deployment:
    """Return replicas with these links and step times, or one for all, and no overheads but those given."""
    times_s = times_s if len(times_s) == len(links) else times_s * len(links)
    return Deployment(links=tuple(links), step_time_s=times_s, conditions=dataclasses.replace(IDEAL, **how))


@st.composite
def schedules(draw: st.DrawFn) -> SyncSchedule:
    inner_steps = draw(st.integers(1, 12))
    return SyncSchedule(
        inner_steps=inner_steps,
        num_fragments=draw(st.integers(1, min(4, inner_steps))),
        overlap_steps=draw(st.integers(0, inner_steps)),
    )


links = st.builds(Link, bandwidth_bits_per_s=st.floats(1e3, 1e7), latency_s=st.sampled_from([0.0, 0.03, 0.5]))
sizes = st.lists(st.integers(1, 3000), min_size=4, max_size=4)
one_link = st.tuples(st.floats(1e3, 1e7), st.floats(0, 1))


def run_in_process(schedule: SyncSchedule, numels: list[int], network: VirtualNetwork, steps: int, codec: str) -> None:
    """Drive a transport as `DiLoCo` does, without a model."""
    num_replicas, encoder = len(network.links), make_codec(codec)
    hub = InProcessTransport(num_replicas, network=network, round_timeout_s=math.inf)
    pending: list[dict[int, Pending]] = [{} for _ in range(num_replicas)]

    def send(replica: int, action: Send) -> None:
        numel = numels[action.fragment]
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
    schedule: SyncSchedule, numels: list[int], ways: list[Link], times: list[float], codec: str, steps: int
) -> None:
    """For any schedule and unequal links and speeds."""
    network = VirtualNetwork(ways, times[: len(ways)])
    numels = numels[: schedule.num_fragments]
    run_in_process(schedule, numels, network, steps, codec)
    uplinks = [way.uplink for way in ways]
    parcels = parcels_of(schedule, numels, make_codec(codec), len(ways), uplinks=uplinks)
    result = simulate(schedule, parcels, site(ways, *times[: len(ways)]), steps=steps)
    assert result.waited_s == pytest.approx(np.array(network.wait_s), rel=1e-9, abs=1e-9)
    assert result.compute_s + result.waited_s == pytest.approx(np.array(network.now_s), rel=1e-9)
    mean = sum(map(network.compute_utilization, range(len(ways)))) / len(ways)
    assert result.compute_utilization == pytest.approx(mean)


def test_all_wait_less_for_a_slow_uplink_that_is_known() -> None:
    """Among 20, 100 and 100 Mbit/s: (M - 1) / M * (n + m) bytes at 20 Mbit/s, or n bytes with nothing to sum."""
    ways = [Link(20e6), Link(100e6), Link(100e6)]
    schedule, waited_s = SyncSchedule(inner_steps=10), []
    for known in ([], [way.uplink for way in ways]):
        parcels = parcels_of(schedule, [768_000], FLOAT32, 3, uplinks=known)
        result = simulate(schedule, parcels, site(ways, 0.1), steps=10)
        waited_s.append(result.waited_s.tolist())
    assert waited_s == [pytest.approx([2 / 3 * 2 * 8 * 3.072e6 / 20e6] * 3), pytest.approx([8 * 3.072e6 / 20e6] * 3)]


def test_what_is_left_for_bytes_of_a_round_has_no_latencies_in_it() -> None:
    ways = [Link(20e6, 0.01), Link(100e6, 0.03), Link(100e6, 0.05)]
    windows_s = [uplink.window_s for uplink in site(ways, 0.5, 0.5, 0.5).uplinks(10.0)]
    assert windows_s == [pytest.approx(5.0 - 2 * trip_s) for trip_s in (0.06, 0.08, 0.08)]
    assert site(ways, 0.001, 0.001, 0.001).uplinks(10.0)[0].window_s == 0.0


def over(schedule: SyncSchedule, numels: list[int], bandwidth: float, latency: float, **more: Any) -> Simulated:
    """Simulate three identical replicas, with 50 steps of 0.1 s."""
    parcels = parcels_of(schedule, numels[: schedule.num_fragments], more.pop("codec", FP4), 3)
    return simulate(schedule, parcels, site([Link(bandwidth, latency)] * 3, 0.1, **more), steps=50)


def test_a_round_has_half_a_round_trip_for_headers_and_a_lost_tail_where_many_connections_lose_data() -> None:
    schedule, away = SyncSchedule(inner_steps=10, overlap_steps=9), [Link(1e9, 0.1)] * 3
    small = parcels_of(schedule, [1000], FP4, 3)

    def took_s(**how: float) -> float:
        return float(simulate(schedule, small, site(away, 1.0, **how), **TWO_CYCLES).merged[0].took_s.max())

    at_once_s = took_s()
    assert took_s(header_trips=0.5) == pytest.approx(at_once_s + 0.1)
    assert took_s(loss=0.001) == at_once_s, "among 96 connections most rounds lose nothing at the end"
    assert took_s(loss=0.001, quantile=0.95) == pytest.approx(at_once_s + 0.6)
    assert took_s(loss=0.01) == pytest.approx(at_once_s + 0.6)


@settings(max_examples=50, deadline=None)
@given(schedules(), sizes, one_link, st.floats(1, 100), st.floats(0, 1))
def test_a_worse_link_or_a_larger_payload_never_helps(
    schedule: SyncSchedule, fragments: list[int], way: tuple[float, float], slower: float, more_s: float
) -> None:
    bandwidth, latency = way
    good = over(schedule, fragments, bandwidth, latency).compute_utilization
    for worse in (
        over(schedule, fragments, bandwidth / slower, latency),
        over(schedule, fragments, bandwidth, latency + more_s),
        over(schedule, fragments, bandwidth, latency, codec=FLOAT32),
        over(schedule, fragments, bandwidth, latency, queue_trips=more_s),
        over(schedule, fragments, bandwidth, latency, average_s_per_value=1e-6 * more_s),
    ):
        assert worse.compute_utilization <= good + 1e-9


@settings(max_examples=30, deadline=None)
@given(schedules(), sizes, one_link)
def test_more_overlap_never_lowers_the_utilisation(
    schedule: SyncSchedule, fragments: list[int], way: tuple[float, float]
) -> None:
    reached = [
        over(dataclasses.replace(schedule, overlap_steps=tau), fragments, *way).compute_utilization
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
    parcels = parcels_of(schedule, fragments[: schedule.num_fragments], FP4, num_replicas)
    result = simulate(schedule, parcels, site([Link(*way)] * num_replicas, 0.1), steps=50)
    assert all(parcel.sent_bytes.sum() == parcel.received_bytes.sum() for parcel in parcels)
    rounds = [schedule.rounds_of(fragment, 50) for fragment in range(schedule.num_fragments)]
    expected = sum(count * parcel.sent_bytes for count, parcel in zip(rounds, parcels, strict=True))
    assert (result.sent_bytes == expected).all()


def test_slow_replicas_that_skip_steps_keep_nobody_waiting() -> None:
    schedule, place = SyncSchedule(inner_steps=10), site([Link()] * 2, 1.0, 2.0)
    parcels = parcels_of(schedule, [1], FLOAT32, 2)
    waiting, skipping = (simulate(schedule, parcels, place, **TWO_CYCLES, dynamic=dynamic) for dynamic in (False, True))
    assert waiting.compute_utilization == pytest.approx((0.5 + 1) / 2)
    assert skipping.compute_utilization == pytest.approx(1)
    assert skipping.wall_s == pytest.approx(waiting.wall_s / 2)


@pytest.mark.parametrize(("layers", "fragments"), [(0, 1), (101, 1), (4, 0), (4, 5)])
def test_models_and_fragments_that_are_none_are_refused(layers: int, fragments: int) -> None:
    with pytest.raises(ConfigurationError, match="cannot be split into"):
        fragment_sizes(100, layers, fragments)
