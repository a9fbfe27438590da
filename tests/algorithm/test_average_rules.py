"""Average rules: each against its formula, and in simple cases with known results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.algorithm import AverageRule, Clipping, Nesterov, Rda, SendersMean, SyncSchedule
from diloco.errors import ConfigurationError, ContractError
from diloco.outer import DiLoCo
from diloco.testing import check_average_rule
from diloco.transport import InProcessTransport
from tests.replicas import Swarm, Vectors, quadratic

RULES: list[AverageRule] = [SendersMean(), Rda()]
SIZES = [5, 1, 30, 4]


def drawn(count: int, numel: int = sum(SIZES), *, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for _ in range(count)]


def combine(
    rule: AverageRule, values: Sequence[Tensor], weights: Sequence[float] = (), sizes: Sequence[int] = SIZES
) -> Tensor:
    return rule.combine(zip(weights or [1.0] * len(values), values, strict=True), sizes)


def rda_in_numpy(values: Sequence[Tensor], weights: Sequence[float], sizes: Sequence[int]) -> np.ndarray:
    """Evaluate the formula, tensor by tensor, in float64."""
    found, start = [], 0
    for size in sizes:
        parts = [each[start : start + size].double().numpy() for each in values]
        norms = [float(np.linalg.norm(part)) for part in parts]
        total = sum(weights)
        direction = sum(w * part / norm for w, part, norm in zip(weights, parts, norms, strict=True) if norm) / total
        length = sum(w * norm for w, norm in zip(weights, norms, strict=True)) / total
        found.append(length * direction / np.linalg.norm(direction))
        start += size
    return np.concatenate(found)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_rda_is_that_of_the_formula(count: int) -> None:
    values, weights = drawn(count), [1.0 + 0.5 * m for m in range(count)]
    expected = torch.from_numpy(rda_in_numpy(values, weights, SIZES)).float()
    torch.testing.assert_close(combine(Rda(), values, weights), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_one_contribution_is_the_average_of_itself(rule: AverageRule) -> None:
    for values in drawn(20):
        torch.testing.assert_close(combine(rule, [values], [2.5]), values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("count", [2, 4, 16])
def test_of_orthogonal_contributions_of_norm_r_rda_has_norm_r_and_the_mean_r_by_the_root_of_m(count: int) -> None:
    values = list(3.0 * torch.eye(count))
    found = combine(Rda(), values, sizes=[count])
    assert float(found.norm()) == pytest.approx(3.0)
    mean = torch.stack(values).mean(0)
    assert float(mean.norm()) == pytest.approx(3.0 / math.sqrt(count))
    torch.testing.assert_close(found / found.norm(), mean / mean.norm())


def test_rda_of_directions_that_cancel_is_the_mean_and_of_nothing_is_nothing() -> None:
    one = torch.tensor([3.0, 4.0, 0.0, 1.0])
    found = combine(Rda(), [one, -0.5 * one], sizes=[2, 1, 1])
    torch.testing.assert_close(found, 0.25 * one)
    assert torch.equal(combine(Rda(), [torch.zeros(4)] * 3, sizes=[4]), torch.zeros(4))


def test_rda_of_one_that_did_nothing_keeps_the_others_direction() -> None:
    one = torch.tensor([3.0, 4.0])
    torch.testing.assert_close(combine(Rda(), [one, torch.zeros(2)], sizes=[2]), 0.5 * one)


def test_each_tensor_has_a_direction_of_its_own() -> None:
    """Scaling one tensor of one contribution changes only the length of that tensor's average."""
    values = drawn(3)
    scaled = [each.clone() for each in values]
    scaled[1][: SIZES[0]] *= 100.0
    before, after = combine(Rda(), values), combine(Rda(), scaled)
    assert torch.equal(before[SIZES[0] :], after[SIZES[0] :])
    one, other = before[: SIZES[0]], after[: SIZES[0]]
    torch.testing.assert_close(one / one.norm(), other / other.norm())
    assert float(other.norm()) > 10 * float(one.norm())


def test_the_mean_over_senders_divides_by_the_weights_of_those_who_sent_the_value() -> None:
    values = [torch.tensor([2.0, 0.0, -1.0, 0.0]), torch.tensor([0.0, 0.0, 3.0, 8.0])]
    found = combine(SendersMean(), values, [3.0, 1.0], sizes=[4])
    assert found.tolist() == [2.0, 0.0, 0.0, 8.0]  # (3 * -1 + 1 * 3) / 4


@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_mean_over_senders_is_the_mean_where_all_send_everything(count: int) -> None:
    values, weights = drawn(count), [0.5 + m for m in range(count)]
    expected = sum(w * each for w, each in zip(weights, values, strict=True)) / sum(weights)
    torch.testing.assert_close(combine(SendersMean(), values, weights), expected)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=5),
    scale=st.floats(1e-15, 1e15),
)
def test_the_average_is_finite_scales_with_the_contributions_and_is_no_longer_than_the_longest(
    rule: AverageRule, seed: int, weights: list[float], scale: float
) -> None:
    values = [each * scale for each in drawn(len(weights), seed=seed)]
    found = combine(rule, values, weights)
    assert bool(found.isfinite().all())
    assert float(found.abs().max()) <= max(float(each.norm()) for each in values) * (1 + 1e-4)
    assert torch.equal(found, combine(rule, values, weights)), "the same bits each time"
    torch.testing.assert_close(combine(rule, values, [2.0 * weight for weight in weights]), found, rtol=1e-4, atol=0)


def test_a_broken_rule_is_found_by_the_contract() -> None:
    class Forgetful(SendersMean):
        """A broken rule that keeps contributions although the next one overwrites them, and counts its calls."""

        calls = 0

        def combine(self, contributions: Iterable[tuple[float, Tensor]], tensors: Sequence[int]) -> Tensor:
            Forgetful.calls += 1
            return torch.stack([values for _, values in contributions]).mean(0) + Forgetful.calls

    check_average_rule(Rda())
    check_average_rule(SendersMean())
    with pytest.raises(ContractError, match="average Forgetful: equal contributions give different averages"):
        check_average_rule(Forgetful())


@pytest.mark.parametrize("rule", RULES)
def test_replicas_agree_and_go_on_from_a_checkpoint_with_a_round_in_flight(rule: AverageRule) -> None:
    def make() -> Swarm:
        return Swarm(3, SyncSchedule(inner_steps=4, overlap_steps=2), average=rule, codec="int8")

    whole, first, second = make(), make(), make()
    whole.run(12, quadratic())
    first.run(5, quadratic())
    second.resume_from(first)
    second.run(7, quadratic())
    for m in range(3):
        assert torch.equal(second.global_params(m), whole.global_params(0))
    plain = Swarm(3, SyncSchedule(inner_steps=4, overlap_steps=2), codec="int8")
    plain.run(12, quadratic())
    assert torch.equal(plain.global_params(0), whole.global_params(0)) == (rule == SendersMean())


@pytest.mark.parametrize("rule", RULES)
def test_converges_to_the_target_of_all(rule: AverageRule) -> None:
    swarm = Swarm(4, SyncSchedule(inner_steps=4), outer=Nesterov.of_gain(1.0, momentum=0.5), average=rule)
    swarm.run(200, quadratic(shared=True))
    generator = torch.Generator().manual_seed(0)
    target = torch.cat([torch.randn(p.shape, generator=generator).flatten() for p in swarm.models[0].parameters()])
    torch.testing.assert_close(swarm.global_params(0), target, atol=0.15, rtol=0)


def test_replicas_that_average_differently_are_refused() -> None:
    transport, models = InProcessTransport(2), [Vectors(), Vectors()]
    inner = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    DiLoCo(models[0], inner[0], transport=transport.endpoint(0), average=Rda())
    words = r"replica 0 has average = Rda\(\) and replica 1 has average = weighted mean"
    with pytest.raises(ConfigurationError, match=words):
        DiLoCo(models[1], inner[1], transport=transport.endpoint(1))


def test_whole_tensors_are_refused_where_ranks_share_them_out() -> None:
    model = Vectors()
    for parameter in model.parameters():
        parameter.to_local = lambda parameter=parameter: parameter  # type: ignore[attr-defined]  # as DTensors have it
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"Rda\(\) averages whole tensors, but first and 2 more parameters"):
        DiLoCo(model, inner, average=Rda())
    with pytest.raises(ConfigurationError, match=r"first and 2 more parameters are sharded over ranks.*\(ddp\)"):
        DiLoCo(model, inner, clipping=Clipping(max_norm=1.0))
    DiLoCo(model, inner, average=SendersMean())
