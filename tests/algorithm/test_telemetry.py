"""The measurements of a round: norms, cosines, gain and spread."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from diloco.algorithm import Contribution, Nesterov, OuterOptimizer, measured_outer_step, weighted_mean
from diloco.events import RoundCommitted
from tests.algorithm.contributions import contribution
from tests.replicas import quadratic, streaming


def measured(outer: OuterOptimizer, means: list[Tensor]) -> list[SimpleNamespace]:
    values, last, measures = torch.zeros_like(means[0]), None, []
    state = outer.init(values)
    for mean in means:
        one, last = measured_outer_step(outer, mean, state, values, last)
        measures.append(SimpleNamespace(**one))
    return measures


def test_the_first_outer_step_is_lr_times_1_plus_mu_and_equal_means_approach_the_gain() -> None:
    mean = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    found = measured(Nesterov(learning_rate=0.4, momentum=0.9), [mean] * 150)
    assert found[0].mean_norm == pytest.approx(float(mean.norm()))
    assert (found[0].mean_cosine, found[0].momentum_cosine) == (None, None)
    assert found[0].gain == pytest.approx(0.4 * 1.9, rel=1e-4)
    assert found[1].gain == pytest.approx(0.4 * 2.71, rel=1e-4)
    assert found[-1].gain == pytest.approx(0.4 / (1 - 0.9), rel=1e-3)
    assert found[-1].mean_cosine == pytest.approx(1)
    assert found[-1].momentum_cosine == pytest.approx(1)


def test_cosines_of_orthogonal_and_opposite_means() -> None:
    one, other = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    found = measured(Nesterov(learning_rate=1.0, momentum=0.5), [one, other, -other])
    assert [each.mean_norm for each in found] == [3, 4, 4]
    assert [each.mean_cosine for each in found] == [None, 0, -1]
    # the momentum is (3, 0), then (1.5, 4)
    assert [each.momentum_cosine for each in found] == [None, 0, pytest.approx(-4 / math.hypot(1.5, 4))]
    assert found[2].gain == pytest.approx(1 + 0.5 + 0.25 * -1)  # 1 + mu + mu^2 <b, Delta> / |Delta|^2


def contributions(values: list[Tensor], weights: list[float], codec: str = "float32") -> list[Contribution]:
    pairs = enumerate(zip(values, weights, strict=True))
    return [contribution(m, each, codec=codec, weight=weight, telemetry=True) for m, (each, weight) in pairs]


@pytest.mark.parametrize("codec", ["float32", "int8", "topk2"])
def test_the_spread_is_the_root_mean_square_distance_from_the_mean(codec: str) -> None:
    generator = torch.Generator().manual_seed(0)
    given = contributions([torch.randn(2000, generator=generator) for _ in range(3)], [1.0, 2.0, 0.5], codec)
    decoded = torch.stack([each.codec.decode(each.payload, 2000) for each in given])
    weights = torch.tensor([1.0, 2.0, 0.5]) / 3.5
    mean = (weights[:, None] * decoded).sum(0)
    expected = math.sqrt(float((weights * (decoded - mean).square().sum(1)).sum())) / float(mean.norm())
    assert weighted_mean(given).spread == pytest.approx(expected, rel=1e-4)


def test_every_replica_tells_the_same_of_a_round_and_nothing_with_telemetry_off() -> None:
    swarm = streaming(codec="int8")
    swarm.run(15, quadratic())
    told: dict[tuple[int, int], set[tuple[float | None, ...]]] = {}
    for event in swarm.events:
        if isinstance(event, RoundCommitted):
            measures = (event.mean_norm, event.mean_cosine, event.momentum_cosine, event.gain, event.spread)
            told.setdefault((event.fragment, event.outer_step), set()).add(measures)
    assert len(told) > 3
    for (_, outer_step), measures in told.items():
        assert len(measures) == 1
        norm, cosine, momentum, gain, spread = measures.pop()
        assert None not in (norm, gain, spread)
        assert (cosine is None, momentum is None) == (outer_step == 0, outer_step == 0)
