"""The contract of every codec, in every implementation."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.algorithm.codec import Codec, Float32
from diloco.errors import CodecError
from tests.algorithm.codecs import (
    BLOCK,
    CODECS,
    LARGEST,
    SIZES,
    TINY,
    block_maxima,
    error_bound,
    same_bits,
    spread_values,
    vectors,
)


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> Codec:
    return CODECS[request.param]()


@pytest.mark.parametrize("numel", SIZES)
def test_payload_has_the_stated_size_and_values_are_left_alone(codec: Codec, numel: int) -> None:
    values = spread_values(numel)
    before = values.clone()
    payload = codec.encode(values)
    assert payload.dtype == torch.uint8
    assert payload.shape == (codec.payload_bytes(numel),)
    assert same_bits(values, before)
    payload.fill_(255)
    assert same_bits(values, before)


@pytest.mark.parametrize("numel", SIZES)
def test_round_trip_is_within_the_stated_bound(codec: Codec, numel: int) -> None:
    values = spread_values(numel)
    payload = codec.encode(values)
    codec.validate(payload, numel)
    decoded = codec.decode(payload, numel)
    assert decoded.isfinite().all()
    assert ((decoded.double() - values.double()).abs() <= error_bound(codec, values)).all()


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=60, deadline=None)
@given(values=vectors)
def test_any_finite_values_stay_finite_and_within_the_stated_bound(name: str, values: Tensor) -> None:
    codec = CODECS[name]()
    payload = codec.encode(values)
    codec.validate(payload, values.numel())
    decoded = codec.decode(payload, values.numel())
    assert decoded.isfinite().all()
    assert ((decoded.double() - values.double()).abs() <= error_bound(codec, values)).all()


@pytest.mark.parametrize("numel", SIZES)
def test_accumulate_is_a_rounded_product_then_a_rounded_sum(codec: Codec, numel: int) -> None:
    payload = codec.encode(spread_values(numel).clamp(-1e30, 1e30))
    out = spread_values(numel, seed=1)
    expected = out + codec.decode(payload, numel) * 0.3  # two torch operations cannot be fused
    codec.accumulate(payload, out, 0.3)
    assert same_bits(out, expected)


def test_accumulate_adds_the_decoded_values_by_default(codec: Codec) -> None:
    payload = codec.encode(torch.tensor([1.0, -2.0, 0.5]))
    out = torch.tensor([1.0, 1.0, 1.0])
    codec.accumulate(payload, out)
    assert same_bits(out, 1 + codec.decode(payload, 3))


@pytest.mark.parametrize("numel", SIZES)
def test_decode_writes_every_value_of_out_and_returns_it(codec: Codec, numel: int) -> None:
    payload = codec.encode(spread_values(numel))
    out = torch.full((numel,), math.nan)
    assert codec.decode(payload, numel, out) is out
    assert same_bits(out, codec.decode(payload, numel))


def test_tensors_large_enough_for_huge_pages_are_whole() -> None:
    numel = (1 << 20) + 12_345  # more than 4 MiB of float32
    values = spread_values(numel)
    assert same_bits(Float32().decode(Float32().encode(values), numel), values)


def test_encoding_is_deterministic_and_does_not_depend_on_the_instance(
    codec: Codec, request: pytest.FixtureRequest
) -> None:
    values = spread_values(1000)
    other = CODECS[request.node.callspec.params["codec"]]()
    assert torch.equal(codec.encode(values), other.encode(values))
    assert torch.equal(codec.encode(values), codec.encode(values))


def test_a_second_round_trip_changes_nothing(codec: Codec) -> None:
    values = spread_values(1000).clamp(-1e4, 1e4)
    once = codec.decode(codec.encode(values), 1000)
    twice = codec.decode(codec.encode(once), 1000)
    bound = torch.zeros(1000) if codec.name != "int8" else 2.0**-22 * block_maxima(once, BLOCK)
    assert ((twice - once).abs() <= bound).all()


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_a_payload_cut_from_a_larger_message_decodes_alike(codec: Codec, offset: int) -> None:
    values = spread_values(5 * BLOCK + 3)
    payload = codec.encode(values)
    message = torch.cat([torch.zeros(offset, dtype=torch.uint8), payload])
    codec.validate(message[offset:], len(values))
    assert same_bits(codec.decode(message[offset:], len(values)), codec.decode(payload, len(values)))
    out = torch.ones(len(values))
    codec.accumulate(message[offset:], out)
    assert same_bits(out, 1 + codec.decode(payload, len(values)))


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


@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.zeros(2, 3),
        torch.zeros(6)[::2],
        torch.tensor(1.0),
    ],
    ids=["float64", "bfloat16", "matrix", "strided", "scalar"],
)
def test_encode_refuses_what_is_not_a_flat_float32_vector(codec: Codec, values: Tensor) -> None:
    with pytest.raises(CodecError, match="it must be contiguous, of shape"):
        codec.encode(values)


def malformed_payloads(good: Tensor) -> Iterator[Tensor]:
    yield good[:-1]
    yield torch.cat([good, good[:1]])
    yield good[:0]
    yield good.view(torch.int8)
    yield good.unsqueeze(0)
    yield good.repeat_interleave(2)[::2]


@pytest.mark.parametrize("case", range(6), ids=["short", "long", "empty", "int8", "matrix", "strided"])
def test_a_malformed_payload_is_refused_before_anything_is_written(codec: Codec, case: int) -> None:
    payload = list(malformed_payloads(codec.encode(torch.ones(BLOCK + 1))))[case]
    out = torch.full((BLOCK + 1,), 7.0)
    with pytest.raises(CodecError, match="refused"):
        codec.validate(payload, BLOCK + 1)
    with pytest.raises(CodecError, match="refused"):
        codec.decode(payload, BLOCK + 1, out)
    with pytest.raises(CodecError, match="refused"):
        codec.accumulate(payload, out)
    assert (out == 7).all()


@pytest.mark.parametrize(
    "out",
    [torch.zeros(4), torch.zeros(3, dtype=torch.float64), torch.zeros(6)[::2], torch.zeros(3, device="meta")],
    ids=["long", "float64", "strided", "elsewhere"],
)
def test_decode_refuses_an_out_that_does_not_fit(codec: Codec, out: Tensor) -> None:
    payload = codec.encode(torch.ones(3))
    with pytest.raises(CodecError, match="cannot decode"):
        codec.decode(payload, 3, out)


def test_bytes_that_are_no_payload_are_refused_by_validate(codec: Codec) -> None:
    numel = 2 * BLOCK + 1
    payload = torch.full((codec.payload_bytes(numel),), 0xFF, dtype=torch.uint8)
    with pytest.raises(CodecError, match="no encoder writes"):
        codec.validate(payload, numel)


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_whatever_validate_lets_pass_decodes_to_finite_values(name: str, data: st.DataObject) -> None:
    codec, numel = CODECS[name](), BLOCK + 3
    size = codec.payload_bytes(numel)
    payload = torch.tensor(list(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    try:
        codec.validate(payload, numel)
    except CodecError:
        return
    assert codec.decode(payload, numel).isfinite().all()
