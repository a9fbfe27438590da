"""The codecs in every implementation: error bounds, and values computed by hand. test_codec_contract tests the rest."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from diloco.algorithm import FP4, BFloat16, Codec, Float16, Float32, Int8, largest_magnitude, make_codec
from diloco.errors import CodecError, ConfigurationError
from tests.algorithm.codecs import (
    ACCURATE,
    BLOCK,
    LARGEST,
    PIECE,
    SIZES,
    TINY,
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


def test_casts_agree_with_torch_within_their_range() -> None:
    values = spread_values(10_000).clamp(-65504, 65504)
    for codec, wire_type in ((Float16(), torch.float16), (BFloat16(), torch.bfloat16)):
        assert same_bits(codec.decode(codec.encode(values), 10_000), values.to(wire_type).float())


@pytest.mark.parametrize(
    ("value", "expected"), [(65504.0, 65504.0), (65520.0, 65504.0), (-1e9, -65504.0), (65488.0, 65472.0)]
)
def test_float16_saturates(value: float, expected: float) -> None:
    codec = Float16()
    assert codec.decode(codec.encode(torch.tensor([value])), 1).item() == expected


def test_bfloat16_rounds_half_to_even_and_never_to_infinity() -> None:
    codec = BFloat16()
    values = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, LARGEST, -LARGEST])
    largest = torch.finfo(torch.bfloat16).max
    assert codec.decode(codec.encode(values), 4).tolist() == [1.0, 1 + 2.0**-6, largest, -largest]


@pytest.mark.parametrize("implementation", ["torch", None])
def test_int8_by_hand(implementation: None) -> None:
    codec = Int8(4, implementation=implementation)
    payload = codec.encode(torch.tensor([254.0, -254.0, 3.0, -1.0, 0.0, 0.0]))
    assert payload[:4].view(torch.float32).tolist() == [2.0]
    assert payload[4:8].view(torch.float32).tolist() == [0.0]
    assert payload[8:].view(torch.int8).tolist() == [127, -127, 2, 0, 0, 0]  # 1.5 -> 2 and -0.5 -> 0: half to even


@pytest.mark.parametrize("implementation", ["torch", None])
def test_int8_flushes_a_block_whose_scale_would_be_subnormal(implementation: None) -> None:
    codec = Int8(2, implementation=implementation)
    least = 127 * TINY
    values = torch.tensor([least, 0.0, least * (1 - 2.0**-22), 0.0])
    assert codec.decode(codec.encode(values), 4).tolist() == [least, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0, 1e-40, LARGEST / 127])
def test_int8_refuses_scales_that_no_encoder_writes(scale: float) -> None:
    codec = Int8(2)
    payload = codec.encode(torch.ones(4))
    payload[4:8] = torch.tensor([scale]).view(torch.uint8)
    with pytest.raises(CodecError, match=r"has the scale .* in block 1"):
        codec.validate(payload, 4)


@pytest.mark.parametrize("implementation", ["torch", None])
def test_fp4_by_hand(implementation: None) -> None:
    codec = FP4(8, implementation=implementation)
    values = torch.tensor([4.0, -2.9, 3.1, 0.047, 0.046, -1e-9, 0.0])
    payload = codec.encode(values)
    codes = [7, 8 | 6, 7, 1, 0, 8, 0]
    assert payload[0] == 127 + 2
    assert payload[1:].tolist() == [
        codes[0] | codes[4] << 4,
        codes[1] | codes[5] << 4,
        codes[2] | codes[6] << 4,
        codes[3],
    ]
    assert codec.decode(payload, 7).tolist() == [4.0, -2.0, 4.0, 0.0625, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("exponent", [0, 6, 255])
def test_fp4_refuses_exponents_that_no_encoder_writes(exponent: int) -> None:
    codec = FP4(2)
    payload = codec.encode(torch.ones(4))
    payload[1] = exponent
    with pytest.raises(CodecError, match=f"has the exponent {exponent} in block 1"):
        codec.validate(payload, 4)


def test_float_casts_name_the_first_bad_value() -> None:
    for codec, wire_type in ((Float32(), torch.float32), (Float16(), torch.float16), (BFloat16(), torch.bfloat16)):
        values = torch.zeros(PIECE + 5, dtype=wire_type)
        values[PIECE + 2] = -math.inf
        values[PIECE + 3] = math.nan
        with pytest.raises(CodecError, match=f"NaN or infinity at value {PIECE + 2}"):
            codec.validate(values.view(torch.uint8), PIECE + 5)


@pytest.mark.parametrize("block_size", [0, -2, 1, 7, 65538, True, 8.0])
@pytest.mark.parametrize("name", ["int8", "fp4"])
def test_a_block_size_that_cannot_work_is_refused(name: str, block_size: int) -> None:
    with pytest.raises(ConfigurationError, match=r"block_size must be"):
        make_codec(name, block_size=block_size)
