"""Clipping of contributions: norms against a plain loop, exact numbers, and the effect on a mean and on a run."""

from __future__ import annotations

import math
import statistics
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.algorithm import (
    UNCLIPPED,
    AlphaMerge,
    Clipping,
    Contribution,
    Nesterov,
    SyncSchedule,
    codec_names,
    make_codec,
    scale_factors,
    vector_norm,
    weighted_mean,
)
from diloco.algorithm import clipping as module
from diloco.events import RoundCommitted
from tests.algorithm.contributions import contribution
from tests.replicas import Swarm, quadratic

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
NORMS = st.dictionaries(st.integers(0, 30), st.floats(0, 1e30), min_size=1, max_size=12)


def folded(squares: list[float]) -> float:
    """Compute the sum by its definition, in Python's float64."""
    while len(squares) > 1:
        half = (len(squares) + 1) // 2
        upper = squares[half:]
        squares = [a + b for a, b in zip(squares, upper, strict=False)] + squares[len(upper) : half]
    return squares[0]


def plain_norm(values: list[float], chunk: int) -> float:
    if not values:
        return 0.0
    sums = [folded([x * x for x in values[i : i + chunk]]) for i in range(0, len(values), chunk)]
    return math.sqrt(folded(sums))


@given(st.lists(FLOATS, max_size=70), st.integers(1, 80))
def test_the_norm_is_that_of_a_plain_loop_in_the_same_order(values: list[float], chunk: int) -> None:
    """The bits are equal for every length and range size."""
    with mock.patch.object(module, "CHUNK_VALUES", chunk):
        assert vector_norm(torch.tensor(values, dtype=torch.float32)) == plain_norm(values, chunk)


@pytest.mark.parametrize("numel", [1, 1000, 65_537, (1 << 20) - 1, (1 << 20) + 7, 3 * (1 << 20)])
def test_the_norm_is_the_norm(numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    exact = math.sqrt(math.fsum((values.double() ** 2).tolist()))
    assert vector_norm(values) == pytest.approx(exact, rel=1e-14)


def test_the_norm_changes_nothing_and_asks_for_no_layout() -> None:
    values = torch.randn(1001, generator=torch.Generator().manual_seed(0))
    kept = values.clone()
    spread = torch.zeros(2002)
    spread[::2] = values
    assert vector_norm(values) == vector_norm(spread[::2])
    assert torch.equal(values, kept)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert vector_norm(values) == vector_norm(spread[::2])
    finally:
        torch.set_num_threads(threads)


@given(NORMS, st.none() | st.floats(1e-20, 1e20), st.none() | st.floats(1e-3, 1e3))
def test_factors_are_those_of_the_naive_formula(
    norms: dict[int, float], max_norm: float | None, factor: float | None
) -> None:
    bound = math.inf if max_norm is None else max_norm
    if factor is not None and len(norms) >= 3 and (median := statistics.median_low(norms.values())):
        bound = min(bound, factor * median)
    expected = {m: float(torch.tensor(bound / n, dtype=torch.float32)) for m, n in norms.items() if n > bound}
    found = scale_factors(Clipping(max_norm=max_norm, median_norm_factor=factor), norms)
    assert found == expected
    assert list(found) == sorted(found)
    assert all(0 <= each <= 1 for each in found.values())


@given(NORMS, st.floats(1.0, 100.0))
def test_with_the_median_at_most_half_are_scaled_down(norms: dict[int, float], factor: float) -> None:
    assert len(scale_factors(Clipping(median_norm_factor=factor), norms)) <= len(norms) // 2


@pytest.mark.parametrize("norms", [{4: 1e9}, {0: 1.0, 1: 1e9}, {0: 0.0, 1: 0.0, 2: 5.0}])
def test_the_median_of_too_few_or_of_nothing_bounds_nothing(norms: dict[int, float]) -> None:
    assert scale_factors(Clipping(median_norm_factor=1.0), norms) == {}


def contributions(codec: str, scales: list[float], weights: list[float]) -> list[Contribution]:
    values = [scale * torch.randn(700, generator=torch.Generator().manual_seed(m)) for m, scale in enumerate(scales)]
    pairs = zip(values, weights, strict=True)
    return [contribution(m, each, codec=codec, weight=weight) for m, (each, weight) in enumerate(pairs)]


@pytest.mark.parametrize("codec", codec_names())
def test_the_mean_is_that_of_the_naive_formula(codec: str) -> None:
    """``sum w f v / sum w``: the norms are those of decoded values, the divisor stays the sum of the weights."""
    given = contributions(codec, [1.0, 1.0, 50.0, 1.0], [1.0, 2.0, 0.5, 1.0])
    mean = weighted_mean(given, Clipping(median_norm_factor=2.0))
    decoded = [make_codec(codec).decode(each.payload, 700).double() for each in given]
    norms = [float(each.norm()) for each in decoded]
    bound = 2 * sorted(norms)[1]
    expected = sum(
        each.weight * min(1.0, bound / norm) * values for each, norm, values in zip(given, norms, decoded, strict=True)
    ) / sum(each.weight for each in given)
    assert mean.clipped == (2,)
    assert mean.weight == 4.5
    torch.testing.assert_close(mean.values.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("codec", codec_names())
def test_where_nothing_is_too_large_the_bits_are_those_without_clipping(codec: str) -> None:
    given = contributions(codec, [1.0, 2.0, 3.0], [1.0, 0.3, 2.0])
    plain, clipped = weighted_mean(given), weighted_mean(given, Clipping(max_norm=1e6, median_norm_factor=100.0))
    assert torch.equal(plain.values, clipped.values)
    assert clipped.clipped == ()


def test_buffers_are_not_scaled() -> None:
    given = [
        Contribution(**(vars(each) | {"buffers": torch.tensor([100.0 * each.replica])}))
        for each in contributions("float32", [1.0, 1.0], [1.0, 1.0])
    ]
    mean = weighted_mean(given, Clipping(max_norm=1e-3))
    assert mean.buffers is not None
    assert mean.buffers.tolist() == [50.0]
    assert mean.clipped == (0, 1)
    assert vector_norm(mean.values) <= 1e-3 * (1 + 1e-6)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=3, max_size=6), st.floats(0.5, 4.0), st.sampled_from(codec_names()))
def test_nobody_moves_the_mean_by_more_than_its_weight_times_the_bound(
    scales: list[float], factor: float, codec: str
) -> None:
    given = contributions(codec, scales, [1.0] * len(scales))
    norms = {each.replica: vector_norm(each.codec.decode(each.payload, each.numel)) for each in given}
    policy = Clipping(median_norm_factor=factor)
    mean = weighted_mean(given, policy)
    if math.isfinite(bound := policy.bound(norms)):
        assert vector_norm(mean.values) <= bound * (1 + 1e-4)


def with_a_liar(clipping: Clipping, steps: int = 200) -> Swarm:
    """Four replicas share a target; the last one moves up to a thousand times as far in the opposite direction."""
    honest = quadratic(shared=True)

    def gradient(replica: int, step: int, model: Any) -> None:
        honest(replica, step, model)
        if replica == 3:
            for parameter in model.parameters():
                parameter.grad.mul_(-30.0)

    swarm = Swarm(
        4,
        SyncSchedule(inner_steps=4),
        outer=Nesterov(learning_rate=0.5, momentum=0.5),
        merge=AlphaMerge(0.0),
        clipping=clipping,
    )
    swarm.run(steps, gradient)
    return swarm


def target_of(swarm: Swarm) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.cat([torch.randn(p.shape, generator=generator).flatten() for p in swarm.models[0].parameters()])


def test_converges_although_one_replica_pulls_far_the_other_way() -> None:
    swarm = with_a_liar(Clipping(median_norm_factor=1.0))
    torch.testing.assert_close(swarm.global_params(0), target_of(swarm), atol=0.15, rtol=0)
    clipped = [event.clipped for event in swarm.events if isinstance(event, RoundCommitted)]
    assert {3} <= set().union(*clipped)
    without = with_a_liar(UNCLIPPED, steps=40)
    assert float((without.global_params(0) - target_of(without)).abs().max()) > 100


def test_what_is_in_flight_is_clipped_after_a_checkpoint_too() -> None:
    schedule, clipping = SyncSchedule(inner_steps=4, overlap_steps=2), Clipping(max_norm=0.01)

    def make() -> Swarm:
        return Swarm(2, schedule, clipping=clipping)

    whole, first, second = make(), make(), make()
    whole.run(12, quadratic())
    first.run(5, quadratic())
    second.resume_from(first)
    second.run(7, quadratic())
    assert torch.equal(second.global_params(0), whole.global_params(0))
    assert {event.clipped for event in second.events if isinstance(event, RoundCommitted)} == {(0, 1)}
