"""The spans of a simulated run add up to its clocks and bytes, and the peak rate is that of an actual window."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.algorithm import SyncSchedule, make_codec
from diloco.errors import ConfigurationError
from diloco.simulate import (
    Cluster,
    Lane,
    Overheads,
    Simulated,
    Span,
    Traffic,
    outer_traffic,
    peak_bytes_per_s,
    simulate,
    timeline,
)
from diloco.transport import Link

LOOP = ("compute", "wait", "spent")
MEGABYTE_PER_S = 8e6


@dataclass(frozen=True)
class Run:
    traffic: Traffic
    cluster: Cluster
    steps: int

    def simulated(self) -> Simulated:
        return simulate(self.traffic, self.cluster, steps=self.steps, history=True)

    def spans(self) -> tuple[Span, ...]:
        return timeline(self.simulated(), self.cluster, self.steps)


@st.composite
def runs(draw: st.DrawFn, *, endless: bool = False) -> Run:
    """Draw any schedule on unequal links and machines; with ``endless``, also unlimited links."""
    inner_steps = draw(st.integers(1, 9))
    num_fragments = draw(st.integers(1, inner_steps))
    replicas = draw(st.integers(1, 4))
    schedule = SyncSchedule(
        inner_steps=inner_steps, num_fragments=num_fragments, overlap_steps=draw(st.integers(0, inner_steps - 1))
    )
    sizes = draw(st.lists(st.integers(1, 10**6), min_size=num_fragments, max_size=num_fragments))
    parts = draw(st.sampled_from([None, ((0.4, 0.5), (1.0, 0.5)), ((0.7, 1.0),)]))
    releases = None if parts is None else [parts] * num_fragments
    rates = st.floats(1e5, 1e9) if not endless else st.sampled_from([1e6, 1e7, math.inf])
    links = [Link(draw(rates), draw(st.floats(0, 2)), draw(st.booleans())) for _ in range(replicas)]
    overheads = Overheads(
        goodput=draw(st.sampled_from([1.0, 0.9])),
        round_trips=draw(st.sampled_from([0.0, 3.0])),
        send_s_per_value=draw(st.sampled_from([0.0, 1e-7])),
        merge_s_per_value=draw(st.sampled_from([0.0, 2e-7])),
    )
    cluster = Cluster.of(
        links,
        [draw(st.floats(0.1, 5)) for _ in links],
        jitter=draw(st.sampled_from([0.0, 0.3])),
        overheads=overheads,
    )
    traffic = outer_traffic(schedule, sizes, [make_codec("float32")], replicas, releases=releases)
    return Run(traffic, cluster, draw(st.integers(1, 40)))


def slow_pair(bandwidth: float = MEGABYTE_PER_S, **schedule: int) -> Run:
    """Simulate two replicas with steps of 1 s and a model of 4 MB, for 20 steps."""
    plan = SyncSchedule(**{"inner_steps": 10, **schedule})
    traffic = outer_traffic(plan, [10**6 // plan.num_fragments] * plan.num_fragments, [make_codec("float32")], 2)
    return Run(traffic, Cluster.of([Link(bandwidth)] * 2, 1.0), 20)


def of_lane(spans: tuple[Span, ...], replica: int, *lanes: str) -> list[Span]:
    return [span for span in spans if span.replica == replica and span.lane in lanes]


def test_spans_that_can_be_checked_by_hand() -> None:
    """Ten steps, 4 MB at 1 MB/s without overlap, ten steps, and 4 MB again."""
    spans = [span for span in slow_pair().spans() if span.replica == 1]
    assert sorted(spans, key=lambda span: (span.start_s, span.lane)) == [
        Span(1, "compute", 0.0, 10.0, "steps 1 to 10"),
        Span(1, "receive", 10.0, 14.0, "fragment 0, round 0, 4.0 MB", 0),
        Span(1, "send", 10.0, 14.0, "fragment 0, round 0, 4.0 MB", 0),
        Span(1, "wait", 10.0, 14.0, "waits for fragment 0, round 0", 0),
        Span(1, "compute", 14.0, 24.0, "steps 11 to 20"),
        Span(1, "receive", 24.0, 28.0, "fragment 0, round 1, 4.0 MB", 0),
        Span(1, "send", 24.0, 28.0, "fragment 0, round 1, 4.0 MB", 0),
        Span(1, "wait", 24.0, 28.0, "waits for fragment 0, round 1", 0),
    ]


def test_overlap_hides_what_it_can() -> None:
    """A payload is sent after step 10, needed after step 13, and complete at 14 s. The last one stays in flight."""
    spans = slow_pair(overlap_steps=3).spans()
    assert [(span.lane, span.start_s, span.stop_s) for span in of_lane(spans, 0, *LOOP)] == [
        ("compute", 0.0, 10.0),
        ("compute", 10.0, 13.0),
        ("wait", 13.0, 14.0),
        ("compute", 14.0, 21.0),
    ]
    assert [(span.start_s, span.stop_s) for span in of_lane(spans, 0, "send")] == [(10.0, 14.0), (21.0, 25.0)]


@given(runs(endless=True))
def test_spans_of_a_lane_do_not_overlap(run: Run) -> None:
    spans = run.spans()
    for replica in range(run.cluster.num_replicas):
        for lane in get_args(Lane):
            own = of_lane(spans, replica, lane)
            assert all(before.stop_s <= after.start_s for before, after in pairwise(own)), (replica, lane)
            assert all(span.start_s <= span.stop_s for span in own)
        assert all(span.start_s < span.stop_s for span in of_lane(spans, replica, *LOOP))


@given(runs(endless=True))
def test_the_loop_s_spans_follow_each_other_and_add_up_to_the_clock(run: Run) -> None:
    simulated, spans = run.simulated(), run.spans()
    for replica in range(run.cluster.num_replicas):
        loop = of_lane(spans, replica, *LOOP)
        assert loop[0].start_s == 0.0
        assert all(before.stop_s == after.start_s for before, after in pairwise(loop))
        totals = {lane: sum(span.stop_s - span.start_s for span in loop if span.lane == lane) for lane in LOOP}
        wall_s = sum(array[replica] for array in (simulated.compute_s, simulated.waited_s, simulated.spent_s))
        assert loop[-1].stop_s == pytest.approx(wall_s, rel=1e-9)
        assert totals["compute"] == pytest.approx(simulated.compute_s[replica], rel=1e-9, abs=1e-9)
        assert totals["wait"] == pytest.approx(simulated.waited_s[replica], rel=1e-9, abs=1e-9)
        assert totals["spent"] == pytest.approx(simulated.spent_s[replica], rel=1e-9, abs=1e-9)


@given(runs())
def test_all_bytes_are_in_the_spans_at_the_link_s_rate(run: Run) -> None:
    simulated, spans = run.simulated(), run.spans()
    rates = run.cluster.links.bandwidth_bits_per_s / 8
    for replica in range(run.cluster.num_replicas):
        sent = sum(span.stop_s - span.start_s for span in of_lane(spans, replica, "send")) * rates[replica]
        took_in = sum(span.stop_s - span.start_s for span in of_lane(spans, replica, "receive")) * rates[replica]
        assert sent == pytest.approx(simulated.sent_bytes[replica], rel=1e-6, abs=1)
        # a download may take longer than its bytes need: it lasts until the slowest sender has finished
        assert took_in >= simulated.received_bytes[replica] * (1 - 1e-6) - 1
    exchanged = run.traffic.schedule.rounds(run.steps) * run.cluster.num_replicas
    assert len([span for span in spans if span.lane == "send"]) == (exchanged if run.cluster.num_replicas > 1 else 0)


@given(runs(), st.integers(1, 40))
def test_the_first_steps_of_a_longer_run_are_a_run_of_so_many_steps(run: Run, longer: int) -> None:
    whole = replace(run, steps=run.steps + longer).simulated()
    assert timeline(whole, run.cluster, run.steps) == run.spans()


def test_steps_are_all_there_and_in_order() -> None:
    labels = [span.label for span in of_lane(slow_pair(num_fragments=2).spans(), 0, "compute")]
    assert labels == ["steps 1 to 10", "steps 11 to 15", "steps 16 to 20"]
    every_step = slow_pair(inner_steps=1).spans()
    assert [span.label for span in of_lane(every_step, 0, "compute")] == [f"step {step}" for step in range(1, 21)]


def test_a_link_without_limits_leaves_spans_without_length() -> None:
    spans = slow_pair(bandwidth=math.inf).spans()
    assert [(span.start_s, span.stop_s) for span in of_lane(spans, 0, "send")] == [(10.0, 10.0), (20.0, 20.0)]
    assert not of_lane(spans, 0, "wait", "spent")


def test_the_peak_rate_of_a_scenario_is_that_of_it_alone_and_one_alone_is_drawn() -> None:
    bandwidths = np.array([1e6, 8e6, 1e9])
    run = slow_pair(num_fragments=2, overlap_steps=1)
    many = replace(run.cluster, bandwidth_bits_per_s=bandwidths[:, None])
    simulated = simulate(run.traffic, many, steps=20, history=True)
    for index, bandwidth in enumerate(bandwidths):
        alone = slow_pair(bandwidth=float(bandwidth), num_fragments=2, overlap_steps=1)
        assert peak_bytes_per_s(simulated)[index] == peak_bytes_per_s(alone.simulated())
    for result, steps in ((simulated, 20), (run.simulated(), 0)):
        with pytest.raises(ConfigurationError, match="at least one step and a single scenario"):
            timeline(result, many, steps)


def test_a_simulation_without_its_rounds_is_refused() -> None:
    run = slow_pair()
    without = simulate(run.traffic, run.cluster, steps=20)
    with pytest.raises(ConfigurationError, match="history=True"):
        timeline(without, run.cluster, 20)
    with pytest.raises(ConfigurationError, match="history=True"):
        peak_bytes_per_s(without)


def test_a_run_too_short_to_send_anything_has_no_peak() -> None:
    run = replace(slow_pair(), steps=9)
    assert peak_bytes_per_s(run.simulated()) == 0.0
    assert [span.label for span in run.spans()] == ["steps 1 to 9"] * 2


def test_peak_within_a_transfer_is_the_link_and_over_all_is_the_mean() -> None:
    simulated = slow_pair().simulated()
    assert peak_bytes_per_s(simulated) == pytest.approx(1e6)
    assert peak_bytes_per_s(simulated, 4.0) == pytest.approx(1e6)
    assert peak_bytes_per_s(simulated, 8.0) == pytest.approx(0.5e6)
    assert peak_bytes_per_s(simulated, 16.0) == pytest.approx(6e6 / 16)  # 10 s lie between 14 and 24
    assert peak_bytes_per_s(simulated, 100.0) == pytest.approx(8e6 / 100)


def test_peak_of_what_takes_no_time_is_counted_once_a_window() -> None:
    simulated = slow_pair(bandwidth=math.inf, inner_steps=1).simulated()
    assert peak_bytes_per_s(simulated) == pytest.approx(4e6)
    assert peak_bytes_per_s(simulated, 0.5) == pytest.approx(8e6)
    assert peak_bytes_per_s(simulated, 2.0) == pytest.approx(4e6)
    assert peak_bytes_per_s(simulated, 1.5) == pytest.approx(8e6 / 1.5)


@given(runs(endless=True), st.floats(0.01, 50), st.lists(st.floats(-20, 200), min_size=1, max_size=5))
def test_no_window_carries_more_than_the_peak_and_one_carries_it(
    run: Run, window_s: float, anywhere: list[float]
) -> None:
    simulated, spans = run.simulated(), run.spans()
    best = 0.0
    for replica in range(run.cluster.num_replicas):
        sent = of_lane(spans, replica, "send")
        sizes = {
            (each.fragment, each.outer_step): float(
                np.broadcast_to(each.sent_bytes, simulated.compute_s.shape)[replica]
            )
            for each in simulated.history
        }
        edges = [edge for span in sent for edge in (span.start_s, span.stop_s)]
        for begin_s in [*anywhere, *edges, *(edge - window_s * (1 - 1e-9) for edge in edges)]:
            end_s = begin_s + window_s
            carried = 0.0
            for span in sent:
                size = sizes[span.fragment, int(span.label.split("round ")[1].split(",")[0])]
                if span.stop_s > span.start_s:
                    common_s = max(0.0, min(end_s, span.stop_s) - max(begin_s, span.start_s))
                    carried += size * common_s / (span.stop_s - span.start_s)
                elif begin_s <= span.start_s < end_s:
                    carried += size
            best = max(best, carried / window_s)
    assert peak_bytes_per_s(simulated, window_s) == pytest.approx(best, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("window_s", [0.0, -1.0, math.inf, math.nan])
def test_a_window_that_is_none_is_refused(window_s: float) -> None:
    with pytest.raises(ConfigurationError, match="the window must be above 0 s"):
        peak_bytes_per_s(slow_pair().simulated(), window_s)
