"""The contract of every codec, in every implementation, and what each of them states about itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.algorithm.codec import FP4, BFloat16, Codec, Float16, Float32, Int8, codec_names, make_codec, register
from diloco.algorithm.codec import native as native_kernels
from diloco.algorithm.codec.base import pieces
from diloco.errors import CodecError, ConfigurationError

BLOCK = 8
LARGEST = torch.finfo(torch.float32).max
TINY = torch.finfo(torch.float32).tiny

CODECS: dict[str, Callable[[], Codec]] = {
    "float32": Float32,
    "float16": Float16,
    "bfloat16": BFloat16,
    "int8": lambda: Int8(BLOCK, implementation="torch"),
    "fp4": lambda: FP4(BLOCK, implementation="torch"),
    "int8-built": lambda: Int8(BLOCK),
    "fp4-built": lambda: FP4(BLOCK),
}
"""The ones called "built" run the C kernels where a compiler was found, and torch elsewhere."""

PIECE = next(pieces(1 << 30, torch.device("cpu"), BLOCK))[1]
SIZES = [0, 1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3, PIECE, 2 * PIECE + BLOCK + 3]

finite_floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = st.lists(finite_floats, max_size=5 * BLOCK).map(lambda values: torch.tensor(values, dtype=torch.float32))


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> Codec:
    return CODECS[request.param]()


def spread_values(numel: int, seed: int = 0) -> Tensor:
    """Values of many magnitudes, with zeros of both signs, subnormals and the largest numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * torch.exp2(torch.randn(numel, generator=generator) * 8)
    corners = torch.tensor([0.0, -0.0, 1e-45, -1e-40, TINY, LARGEST, -LARGEST, 1.5, -0.75, 65519.0])
    values[::13] = corners.repeat(numel // (13 * len(corners)) + 1)[: len(values[::13])]
    return values


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def block_maxima(values: Tensor, block_size: int) -> Tensor:
    """For each value the largest magnitude of its block."""
    padded = torch.nn.functional.pad(values.abs(), (0, -len(values) % block_size))
    return padded.view(-1, block_size).amax(dim=1).repeat_interleave(block_size)[: len(values)]


def error_bound(codec: Codec, values: Tensor) -> Tensor:
    """What the docstrings promise, in float64."""
    magnitude = values.abs().double()
    if codec.name == "float32":
        return torch.zeros_like(magnitude)
    if codec.name == "float16":
        bound = (magnitude * 2.0**-11).where(magnitude >= 2.0**-14, 2.0**-25)
        return bound.where(magnitude <= 65504, magnitude - 65504)
    if codec.name == "bfloat16":
        return (magnitude * 2.0**-8).where(magnitude >= TINY, 2.0**-134)
    largest = block_maxima(values, BLOCK).double()
    if codec.name == "int8":
        scale = (largest.float() / 127).double()
        bound = (scale / 2 + 2.0**-22 * largest).where(scale >= TINY, largest)
        return bound.where(largest <= codec.saturation_limit, scale)
    exponent = torch.floor(torch.log2(largest.clamp(min=2.0**-149) / 0.75)).clamp(-120, 127)
    least = 0.75 / 64 * torch.exp2(exponent)
    bound = (magnitude / 3).where(magnitude >= least, least)
    return bound.where(magnitude <= codec.saturation_limit, magnitude - 2.0**127)


# ---- the contract ----------------------------------------------------------------------------------------------------


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
    with pytest.raises(CodecError, match="contiguous one of shape"):
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


# ---- both implementations of the block-wise codecs -------------------------------------------------------------------


def pairs_of_implementations(block_size: int) -> Iterator[tuple[Codec, Codec]]:
    for codec in (Int8, FP4):
        yield codec(block_size, implementation="torch"), codec(block_size)


def assert_same_bits_either_way(values: Tensor, block_size: int, weight: float) -> None:
    numel = len(values)
    for first, second in pairs_of_implementations(block_size):
        payload = first.encode(values)
        assert torch.equal(payload, second.encode(values))
        assert same_bits(first.decode(payload, numel), second.decode(payload, numel))
        sums = [spread_values(numel, seed=2), spread_values(numel, seed=2)]
        first.accumulate(payload, sums[0], weight)
        second.accumulate(payload, sums[1], weight)
        assert torch.equal(sums[0].isnan(), sums[1].isnan())
        assert same_bits(sums[0].nan_to_num(nan=0.5), sums[1].nan_to_num(nan=0.5))


@pytest.mark.parametrize("block_size", [2, 6, 8, 256, 65536])
@pytest.mark.parametrize("numel", [0, 1, 2, 7, 255, 256, 257, 70_001, (1 << 18) + 1])
def test_implementations_agree_bit_for_bit(block_size: int, numel: int) -> None:
    assert_same_bits_either_way(spread_values(numel), block_size, weight=0.3)


@settings(max_examples=200, deadline=None)
@given(values=vectors, weight=finite_floats)
def test_implementations_agree_bit_for_bit_on_any_values(values: Tensor, weight: float) -> None:
    assert_same_bits_either_way(values, BLOCK, weight)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_implementations_agree_on_payloads_that_no_encoder_writes(data: st.DataObject) -> None:
    numel = 2 * BLOCK + 3
    for first, second in pairs_of_implementations(BLOCK):
        size = first.payload_bytes(numel)
        payload = torch.tensor(list(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
        faults = [codec._find_fault(payload, numel) for codec in (first, second)]
        assert faults[0] == faults[1]
        if faults[0] is None:
            assert same_bits(first.decode(payload, numel), second.decode(payload, numel))


def test_the_implementation_that_runs_is_named() -> None:
    built = "native (C)" if native_kernels.available() else "torch"
    for first, second in pairs_of_implementations(BLOCK):
        assert first.implementation == "torch"
        assert second.implementation == built
    assert (native_kernels.unavailable_reason() is None) == native_kernels.available()


def test_native_is_never_replaced_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_kernels, "_library", lambda: (None, "there was no C compiler"))
    with pytest.raises(ConfigurationError, match=r"there was no C compiler\); 'torch' would work"):
        Int8(implementation="native")
    assert make_codec("fp4").implementation == "torch"


def test_kernels_of_another_version_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if not native_kernels.available():
        assert "no compiled _kernels" in str(native_kernels.unavailable_reason())
        return
    monkeypatch.setattr(native_kernels, "_VERSION", 0)
    library, reason = native_kernels._library.__wrapped__()
    assert library is None
    assert "install it again" in str(reason)


# ---- what each codec says of itself ----------------------------------------------------------------------------------


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


# ---- the table of codecs ---------------------------------------------------------------------------------------------


def test_every_codec_can_be_made_by_name() -> None:
    assert codec_names() == ("float32", "float16", "bfloat16", "fp4", "int8")
    for name in codec_names():
        codec = make_codec(name)
        assert codec.name == name
        assert dict(make_codec(name, **codec.parameters()).parameters()) == dict(codec.parameters())
    assert make_codec("fp4", block_size=64).parameters() == {"block_size": 64}


def test_an_unknown_codec_or_parameter_names_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"no codec 'bfloat'; did you mean 'bfloat16'\?"):
        make_codec("bfloat")
    with pytest.raises(ConfigurationError, match=r"no parameter 'blok_size'; did you mean 'block_size'\?"):
        make_codec("fp4", blok_size=64)
    with pytest.raises(ConfigurationError, match="'float16' has no parameter 'block_size'; it has none"):
        make_codec("float16", block_size=64)
    with pytest.raises(ConfigurationError, match="no parameter 'implementation'"):
        make_codec("int8", implementation=1)


@pytest.mark.parametrize("block_size", [0, -2, 1, 7, 65538, True, 8.0])
@pytest.mark.parametrize("name", ["int8", "fp4"])
def test_a_block_size_that_cannot_work_is_refused(name: str, block_size: int) -> None:
    with pytest.raises(ConfigurationError, match="would work"):
        make_codec(name, block_size=block_size)


def test_a_name_is_registered_once() -> None:
    class Impostor(Float32):
        name = "fp4"

    with pytest.raises(ConfigurationError, match="belongs to FP4 already"):
        register(Impostor)
    assert isinstance(make_codec("fp4"), FP4)
    assert register(FP4) is FP4
