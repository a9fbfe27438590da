"""Merge rules: their equations, exact at both ends, and the unsent work of an excluded replica."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.algorithm import AlphaMerge, MergeRule, RebaseMerge, carry_over
from diloco.testing import check_merge_rule

EPSILON = 2.0**-23
"""The relative spacing of float32, twice the error of one rounding."""


def draw(seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(1000, generator=torch.Generator().manual_seed(seed))


@st.composite
def vectors(draw_one: st.DrawFn, count: int) -> list[Tensor]:
    size = draw_one(st.integers(1, 6))
    numbers = st.lists(st.floats(-1e4, 1e4, width=32), min_size=size, max_size=size)
    return [torch.tensor(draw_one(numbers)) for _ in range(count)]


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_alpha_is_the_papers_equation(alpha: float) -> None:
    """Compare Algorithm 2, line 12, with float64."""
    local, global_params = draw(0), draw(1)
    expected = alpha * local.double() + (1 - alpha) * global_params.double()
    merged = local.clone()
    AlphaMerge(alpha).merge(merged, global_params, None)
    bound = EPSILON * (local.abs() + global_params.abs()).double()
    assert bool(((merged.double() - expected).abs() <= bound).all())


def test_the_ends_of_alpha_are_exact() -> None:
    """alpha = 0 gives the global parameters and alpha = 1 the local ones, for any magnitudes."""
    local, global_params = draw(0, 1e20), draw(1, 1e-20)
    for alpha, expected in ((0.0, global_params), (1.0, local)):
        merged = local.clone()
        AlphaMerge(alpha).merge(merged, global_params, None)
        assert torch.equal(merged, expected)


@settings(deadline=None)
@given(vectors(3))
def test_rebase_keeps_the_drift_of_the_overlapped_steps(three: list[Tensor]) -> None:
    """Property: local - global after the merge equals local - sent before, up to the rounding of three operations."""
    local, global_params, sent = three
    merged = local.clone()
    RebaseMerge().merge(merged, global_params, sent)
    expected = global_params.double() + (local.double() - sent.double())
    scale = local.abs() + global_params.abs() + sent.abs()
    assert bool(((merged.double() - expected).abs() <= EPSILON * scale).all())


def test_rebase_without_drift_takes_the_global_bits() -> None:
    """Invariant 13: with tau = 0 both rules are equal."""
    sent, global_params = draw(0), draw(1)
    merged = sent.clone()
    RebaseMerge().merge(merged, global_params, sent)
    assert torch.equal(merged, global_params)


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
    before, after = old.double() - local.double(), new.double() - moved.double()
    scale = local.abs() + old.abs() + new.abs()
    assert bool(((before - after).abs() <= EPSILON * scale).all())
