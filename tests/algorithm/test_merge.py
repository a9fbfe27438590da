"""Merge rules, their equations and the unsent work of an excluded replica; buffers to flat vectors and back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from diloco.algorithm import AlphaMerge, MergeRule, RebaseMerge, carry_over, collect_buffers, restore_buffers_
from diloco.testing import check_merge_rule

EPSILON = 2.0**-23
"""The relative spacing of float32, twice the error of one rounding."""


@st.composite
def vectors(draw_one: st.DrawFn, count: int) -> list[Tensor]:
    size = draw_one(st.integers(1, 6))
    numbers = st.lists(st.floats(-1e4, 1e4, width=32), min_size=size, max_size=size)
    return [torch.tensor(draw_one(numbers)) for _ in range(count)]


def near(values: Tensor, expected: Tensor, *terms: Tensor) -> bool:
    """Return whether values differ by no more than the rounding of the terms."""
    scale = torch.stack(terms).abs().sum(0).double()
    return bool(((values.double() - expected).abs() <= EPSILON * scale + 2.0**-148).all())  # or of subnormals


@settings(deadline=None)
@given(vectors(2), st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
def test_alpha_is_the_papers_equation_and_exact_at_its_ends(two: list[Tensor], alpha: float) -> None:
    """Compare Algorithm 2, line 12, with float64."""
    local, global_params = two
    merged = local.clone()
    AlphaMerge(alpha).merge(merged, global_params, None)
    assert near(merged, alpha * local.double() + (1 - alpha) * global_params.double(), local, global_params)
    if alpha in (0.0, 1.0):
        assert torch.equal(merged, local if alpha else global_params)


@settings(deadline=None)
@given(vectors(3))
def test_rebase_keeps_the_drift_of_the_overlapped_steps(three: list[Tensor]) -> None:
    """Property: local - global after the merge equals local - sent before. Without drift, it takes the global bits."""
    local, global_params, sent = three
    merged, resting = local.clone(), sent.clone()
    RebaseMerge().merge(merged, global_params, sent)
    RebaseMerge().merge(resting, global_params, sent)
    assert near(merged, global_params.double() + (local.double() - sent.double()), local, global_params, sent)
    assert torch.equal(resting, global_params)


@pytest.mark.parametrize(("rule", "keeps"), [(AlphaMerge(0.5), False), (RebaseMerge(), True)])
def test_ours_keep_the_contract(rule: MergeRule, keeps: bool) -> None:
    assert rule.keeps_sent is keeps
    check_merge_rule(rule)


@settings(deadline=None)
@given(vectors(3))
def test_carry_over_keeps_the_pseudo_gradient(three: list[Tensor]) -> None:
    """Property: none of a replica's unsent work is lost, except by rounding."""
    local, old, new = three
    moved = local.clone()
    carry_over(moved, old, new)
    assert near(moved, new.double() - (old.double() - local.double()), local, old, new)


VALUES: dict[str, Tensor] = {
    "float32_values": torch.tensor([[1.5, -0.1], [1e-30, 3e38]]),
    "float16_values": torch.tensor([0.1, 65504.0], dtype=torch.float16),
    "bfloat16_values": torch.tensor([0.1, 3e38], dtype=torch.bfloat16),
    "int64_values": torch.tensor([2**62 + 1, -1]),
    "int16_values": torch.tensor([-3, 300], dtype=torch.int16),
    "bool_values": torch.tensor([True, False, True]),
    "int32_values": torch.tensor([[2**31 - 1], [-(2**31)]], dtype=torch.int32),  # after an odd number of bytes
    "scalar": torch.tensor(2.5),
    "count": torch.tensor(7),
    "flag": torch.tensor(True),
    "nothing": torch.empty(0, 3),
    "no_integers": torch.empty(0, dtype=torch.int64),
}


def holder(values: dict[str, Tensor], *, fill: int | None = None) -> nn.Module:
    module = nn.Module()
    for name, value in values.items():
        module.register_buffer(name, value.clone() if fill is None else torch.full_like(value, fill))
    return module


@pytest.mark.parametrize("name", [*VALUES, "all of them"])
def test_what_is_collected_is_a_copy_and_is_restored(name: str) -> None:
    """The buffers keep changing while the contribution is in flight; derived ones are left alone."""
    values = dict(VALUES) if name == "all of them" else {name: VALUES[name]}
    source, target = holder(values), holder(values, fill=1)
    target.register_buffer("table", torch.ones(3), persistent=False)
    target.register_buffer("cos", torch.ones(2, dtype=torch.complex64), persistent=False)
    floats, integers = collect_buffers(source)
    for buffer in source.buffers():
        buffer.fill_(0)
    restore_buffers_(target, floats, integers)
    for each, value in values.items():
        restored = target.get_buffer(each)
        assert torch.equal(restored, value)
        assert (restored.dtype, restored.shape) == (value.dtype, value.shape)
    assert target.get_buffer("table").tolist() == [1, 1, 1]
