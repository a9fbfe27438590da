"""The grace period for stragglers: the published formula, never before a quorum, whatever replicas report."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.membership import SHARE, Grace, byzantine_quorum, due_s

times_s = st.floats(0, 1e6)
speeds = st.floats(1e-9, 1e9)


@settings(deadline=None)
@given(
    arrivals_s=st.lists(st.floats(0, 100), min_size=3, max_size=7),
    step_s=st.floats(0.01, 10),
    overlap_steps=st.integers(0, 50),
    sync_s=st.floats(0, 20),
)
def test_with_equal_speeds_it_is_the_published_formula(
    arrivals_s: list[float], step_s: float, overlap_steps: int, sync_s: float
) -> None:
    """`gamma (tau step_s - quorum_s - sync_s)` after the quorum (Decoupled DiLoCo), computed independently."""
    heard_s, quorum = dict(enumerate(arrivals_s, start=1)), 3
    quorum_at_s = sorted(arrivals_s)[2]
    grace_s = SHARE * (overlap_steps * step_s - (quorum_at_s - min(arrivals_s)) - sync_s)
    due = due_s(heard_s, dict.fromkeys(heard_s, 1 / step_s), quorum=quorum, overlap_steps=overlap_steps, sync_s=sync_s)
    assert due == pytest.approx(quorum_at_s + max(0.0, grace_s), abs=1e-6)


@settings(deadline=None)
@given(
    heard_s=st.dictionaries(st.integers(1, 8), times_s, max_size=8),
    steps_per_s=st.dictionaries(st.integers(1, 8), speeds, max_size=8),
    quorum=st.integers(1, 5),
    overlap_steps=st.integers(0, 100),
    sync_s=st.floats(0, 1e3),
)
def test_nobody_is_hurried_before_a_quorum_has_contributed_nor_waited_for_after_the_first_stand_still(
    heard_s: dict[int, float], steps_per_s: dict[int, float], quorum: int, overlap_steps: int, sync_s: float
) -> None:
    due = due_s(heard_s, steps_per_s, quorum=quorum, overlap_steps=overlap_steps, sync_s=sync_s)
    known = [one for one in heard_s if one in steps_per_s]
    if len(heard_s) < quorum or not known:
        assert due is None
        return
    quorum_at_s = sorted(heard_s.values())[quorum - 1]
    assert due is not None
    assert due >= quorum_at_s
    for one in known:
        assert due <= max(quorum_at_s, heard_s[one] + overlap_steps / steps_per_s[one])


@settings(deadline=None)
@given(
    honest_s=st.lists(times_s, min_size=2, max_size=2),
    lying_s=times_s,
    lying_speed=speeds,
)
def test_who_lies_hurries_nobody_who_is_ahead_of_the_honest(
    honest_s: list[float], lying_s: float, lying_speed: float
) -> None:
    """Of four replicas, one may be faulty; the straggler is the fourth. Its due time depends on an honest one."""
    quorum = byzantine_quorum(4)
    heard_s = {1: honest_s[0], 2: honest_s[1], 3: lying_s}
    due = due_s(heard_s, {1: 1.0, 2: 1.0, 3: lying_speed}, quorum=quorum, overlap_steps=5, sync_s=0.0)
    assert due is not None
    assert due >= min(honest_s)


def test_the_first_round_that_is_due_counts_with_the_exchange_times_of_its_fragment() -> None:
    grace = Grace(0)
    waiting = {(0, 5): {1: 10.0, 2: 10.0}, (1, 5): {1: 11.0, 2: 11.0}}
    arguments = {"members": 3, "overlap_steps": 4}
    assert grace.due_s(waiting, {1: 1.0, 2: 1.0}, **arguments) == 10.0 + SHARE * 4
    grace.learn(1, took_s=3.0, late_s={0: 0.0, 1: 0.0, 2: 0.0})
    assert grace.due_s(waiting, {1: 1.0, 2: 1.0}, **arguments) == pytest.approx(11.0 + SHARE * 1)
    assert grace.due_s({}, {1: 1.0}, **arguments) is None


def test_what_an_exchange_takes_is_counted_from_the_last_contribution_to_it_and_smoothed() -> None:
    grace, waiting = Grace(0), {(0, 1): {1: 0.0}}

    def grace_s() -> float:
        due = grace.due_s(waiting, {1: 1.0}, members=2, overlap_steps=10)
        assert due is not None
        return due / SHARE

    grace.learn(0, took_s=60.0, late_s={1: 0.0, 2: 1.0})
    assert grace_s() == pytest.approx(10), "a round without its own contribution shows nothing"
    grace.learn(0, took_s=6.0, late_s={0: 1.0, 1: 5.0, 2: 0.0})
    assert grace_s() == pytest.approx(8)
    grace.learn(0, took_s=3.0, late_s={0: 5.0, 1: 5.0, 2: 0.0})
    assert grace_s() == pytest.approx(10 - (Grace.KEPT * 2 + (1 - Grace.KEPT) * 3))
    grace.learn(0, took_s=1.0, late_s={0: 0.0, 1: 1.5})
    assert grace_s() > 7.9, "a clock that was read in another order makes no negative time"
