"""Average rules: the mean over senders against its formula, a rule of one's own, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco import ConfigurationError, ContractError, DiLoCo, InProcessTransport, SendersMean, SyncSchedule
from diloco.testing import check_average_rule
from tests.replicas import Swarm, Vectors, quadratic


def drawn(count: int, numel: int = 40, *, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for _ in range(count)]


def senders(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return SendersMean().combine(zip(weights, values, strict=True), [len(values[0])])


class Lengthened:
    """A rule of one's own that needs whole tensors: the mean, as long as the longest contribution."""

    elementwise = False

    def combine(self, contributions: Iterable[tuple[float, Tensor]], tensors: Sequence[int]) -> Tensor:
        longest, total = torch.zeros(len(tensors)), torch.zeros(sum(tensors))
        for weight, values in contributions:
            total += weight * values
            norms = torch.stack([part.norm() for part in torch.split(values, list(tensors))])
            longest = torch.maximum(longest, norms)
        for length, part in zip(longest, torch.split(total, list(tensors)), strict=True):
            part.mul_(length / part.norm().clamp(min=1e-20))
        return total


def test_the_mean_over_senders_divides_by_the_weights_of_those_who_sent_the_value() -> None:
    values = [torch.tensor([2.0, 0.0, -1.0, 0.0]), torch.tensor([0.0, 0.0, 3.0, 8.0])]
    assert senders(values, [3.0, 1.0]).tolist() == [2.0, 0.0, 0.0, 8.0]  # (3 * -1 + 1 * 3) / 4


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=7),
    scale=st.floats(1e-15, 1e15),
)
def test_the_mean_over_senders_is_the_mean_where_all_send_everything(
    seed: int, weights: list[float], scale: float
) -> None:
    values = [each * scale for each in drawn(len(weights), seed=seed)]
    expected = sum(w * each.double() for w, each in zip(weights, values, strict=True)) / sum(weights)
    torch.testing.assert_close(senders(values, weights).double(), expected, rtol=1e-4, atol=1e-6 * scale)


def test_a_broken_rule_is_found_by_the_contract() -> None:
    class Forgetful(SendersMean):
        """A broken rule that keeps contributions although the next one overwrites them, and counts its calls."""

        calls = 0

        def combine(self, contributions: Iterable[tuple[float, Tensor]], tensors: Sequence[int]) -> Tensor:
            Forgetful.calls += 1
            return torch.stack([values for _, values in contributions]).mean(0) + Forgetful.calls

    check_average_rule(Lengthened())
    check_average_rule(SendersMean())
    with pytest.raises(ContractError, match="average Forgetful: equal contributions give different averages"):
        check_average_rule(Forgetful())


@pytest.mark.parametrize("rule", [SendersMean(), Lengthened()])
def test_replicas_agree_and_go_on_from_a_checkpoint_with_a_round_in_flight(rule: SendersMean | Lengthened) -> None:
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
    assert torch.equal(plain.global_params(0), whole.global_params(0)) == isinstance(rule, SendersMean)


def test_replicas_that_average_differently_are_refused() -> None:
    transport, models = InProcessTransport(2), [Vectors(), Vectors()]
    inner = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    DiLoCo(models[0], inner[0], transport=transport.endpoint(0), average=SendersMean())
    words = r"replica 0 has average = SendersMean\(\) and replica 1 has average = weighted mean"
    with pytest.raises(ConfigurationError, match=words):
        DiLoCo(models[1], inner[1], transport=transport.endpoint(1))


def test_whole_tensors_are_refused_where_ranks_share_them_out() -> None:
    model = Vectors()
    for parameter in model.parameters():
        parameter.to_local = lambda parameter=parameter: parameter  # type: ignore[attr-defined]  # as DTensors have it
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"Lengthened\(\) averages whole tensors, but first and 2 more"):
        DiLoCo(model, inner, average=Lengthened())
    with pytest.raises(ConfigurationError, match=r"first and 2 more parameters are sharded over ranks.*\(ddp\)"):
        DiLoCo(model, inner, max_norm=1.0)
    DiLoCo(model, inner, average=SendersMean())
