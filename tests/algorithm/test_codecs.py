"""The error bound of every codec in every implementation. test_codec_contract tests the rest of the contract."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from diloco.algorithm import Codec, Float32, largest_magnitude
from diloco.errors import CodecError
from tests.algorithm.codecs import (
    ACCURATE,
    BLOCK,
    LARGEST,
    SIZES,
    TINY,
    block_maxima,
    error_bound,
    same_bits,
    spread_values,
    vectors,
)


@pytest.fixture(params=ACCURATE)
def codec(request: pytest.FixtureRequest) -> Codec:
    return ACCURATE[request.param]()


@pytest.mark.parametrize("numel", SIZES)
def test_round_trip_is_within_the_stated_bound(codec: Codec, numel: int) -> None:
    values = spread_values(numel)
    payload = codec.encode(values)
    codec.validate(payload, numel)
    decoded = codec.decode(payload, numel)
    assert decoded.isfinite().all()
    assert ((decoded.double() - values.double()).abs() <= error_bound(codec, values)).all()


@pytest.mark.parametrize("name", ACCURATE)
@settings(max_examples=60, deadline=None)
@given(values=vectors)
def test_any_finite_values_stay_finite_and_within_the_stated_bound(name: str, values: Tensor) -> None:
    codec = ACCURATE[name]()
    payload = codec.encode(values)
    codec.validate(payload, values.numel())
    decoded = codec.decode(payload, values.numel())
    assert decoded.isfinite().all()
    assert ((decoded.double() - values.double()).abs() <= error_bound(codec, values)).all()


@pytest.mark.skipif(sys.platform != "linux", reason="memory is used again on Linux alone")
def test_large_tensors_take_the_memory_that_others_have_left_once_nothing_shares_it() -> None:
    codec, values = Float32(), spread_values((1 << 20) + 12_345)  # more than 4 MiB
    first = codec.encode(values)
    view, place = first[:1], first.data_ptr()
    del first
    second = codec.encode(values)
    assert second.data_ptr() != place
    del view
    third = codec.encode(-values)
    assert third.data_ptr() == place
    assert same_bits(codec.decode(second, len(values)), values)
    assert same_bits(codec.decode(third, len(values)), -values)


def test_a_second_round_trip_changes_nothing(codec: Codec) -> None:
    values = spread_values(1000).clamp(-1e4, 1e4)
    once = codec.decode(codec.encode(values), 1000)
    twice = codec.decode(codec.encode(once), 1000)
    bound = torch.zeros(1000) if codec.name != "int8" else 2.0**-22 * block_maxima(once, BLOCK)
    assert ((twice - once).abs() <= bound).all()


def test_parameters_of_a_model_are_encoded_and_accumulated_without_a_graph(codec: Codec) -> None:
    parameter = torch.nn.Parameter(torch.ones(BLOCK))
    payload = codec.encode(parameter)
    assert not codec.decode(payload, BLOCK).requires_grad
    codec.accumulate(payload, parameter)
    assert same_bits(parameter.detach(), torch.full((BLOCK,), 2.0))


def test_zeros_keep_their_sign(codec: Codec) -> None:
    values = torch.tensor([0.0, -0.0, 1.0])
    decoded = codec.decode(codec.encode(values), 3)
    assert decoded[0] == decoded[1] == 0
    if codec.name != "int8":  # two's complement has one zero
        assert same_bits(decoded[:2], values[:2])


@pytest.mark.parametrize("value", [0.0, -1e-45, 1e-39, TINY, -1.0, 3e4])
def test_a_constant_comes_back_within_the_bound(codec: Codec, value: float) -> None:
    values = torch.full((2 * BLOCK + 1,), value)
    decoded = codec.decode(codec.encode(values), len(values))
    assert ((decoded - values).abs() <= error_bound(codec, values)).all()
    assert (decoded == decoded[0]).all()


def test_the_largest_float32_is_clamped_not_overflowed(codec: Codec) -> None:
    values = torch.tensor([LARGEST, -LARGEST, 1.0])
    payload = codec.encode(values)
    codec.validate(payload, 3)
    decoded = codec.decode(payload, 3)
    assert decoded[0] == -decoded[1]
    assert decoded[0] <= LARGEST
    assert decoded[0] >= min(LARGEST / 2, codec.saturation_limit)


def test_saturation_limit_is_where_clamping_begins(codec: Codec) -> None:
    if codec.name == "float32":
        assert codec.saturation_limit == math.inf
        return
    limit = torch.tensor([codec.saturation_limit])
    assert float(limit) == codec.saturation_limit  # a float32
    at_limit = codec.decode(codec.encode(limit), 1)
    beyond = codec.decode(codec.encode(limit * (1 + 2.0**-23)), 1)
    relative_error = {"float16": 0.0, "bfloat16": 0.0, "int8": 2.0**-22, "fp4": 1 / 3}[codec.name]
    assert abs(float(at_limit) - codec.saturation_limit) <= relative_error * codec.saturation_limit
    assert same_bits(beyond, at_limit)


def test_bytes_that_are_no_payload_are_refused_by_validate(codec: Codec) -> None:
    numel = 2 * BLOCK + 1
    payload = torch.full((codec.payload_bytes(numel),), 0xFF, dtype=torch.uint8)
    with pytest.raises(CodecError, match="no encoder writes"):
        codec.validate(payload, numel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_seen_wherever_it_is(odd: float, dtype: torch.dtype) -> None:
    """Values are found in whole processor vectors and in the remainder; NaN wins over infinity."""
    for numel in (1, 7, 33, 257):
        for place in {0, 1, numel // 2, numel - 1} & set(range(numel)):
            values = torch.linspace(-3, 2, numel, dtype=dtype)
            values[place] = odd
            assert not math.isfinite(largest_magnitude(values))
            values[0] = math.inf
            assert math.isnan(largest_magnitude(values)) == (math.isnan(odd) and place > 0)
    assert largest_magnitude(torch.linspace(-3, 2, 257).view(1, -1)) == 3.0
    assert largest_magnitude(torch.empty(0, dtype=dtype)) == 0.0
