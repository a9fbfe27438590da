"""Clipping of contributions: norms against a plain loop, and the effect on a mean and on a run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco import AlphaMerge, Nesterov, SyncSchedule, make_codec
from diloco.algorithm import CODECS, Contribution, scale_factors, vector_norm, weighted_mean
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


@given(st.lists(FLOATS, min_size=1, max_size=70))
def test_norm_has_the_bits_of_a_plain_loop_in_the_same_order(values: list[float]) -> None:
    expected = math.sqrt(folded([x * x for x in values]))
    assert vector_norm(torch.tensor(values, dtype=torch.float32)) == expected


@pytest.mark.parametrize("numel", [0, 1, 1000, 65_537, (1 << 20) - 1, (1 << 20) + 7, 3 * (1 << 20)])
def test_norm_is_accurate_for_any_layout_and_number_of_threads(numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    exact = math.sqrt(math.fsum((values.double() ** 2).tolist()))
    norm, strided, threads = vector_norm(values), torch.zeros(2 * numel), torch.get_num_threads()
    assert norm == pytest.approx(exact, rel=1e-14)
    strided[::2] = values
    torch.set_num_threads(1)
    try:
        assert vector_norm(strided[::2]) == norm
    finally:
        torch.set_num_threads(threads)


@given(NORMS, st.floats(1e-20, 1e20))
def test_factors_are_the_bound_over_the_norm(norms: dict[int, float], max_norm: float) -> None:
    factors = scale_factors(max_norm, norms)
    assert factors == {
        m: float(torch.tensor(max_norm / n, dtype=torch.float32)) for m, n in norms.items() if n > max_norm
    }
    assert list(factors) == sorted(factors)


def contributions(codec: str, scales: list[float], weights: list[float], max_norm: float | None) -> list[Contribution]:
    values = [scale * torch.randn(700, generator=torch.Generator().manual_seed(m)) for m, scale in enumerate(scales)]
    pairs = enumerate(zip(values, weights, strict=True))
    return [contribution(m, each, codec=codec, weight=w, max_norm=max_norm) for m, (each, w) in pairs]


@pytest.mark.parametrize("codec", CODECS.names)
def test_mean_is_that_of_the_naive_formula(codec: str) -> None:
    """``sum w f v / sum w``: the norms are those of decoded values, the divisor stays the sum of the weights."""
    given = contributions(codec, [1.0, 1.0, 50.0, 1.0], [1.0, 2.0, 0.5, 1.0], bound := 50.0)
    decoded = [make_codec(codec).decode(each.payload, 700).double() for each in given]
    scaled = [each.weight * min(1.0, bound / float(v.norm())) * v for each, v in zip(given, decoded, strict=True)]
    mean = weighted_mean(given)
    assert (mean.clipped, mean.weight) == ((2,), 4.5)
    torch.testing.assert_close(mean.values.double(), sum(scaled) / 4.5, rtol=1e-5, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6), st.floats(1e-3, 1e6), st.sampled_from(CODECS.names))
def test_nobody_moves_the_mean_by_more_than_its_weight_times_the_bound(
    scales: list[float], bound: float, codec: str
) -> None:
    mean = weighted_mean(contributions(codec, scales, [1.0] * len(scales), bound))
    assert vector_norm(mean.values) <= bound * (1 + 1e-4)


def test_converges_although_one_replica_pulls_far_the_other_way() -> None:
    """Four replicas share a target; the last one moves up to a thousand times as far in the opposite direction."""
    honest = quadratic(shared=True)

    def gradient(replica: int, step: int, model: Any) -> None:
        honest(replica, step, model)
        if replica == 3:
            for parameter in model.parameters():
                parameter.grad.mul_(-30.0)

    def distance(max_norm: float | None, steps: int) -> float:
        outer = Nesterov(learning_rate=0.5, momentum=0.5)
        swarm = Swarm(4, SyncSchedule(inner_steps=4), outer=outer, merge=AlphaMerge(0.0), max_norm=max_norm)
        swarm.run(steps, gradient)
        clipped = {m for event in swarm.events if isinstance(event, RoundCommitted) for m in event.clipped}
        assert (3 in clipped) == (max_norm is not None)
        generator = torch.Generator().manual_seed(0)
        target = torch.cat([torch.randn(p.shape, generator=generator).flatten() for p in swarm.models[0].parameters()])
        return float((swarm.global_params(0) - target).abs().max())

    assert distance(0.2, steps=300) < 0.15
    assert distance(None, steps=40) > 100


def test_what_is_in_flight_is_clipped_after_a_checkpoint_too() -> None:
    def make() -> Swarm:
        return Swarm(2, SyncSchedule(inner_steps=4, overlap_steps=2), max_norm=0.01)

    whole, first, second = make(), make(), make()
    whole.run(12, quadratic())
    first.run(5, quadratic())
    second.resume_from(first)
    second.run(7, quadratic())
    assert torch.equal(second.global_params(0), whole.global_params(0))
    assert {event.clipped for event in second.events if isinstance(event, RoundCommitted)} == {(0, 1)}
