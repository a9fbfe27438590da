"""Unequal parts of a sum: against a search over all parts, their limits, and their plan."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.algorithm import (
    MOST_SHARE,
    UNKNOWN_UPLINK,
    Exchange,
    MeanEncoding,
    Uplink,
    make_codec,
    owned_shares,
    plan_exchange,
    shard_bounds,
)

BLOCK = 256
INT8 = make_codec("int8", block_size=BLOCK)
SLOW, FAST = Uplink(20_000_000, full=True), Uplink(100_000_000, full=True)
sizes = st.floats(0.01, 100.0)


def slowest(shares: list[float], rates: list[float], payload: float, mean: float) -> float:
    """The time of the slowest replica, by the bytes that the docstring of `owned_shares` gives."""
    others = len(shares) - 1
    times = []
    for share, rate in zip(shares, rates, strict=True):
        sent = (1 - share) * payload + others * share * mean
        received = others * share * payload + (1 - share) * mean
        times.append(max(sent, received) / rate)
    return max(times)


@settings(max_examples=200, deadline=None)
@given(rates=st.lists(st.floats(1.0, 100.0), min_size=3, max_size=3), payload=sizes, mean=sizes)
def test_no_other_shares_let_the_slowest_finish_sooner(rates: list[float], payload: float, mean: float) -> None:
    shares = owned_shares(rates, payload, mean)
    steps = 24
    others = (
        [first / steps, second / steps, (steps - first - second) / steps]
        for first, second in product(range(steps + 1), repeat=2)
        if first + second <= steps
    )
    allowed = (each for each in others if max(each) <= MOST_SHARE / 3)
    best = min(slowest(each, rates, payload, mean) for each in allowed)
    assert slowest(shares, rates, payload, mean) <= best * (1 + 1e-9)


@settings(max_examples=200, deadline=None)
@given(rates=st.lists(st.floats(1.0, 1e4), min_size=2, max_size=64), payload=sizes, mean=sizes)
def test_shares_add_up_and_none_is_more_than_twice_an_equal_one(
    rates: list[float], payload: float, mean: float
) -> None:
    shares = owned_shares(rates, payload, mean)
    assert sum(shares) == pytest.approx(1)
    assert min(shares) >= 0
    assert max(shares) <= MOST_SHARE / len(rates) * (1 + 1e-9)
    others = len(rates) - 1
    if others * mean >= payload and others * payload >= mean:  # otherwise an owner moves less than the rest
        for one, other in product(range(len(rates)), repeat=2):
            assert shares[one] <= shares[other] + 1e-9 or rates[one] >= rates[other], "a faster uplink never owns less"


@settings(max_examples=100, deadline=None)
@given(
    numel=st.integers(0, 5000), shares=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=9), block=st.integers(1, 9)
)
def test_any_shares_cut_all_values_between_blocks(numel: int, shares: list[float], block: int) -> None:
    total = sum(shares) or 1.0
    bounds = shard_bounds(numel, len(shares), block, [share / total for share in shares])
    assert len(bounds) == len(shares)
    assert (bounds[0][0], bounds[-1][1]) == (0, numel)
    assert all(before[1] == after[0] for before, after in pairwise(bounds))
    assert all(start % block == 0 or start == numel for start, _ in bounds)
    assert all(start <= stop for start, stop in bounds)


def plan(*uplinks: Uplink, codec: str = "int8", means: str = "int8", blocks: int = 64, whole: bool = False) -> Exchange:
    mean = MeanEncoding(make_codec(means))
    return plan_exchange(make_codec(codec), blocks * BLOCK, len(uplinks), mean=mean, uplinks=uplinks, whole=whole)


def test_a_slow_uplink_sends_its_contribution_alone_and_no_mean() -> None:
    unequal = plan(FAST, SLOW, FAST)
    assert [stop - start for start, stop in unequal.shards] == [32 * BLOCK, 0, 32 * BLOCK]
    assert unequal.sent[1] == 2 * INT8.payload_bytes(32 * BLOCK)
    assert unequal.received[1] == 2 * INT8.payload_bytes(32 * BLOCK)
    assert unequal.sent[1] < 0.8 * plan(FAST, FAST, FAST).sent[1]


@pytest.mark.parametrize(
    "uplinks",
    [
        (),
        (UNKNOWN_UPLINK,) * 3,
        (Uplink(100), Uplink(1), Uplink(50)),  # none was full
        (FAST, FAST, FAST),
        (FAST, FAST, Uplink(90_000_000, full=True)),  # within the error of a measurement
        (SLOW, UNKNOWN_UPLINK, UNKNOWN_UPLINK),  # nobody has shown a higher rate
        (Uplink(0, full=True), FAST, FAST),  # a rate that nobody measures
        (Uplink(0, full=True),) * 3,
    ],
)
def test_shares_are_equal_unless_a_slow_uplink_is_known(uplinks: tuple[Uplink, ...]) -> None:
    contributions, mean = make_codec("int8"), MeanEncoding.of("int8")
    equal = plan_exchange(contributions, 64 * BLOCK, 3, mean=mean)
    assert equal.pattern == "reduce-scatter"
    assert plan_exchange(contributions, 64 * BLOCK, 3, mean=mean, uplinks=uplinks) == equal
