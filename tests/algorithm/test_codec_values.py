"""Hand-computed values of each codec: sizes, rounding, saturation, and refused payloads."""

from __future__ import annotations

import math

import pytest
import torch

from diloco.algorithm import FP4, BFloat16, Float16, Float32, Int8, make_codec
from diloco.errors import CodecError, ConfigurationError
from tests.algorithm.codecs import LARGEST, PIECE, TINY, same_bits, spread_values


@pytest.mark.parametrize(
    ("name", "numel", "expected"),
    [
        ("float32", 1000, 4000),
        ("float16", 1000, 2000),
        ("bfloat16", 1000, 2000),
        ("int8", 1000, 1000 + 4 * 4),
        ("int8", 1024, 1024 + 4 * 4),
        ("int8", 1025, 1025 + 4 * 5),
        ("fp4", 1000, 500 + 4),
        ("fp4", 1024, 512 + 4),
        ("fp4", 1025, 513 + 5),
    ],
)
def test_payload_bytes_in_default_blocks(name: str, numel: int, expected: int) -> None:
    assert make_codec(name).payload_bytes(numel) == expected


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


def test_fp4_of_zeros_is_all_zero_codes() -> None:
    assert FP4(4).encode(torch.zeros(4)).tolist() == [7, 0, 0]


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
