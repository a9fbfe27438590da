"""Encoded means of ranges: against NumPy, as a whole against in parts, and with residuals of earlier means."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from diloco.algorithm import (
    PLAIN_MEAN,
    Float32,
    MeanEncoding,
    Residual,
    collected,
    encode_all_means,
    encode_mean,
    lost_residual_note,
    make_codec,
    overlap,
    plan_exchange,
    shard_bounds,
)
from diloco.errors import ConfigurationError

LOSSY = [("bfloat16", {}), ("int8", {"block_size": 8}), ("fp4", {"block_size": 8})]
CPU = torch.device("cpu")


def encoding(name: str, parameters: dict[str, int], decay: float = 1.0) -> MeanEncoding:
    return MeanEncoding(make_codec(name, **parameters), decay)


def random_values(seed: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def e3m0(values: NDArray[np.float32], block_size: int) -> NDArray[np.float32]:
    """Return the values after fp4, computed from the formulas in its docstring."""

    def power(x: NDArray[np.float32]) -> NDArray[np.int64]:  # the nearest power of two, ties at 1.5 up, biased
        mantissa, exponent = np.frexp(x)
        rounded: NDArray[np.int64] = exponent - 1 + (mantissa >= 0.75) + 127
        return rounded

    out = np.zeros_like(values)
    for start in range(0, len(values), block_size):
        block = values[start : start + block_size]
        largest = np.clip(power(np.abs(block).max()), 7, 254)
        code = np.where(block == 0, 0, np.clip(power(np.abs(block)) - largest + 7, 0, 7))
        magnitude = np.where(code == 0, 0, np.exp2((largest - 127 - 7 + code).astype(np.float64)))
        out[start : start + block_size] = np.copysign(magnitude, block)
    return out


@pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
def test_rounds_of_fp4_means_agree_with_numpy(decay: float) -> None:
    numel, means = 61, encoding("fp4", {"block_size": 8}, decay)
    lost = np.zeros(numel, dtype=np.float32)
    residual = torch.zeros(numel) if decay else None
    for seed in range(20):
        values = random_values(seed, numel)
        corrected = values.numpy() + np.float32(decay) * lost
        expected = e3m0(corrected, 8)
        lost = corrected - expected
        _, residual = encode_mean(values, residual, means)
        np.testing.assert_array_equal(values.numpy(), expected)
        if residual is not None:
            np.testing.assert_array_equal(residual.numpy(), lost)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from([*LOSSY, ("float32", {})]),
    decay=st.sampled_from([0.0, 0.95, 1.0]),
    numel=st.integers(0, 100),
    owners=st.lists(st.integers(1, 7), min_size=1, max_size=4),
)
def test_owners_encode_what_one_would_encode_of_all_values(
    kind: tuple[str, dict[str, int]], decay: float, numel: int, owners: list[int]
) -> None:
    """Property: for any number of owners, across views, bits and residuals equal those of the whole."""
    means = encoding(*kind, decay)
    whole: list[Residual] = []
    held: list[Residual] = []
    for seed, count in enumerate(owners):
        shards = shard_bounds(numel, count, means.codec.block_size)
        values, expected = random_values(seed, numel), random_values(seed, numel)
        whole = list(encode_all_means(expected, whole, [(0, numel)], means))
        left = []
        for shard in shards:
            mine = collected(held, shard, CPU) if means.keeps_residual else None
            payload, residual = encode_mean(values[slice(*shard)], mine, means)
            assert payload.numel() == means.codec.payload_bytes(shard[1] - shard[0])
            assert torch.equal(means.codec.decode(payload, shard[1] - shard[0]), values[slice(*shard)]), (
                "the owner holds what the others decode"
            )
            left += [] if residual is None else [Residual(shard[0], residual)]
        held = left
        assert torch.equal(values, expected)
        assert torch.equal(collected(held, (0, numel), CPU), collected(whole, (0, numel), CPU))


@pytest.mark.parametrize("kind", LOSSY, ids=lambda kind: kind[0])
def test_what_was_sent_and_what_is_left_add_up_to_all_means(kind: tuple[str, dict[str, int]]) -> None:
    means, sent, total = encoding(*kind), torch.zeros(50, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)
    residual: Tensor | None = torch.zeros(50)
    for seed in range(50):
        values = random_values(seed, 50)
        total += values
        _, residual = encode_mean(values, residual, means)
        sent += values
    assert residual is not None
    torch.testing.assert_close(sent + residual, total, rtol=0, atol=50 * 2.0**-22)
    assert residual.abs().max() > 0


def test_what_is_too_small_for_its_block_gets_through_with_feedback_only() -> None:
    for decay, arrives in ((1.0, True), (0.0, False)):
        means, sent = encoding("fp4", {"block_size": 8}, decay), torch.zeros(2)
        residual = torch.zeros(2) if decay else None
        for _ in range(1000):
            values = torch.tensor([1.0, 0.001])
            _, residual = encode_mean(values, residual, means)
            sent += values
        assert bool(sent[1] > 0.9) == arrives


def test_an_exact_codec_changes_nothing_and_copies_nothing() -> None:
    values = random_values(0, 10)
    payload, residual = encode_mean(values, None, PLAIN_MEAN)
    assert payload.data_ptr() == values.data_ptr()
    assert torch.equal(values, random_values(0, 10))
    assert residual is None
    assert not MeanEncoding(decay=1.0).keeps_residual, "there is nothing to keep"


@settings(max_examples=100, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 30), min_size=2, max_size=6).map(sorted),
    value_range=st.lists(st.integers(0, 30), min_size=2, max_size=2).map(sorted),
)
def test_residuals_are_handed_over_whole(cuts: list[int], value_range: list[int]) -> None:
    """Property: each value of a residual reaches its next owner exactly once."""
    values = torch.arange(1.0, 31.0)
    held = [Residual(a, values[a:b]) for a, b in itertools.pairwise(cuts)]
    start, stop = value_range
    expected = torch.tensor([float(i + 1) if cuts[0] <= i < cuts[-1] else 0.0 for i in range(start, stop)])
    assert torch.equal(collected(held, (start, stop), CPU), expected)
    parts = [overlap(each.value_range, (start, stop)) for each in held]
    assert sum(b - a for a, b in parts) == len(set(range(start, stop)) & set(range(cuts[0], cuts[-1])))
    covered = cuts[-1] - cuts[0]
    words = lost_residual_note([each.value_range for each in held], 30)
    assert bool(words) == (0 < covered < 30)
    assert not words or f"of {30 - covered} of 30 values" in words


def test_stretches_are_cut_between_the_blocks_of_both_codecs() -> None:
    plan = plan_exchange(make_codec("int8", block_size=6), 1000, 5, mean=encoding("fp4", {"block_size": 4}))
    assert plan.pattern == "reduce-scatter"
    assert all(start % 12 == 0 for start, _ in plan.shards)


class OfBits(Float32):
    """A user-defined codec with a given number of bits per value, in blocks of four."""

    block_size = 4

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def payload_bytes(self, numel: int) -> int:
        return -(-numel * self.bits // 8)


@pytest.mark.parametrize(
    ("num_replicas", "bits", "encoded"), [(7, 4, False), (8, 4, True), (1000, 4, True), (8, 14, True), (8, 16, False)]
)
def test_by_itself_it_is_int8_from_eight_replicas_on_where_contributions_are_coarse(
    num_replicas: int, bits: int, encoded: bool
) -> None:
    """The plan of a round, including its bytes, is that of the codec in effect."""
    codec, chosen = OfBits(bits), make_codec("int8" if encoded else "float32")
    plans = [
        plan_exchange(codec, 5000, num_replicas, mean=mean)
        for mean in (MeanEncoding.of("auto", 1.0), MeanEncoding(chosen, 1.0))
    ]
    assert (plans[0].mean.codec.name, plans[0].mean.codec.parameters()) == (chosen.name, chosen.parameters())
    assert plans[0].sent == plans[1].sent
    assert plans[0].received == plans[1].received
    assert plans[0].keeps_residual == encoded


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_a_decay_out_of_range_is_refused(decay: float) -> None:
    with pytest.raises(ConfigurationError, match="the decay of the mean's error feedback"):
        MeanEncoding(make_codec("fp4"), decay)
