"""Which settings `decide` keeps or takes for a link, and which links it finds too slow."""

from dataclasses import replace
from typing import Any

import pytest

from diloco.algorithm import SyncSchedule, make_codec
from diloco.plan import ENOUGH, IDEAL, Decision, Deployment, Traffic, decide, predict, run_cost
from diloco.transport import Link

STREAMING = Traffic(
    schedule=SyncSchedule(inner_steps=20, num_fragments=4, overlap_steps=1),
    fragment_sizes=(1_000_000,) * 4,
    codec=make_codec("float32"),
)


def site(bits_per_s: float, latency_s: float = 0.02) -> Deployment:
    return Deployment(links=(Link(bits_per_s, latency_s),) * 2, step_time_s=(1.0,) * 2, conditions=IDEAL)


def decided(bits_per_s: float, *, start: int = 0, steps: int = 1000, **changes: Any) -> Decision:
    return decide(replace(STREAMING, **changes), site(bits_per_s), steps, start)


def test_the_overlap_grows_before_the_codec_gets_coarser_before_rounds_get_rarer() -> None:
    """A round of 4 MB takes 0.3, 4, 13 and 100 s; overlaps are at most a quarter of H."""
    chosen = {rate: decided(rate) for rate in (1e8, 8e6, 2.5e6, 3.2e5)}
    assert [each.verdict for each in chosen.values()] == ["keep", "take", "take", "take"]
    rounds = [each.rounds for each in chosen.values()]
    assert [each.inner_steps for each in rounds[:3]] == [20] * 3
    assert [each.codec for each in rounds] == ["float32", "float32", "int8", "fp4"]
    assert rounds[0].overlap_steps == 1 < rounds[1].overlap_steps <= 5
    assert rounds[3].inner_steps > 20
    assert all(each.run.compute_utilization >= ENOUGH for each in chosen.values())


def test_no_codec_that_needs_error_feedback_and_no_h_that_leaves_few_rounds_is_proposed() -> None:
    for rate in (1e4, 1e5, 3e5, 1e6):
        chosen = decided(rate, steps=400).rounds
        assert chosen.codec != "sign"
        assert chosen.inner_steps <= 40


def test_a_shared_start_that_is_in_the_way_is_shortened_or_left_out() -> None:
    """A data-parallel step takes 17 s in place of 1 at 8 Mbit/s, and 2.3 s at 100."""
    assert decided(1e8, steps=1000, start=10).verdict == "keep"
    shorter = decided(1e8, steps=1000, start=400)
    assert shorter.verdict == "take"
    assert 10 < shorter.run.start_steps < 400
    rounds = decided(1e8).rounds
    longer = run_cost(rounds, predict(Traffic.of_gradients(4_000_000), site(1e8)), 1000, shorter.run.start_steps + 1)
    assert longer.compute_utilization < ENOUGH <= shorter.run.compute_utilization
    assert decided(8e6, steps=1000, start=400).run.start_steps == 0


def test_a_link_that_is_too_slow_gets_the_bandwidth_that_would_do() -> None:
    slow = decided(1e4, steps=200)
    assert slow.verdict == "slow"
    assert slow.needed_bits_per_s is not None
    assert predict(STREAMING, site(slow.needed_bits_per_s)).compute_utilization >= ENOUGH
    assert predict(STREAMING, site(slow.needed_bits_per_s / 1.06)).compute_utilization < ENOUGH


def test_no_bandwidth_does_where_the_latency_is_longer_than_the_steps() -> None:
    blocking = replace(STREAMING, schedule=SyncSchedule(inner_steps=2), fragment_sizes=(4_000_000,))
    slow = decide(blocking, site(1e6, latency_s=2.0), 20, 0)
    assert (slow.verdict, slow.needed_bits_per_s) == ("slow", None)


@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
def test_data_parallel_training_that_is_too_slow_becomes_rounds_of_the_whole_model(codec: str) -> None:
    chosen = decide(Traffic.of_gradients(4_000_000, codec), site(1e8), 1000, 0)
    assert chosen.verdict == "take"
    assert (chosen.rounds.num_fragments, chosen.rounds.overlap_steps) == (1, 0)
    assert chosen.rounds.inner_steps > 1
