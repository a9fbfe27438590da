"""Predictions for an exchange at a site, and the table of others."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulator.__main__ import accuracy
from diloco.algorithm import SyncSchedule, make_codec
from diloco.plan import ACCURACY, Conditions, Deployment, Traffic, predict, table
from diloco.transport import Link

NO_WORK = Conditions(average_s_per_value=0.0, send_s_per_value=0.0, merge_s_per_value=0.0)
STREAMING = Traffic(
    schedule=SyncSchedule(inner_steps=50, num_fragments=4, overlap_steps=5),
    fragment_sizes=(2_000_000, 2_000_000, 2_000_000, 1_000_000),
    codec=make_codec("fp4"),
)


def site(bandwidth: float, *, latency: float = 0.05, replicas: int = 2, step_s: float = 0.25, **how: Any) -> Deployment:
    links, times = (Link(bandwidth, latency),) * replicas, (step_s,) * replicas
    return Deployment(links=links, step_time_s=times, conditions=replace(NO_WORK, **how))


def test_the_stated_errors_are_those_of_the_committed_results_of_the_benchmark() -> None:
    file = Path(__file__).parents[2] / "benchmarks" / "simulator" / "results.jsonl"
    results = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert accuracy(results) == ACCURACY
    assert len(results) > 20


def test_the_cost_of_each_fragment_is_that_computed_by_hand() -> None:
    """A byte takes 1 ns at 8 Gbit/s; headers, payload and vote one latency each; bbr loses nothing at the start."""
    blocking = replace(STREAMING, schedule=SyncSchedule(inner_steps=50, num_fragments=4), codec=make_codec("float32"))
    cost = predict(blocking, site(8e9, latency=0.002, congestion_control="bbr"))
    assert [each.values for each in cost.fragments] == list(blocking.fragment_sizes)
    assert [each.first_step for each in cost.fragments] == [50, 62, 75, 87]
    assert [each.sent_bytes for each in cost.fragments] == [8e6, 8e6, 8e6, 4e6]
    assert cost.sent_bytes_per_step == 28e6 / 50
    round_s = [each.round_s for each in cost.fragments]
    assert round_s == pytest.approx([1e-9 * each.sent_bytes + 3 * 0.002 for each in cost.fragments])
    assert [each.waited_s for each in cost.fragments] == pytest.approx(round_s), "nothing overlaps"
    assert cost.longest_wait_s == pytest.approx(max(round_s))
    assert cost.compute_utilization == pytest.approx(12.5 / (12.5 + sum(round_s)))
    assert cost.ideal_utilization > cost.compute_utilization > cost.p90_utilization
    assert cost.step_s == pytest.approx(0.25 / cost.compute_utilization)


def test_the_work_of_sends_and_merges_costs_utilisation() -> None:
    blocking = replace(STREAMING, schedule=SyncSchedule(inner_steps=10, num_fragments=4))
    place = site(1e12, latency=0.0, send_s_per_value=1e-7, merge_s_per_value=2e-7)
    cost = predict(blocking, place)
    assert cost.compute_utilization == pytest.approx(2.5 / (2.5 + 0.3 * 7), abs=1e-3)
    assert cost.p90_utilization == pytest.approx(2.5 / (2.5 + 1.25 * 0.3 * 7), abs=1e-3)


def test_loss_and_slow_starts_cost_utilisation() -> None:
    def reached(**how: Any) -> float:
        return predict(STREAMING, site(3e8, latency=0.1, replicas=3, step_s=0.05, **how)).p90_utilization

    keeping, cubic = reached(congestion_control="bbr"), reached(congestion_control="cubic")
    losing = [reached(congestion_control="cubic", loss=loss) for loss in (0.05, 0.005)]
    assert reached(congestion_control="bbr", loss=0.005) <= keeping
    assert losing[0] < losing[1] < cubic <= keeping


def test_encoded_means_and_whole_contributions_change_the_bytes() -> None:
    """64 replicas in fp4: means in fp4 need twice a payload, whole contributions a payload for each other replica."""
    place, many = site(1e9, replicas=64), replace(STREAMING, fragment_sizes=(1_024_000,) * 4)
    plain, means, whole = (
        predict(replace(many, **how), place).sent_bytes_per_step
        for how in ({}, {"mean": make_codec("fp4")}, {"whole": True})
    )
    payload = 4 * make_codec("fp4").payload_bytes(1_024_000) / 50
    assert means == pytest.approx(2 * 63 / 64 * payload, rel=0.01)
    assert whole == pytest.approx(63 * payload)
    assert means < plain < whole


def test_data_parallel_steps_exchange_all_gradients_in_each_step() -> None:
    cost = predict(Traffic.of_gradients(1_000_000), site(8e6, latency=0.0))
    (whole,) = cost.fragments
    assert (cost.inner_steps, cost.codec, cost.sent_bytes_per_step) == (1, "float32", 4e6)
    assert whole.waited_s == pytest.approx(4)
    rows = table(Traffic.of_gradients(1_000_000), site(8e6))
    bytes_of = {(row.inner_steps, row.codec): row.sent_bytes_per_step for row in rows}
    assert bytes_of[10, "float32"] == 4e5, "DiLoCo in its place"


def test_the_table_has_every_h_and_codec_and_its_own_sorted_by_utilisation_and_then_by_bytes() -> None:
    schedule = SyncSchedule(inner_steps=60, num_fragments=4, overlap_steps=15)
    exchange = replace(STREAMING, schedule=schedule, codec=make_codec("topk2"))
    rows = table(exchange, site(1e7), most_steps=99)
    assert {(row.inner_steps, row.codec) for row in rows} == {
        (inner_steps, codec)
        for inner_steps in (20, 50, 60)  # H = 10 is fewer steps than overlap
        for codec in ("float32", "bfloat16", "int8", "fp4", "sign", "topk2")
    }
    assert predict(exchange, site(1e7)) in rows
    assert all((row.num_fragments, row.overlap_steps) == (4, 15) for row in rows)
    keys = [(-round(row.compute_utilization, 3), row.sent_bytes_per_step) for row in table(STREAMING, site(1e9))]
    assert keys == sorted(keys)
    assert len({utilization for utilization, _ in keys}) < len(keys), "some are equal but for their bytes"
