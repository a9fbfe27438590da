"""The steps that late replicas skip: examples computed by hand, and properties of all simulations."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.algorithm import SyncSchedule, make_codec
from diloco.errors import ConfigurationError
from diloco.membership import SHARE
from diloco.simulate import Cluster, Simulated, Traffic, outer_traffic, simulate, timeline
from diloco.transport import Link

FP4 = make_codec("fp4")


def traffic_of(replicas: int, inner_steps: int, overlap_steps: int, numel: int = 1000) -> Traffic:
    return outer_traffic(SyncSchedule(inner_steps=inner_steps, overlap_steps=overlap_steps), [numel], [FP4], replicas)


def run(step_times_s: list[float], link: Link, *, overlap_steps: int, steps: int, grace: bool = True) -> Simulated:
    replicas = len(step_times_s)
    cluster = Cluster.of([link] * replicas, step_times_s, grace=grace)
    return simulate(traffic_of(replicas, 10, overlap_steps), cluster, steps=steps)


@pytest.mark.parametrize(
    ("overlap_steps", "trained"),
    # The others send at 10 s. Steps 6, 7 and 8 of the slow replica would end at 12, 14 and 16 s;
    # its contribution is due at 10 s, 10 + 0.9 * 2 = 11.8 s, 12.7 s and 14.5 s.
    [(0, 5), (2, 5), (3, 6), (5, 7)],
)
def test_who_takes_twice_as_long_trains_what_fits_into_the_overlap(overlap_steps: int, trained: int) -> None:
    slow = run([1.0, 1.0, 2.0], Link(), overlap_steps=overlap_steps, steps=10)
    assert slow.left_out.tolist() == [0, 0, 10 - trained]
    assert slow.compute_s.tolist() == [10, 10, 2 * trained]
    waited = run([1.0, 1.0, 2.0], Link(), overlap_steps=overlap_steps, steps=10 + overlap_steps)
    assert waited.waited_s.tolist() == [0, 0, 0]
    without = run([1.0, 1.0, 2.0], Link(), overlap_steps=overlap_steps, steps=10 + overlap_steps, grace=False)
    assert without.waited_s.tolist() == [10 - overlap_steps, 10 - overlap_steps, 0]
    assert not without.left_out.any()


def test_a_latency_and_what_an_exchange_took_shorten_the_grace() -> None:
    """The duration of the first exchange, a second, is not known beforehand: a latency each for payload and vote."""
    grown = Cluster.of([Link(latency_s=0.5)] * 3, [1.0, 1.0, 1.5], grace=True)
    traffic = traffic_of(3, 10, 3, numel=1)
    before, after = (simulate(traffic, grown, steps=steps).left_out.tolist() for steps in (10, 20))
    # first round: step 7 ends at 10.5 s, step 8 would end at 12.0 s, which is before 12.7 s, and step 9 at 13.5 s
    assert before == [0, 0, 2]
    # second round: it starts at 12 s, and step 6 starts before the news at 20.5 s that the others sent at 20 s;
    # step 7 would end at 22.5 s, which is after 20 + 0.9 (3 - 1) = 21.8 s
    assert after[2] - before[2] == 4
    assert 20 + SHARE * (3 - 1) < 22.5 < 20 + SHARE * 3, "without the time of the exchange, one more step would fit"


def test_whoever_has_not_heard_of_the_others_goes_on() -> None:
    """The others send at 10 s, which is known at 10.6 s. Step 8 starts at 10.5 s, step 9 at 12 s."""
    done = run([1.0, 1.0, 1.5], Link(latency_s=0.6), overlap_steps=0, steps=10)
    assert done.left_out.tolist() == [0, 0, 2]


def test_who_leaves_out_the_step_of_a_send_sends_at_its_end_and_no_part_before() -> None:
    """Everything is sent at the start of that step, which is at 9 s for the others and at 10 s for the slow replica."""
    schedule = SyncSchedule(inner_steps=10, overlap_steps=0)
    early = outer_traffic(schedule, [1], [FP4], 3, releases=[((0.0, 1.0),)])
    done = simulate(early, Cluster.of([Link()] * 3, [1.0, 1.0, 2.0], grace=True), steps=10, history=True)
    assert done.history[0].times.up_start_s.tolist() == [9, 9, 10]


@settings(deadline=None)
@given(
    slow_s=st.lists(st.floats(1, 3), min_size=1, max_size=3),
    overlap_steps=st.integers(0, 3),
    inner_steps=st.integers(20, 30),
    rounds=st.integers(1, 5),
)
def test_where_a_quorum_is_level_nobody_is_waited_for_longer_than_a_step(
    slow_s: list[float], overlap_steps: int, inner_steps: int, rounds: int
) -> None:
    times_s = [1.0] * (len(slow_s) + 1) + slow_s
    cluster = Cluster.of([Link()] * len(times_s), times_s, grace=True)
    traffic = traffic_of(len(times_s), inner_steps, overlap_steps)
    done = simulate(traffic, cluster, steps=rounds * inner_steps + overlap_steps)
    assert done.longest_wait_s.max() <= max(slow_s) + 1e-9
    assert not done.left_out[: len(slow_s) + 1].any(), "replicas that are ahead skip no steps"
    np.testing.assert_allclose(done.compute_s, (done.steps - done.left_out) * np.array(times_s))


@settings(deadline=None)
@given(
    step_s=st.floats(0.1, 3),
    replicas=st.integers(1, 6),
    overlap_steps=st.integers(0, 10),
    latency_s=st.floats(0, 1),
    bandwidth=st.floats(1e3, 1e7),
)
def test_equals_leave_nothing_out_however_slow_the_link_is(
    step_s: float, replicas: int, overlap_steps: int, latency_s: float, bandwidth: float
) -> None:
    link = Link(bandwidth, latency_s)
    with_grace, without = (
        run([step_s] * replicas, link, overlap_steps=overlap_steps, steps=45, grace=grace) for grace in (True, False)
    )
    for field in dataclasses.fields(Simulated):
        if field.name != "history":
            assert np.array_equal(getattr(with_grace, field.name), getattr(without, field.name)), field.name


def test_scenarios_are_decided_each_for_itself() -> None:
    one, other = Link(1e4), Link(1e7)
    both = Cluster.of([one] * 3, [1.0, 1.0, 1.7], grace=True)
    rates = np.array([[1e4] * 3, [1e7] * 3])
    together = simulate(traffic_of(3, 10, 3), dataclasses.replace(both, bandwidth_bits_per_s=rates), steps=55)
    alone = [run([1.0, 1.0, 1.7], link, overlap_steps=3, steps=55) for link in (one, other)]
    assert together.left_out.tolist() == [each.left_out.tolist() for each in alone]
    np.testing.assert_allclose(together.waited_s, [each.waited_s for each in alone])


def test_no_timeline_is_drawn_of_steps_that_it_would_show_as_trained() -> None:
    cluster = Cluster.of([Link()] * 2, [1.0, 2.0], grace=True)
    done = simulate(traffic_of(2, 10, 1), cluster, steps=20, history=True)
    with pytest.raises(ConfigurationError, match=r"grace.*Leave grace out."):
        timeline(done, cluster, 20)
