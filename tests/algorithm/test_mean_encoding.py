"""Encoded means of ranges: as a whole against in parts, and which encoding a round has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.algorithm import PLAIN_MEAN, Float32, MeanEncoding, encode_mean, make_codec, plan_exchange, shard_bounds

CODECS = [("bfloat16", {}), ("int8", {"block_size": 8}), ("fp4", {"block_size": 8}), ("float32", {})]


def random_values(seed: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(CODECS), numel=st.integers(0, 100), owners=st.integers(1, 7), seed=st.integers(0, 9))
def test_owners_encode_what_one_would_encode_of_all_values(
    kind: tuple[str, dict[str, int]], numel: int, owners: int, seed: int
) -> None:
    """Property: for any number of owners, bits equal those of the whole, and the owner holds what others decode."""
    codec = make_codec(kind[0], **kind[1])
    values, expected = random_values(seed, numel), random_values(seed, numel)
    encode_mean(expected, codec)
    for start, stop in shard_bounds(numel, owners, codec.block_size):
        payload = encode_mean(values[start:stop], codec)
        assert payload.numel() == codec.payload_bytes(stop - start)
        assert torch.equal(codec.decode(payload, stop - start), values[start:stop])
    assert torch.equal(values, expected)


def test_an_exact_codec_changes_nothing_and_copies_nothing() -> None:
    values = random_values(0, 10)
    payload = encode_mean(values, PLAIN_MEAN.codec)
    assert payload.data_ptr() == values.data_ptr()
    assert torch.equal(values, random_values(0, 10))


def test_ranges_are_cut_between_the_blocks_of_both_codecs() -> None:
    mean = MeanEncoding(make_codec("fp4", block_size=4))
    plan = plan_exchange(make_codec("int8", block_size=6), 1000, 5, mean=mean)
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
def test_auto_is_int8_from_eight_replicas_on_where_contributions_are_coarse(
    num_replicas: int, bits: int, encoded: bool
) -> None:
    """The plan of a round, including its bytes, is that of the codec in effect."""
    chosen = make_codec("int8" if encoded else "float32")
    auto, plain = (
        plan_exchange(OfBits(bits), 5000, num_replicas, mean=mean)
        for mean in (MeanEncoding.of("auto"), MeanEncoding(chosen))
    )
    assert (auto.mean.codec.name, auto.mean.codec.parameters()) == (chosen.name, chosen.parameters())
    assert (auto.sent, auto.received) == (plain.sent, plain.received)
