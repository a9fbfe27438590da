"""The codecs in every implementation: error bounds, values by hand, error feedback, and the contract and its check."""

import importlib.machinery
import math
import sys
from contextlib import suppress
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.algorithm import (
    FP4,
    Codec,
    Float32,
    Int8,
    Sign,
    TopK2,
    encode_with_feedback,
    largest_magnitude,
    make_codec,
    pieces,
)
from diloco.errors import CodecError, ConfigurationError, ContractError
from diloco.testing import check_codec, same_bits, spread_values
from tests.algorithm.codecs import (
    BLOCK,
    BOUNDED,
    COARSE,
    ERROR_AT_LIMIT,
    LARGEST,
    ONE_ZERO,
    OURS,
    SIZES,
    TINY,
    error_bound,
    finite_floats,
    vectors,
)


@pytest.fixture(params=BOUNDED)
def codec(request: pytest.FixtureRequest) -> Codec:
    return BOUNDED[request.param]()


def assert_round_trip(codec: Codec, values: Tensor) -> None:
    """Assert that values stay finite and within the stated bound."""
    payload = codec.encode(values)
    codec.validate(payload, values.numel())
    decoded = codec.decode(payload, values.numel())
    assert decoded.isfinite().all()
    assert ((decoded.double() - values.double()).abs() <= error_bound(codec, values)).all()


def test_round_trip_is_within_the_stated_bound(codec: Codec) -> None:
    for numel in SIZES:
        assert_round_trip(codec, spread_values(numel))


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=60)
@given(values=vectors)
def test_any_finite_values_stay_finite_and_within_the_stated_bound(name: str, values: Tensor) -> None:
    assert_round_trip(BOUNDED[name](), values)


def test_zeros_keep_their_sign_and_clamping_begins_at_the_saturation_limit(codec: Codec) -> None:
    zeros = torch.tensor([0.0, -0.0, 1.0])
    if codec.name == "sign":
        assert same_bits(codec.decode(codec.encode(zeros[:2]), 2), zeros[:2])
    elif codec.name not in ONE_ZERO:
        assert same_bits(codec.decode(codec.encode(zeros), 3)[:2], zeros[:2])
    if codec.name == "float32":
        assert codec.saturation_limit == math.inf
        return
    limit = torch.tensor([codec.saturation_limit])
    assert float(limit) == codec.saturation_limit  # a float32
    at_limit = codec.decode(codec.encode(limit), 1)
    beyond = codec.decode(codec.encode(limit * (1 + 2.0**-23)), 1)
    assert abs(float(at_limit) - codec.saturation_limit) <= ERROR_AT_LIMIT.get(codec.name, 0.0) * codec.saturation_limit
    assert same_bits(beyond, at_limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_seen_wherever_it_is(odd: float, dtype: torch.dtype) -> None:
    """In whole processor vectors and in the remainder; NaN wins over infinity."""
    for numel in (1, 7, 33, 257):
        for place in {0, 1, numel // 2, numel - 1} & set(range(numel)):
            values = torch.linspace(-3, 2, numel, dtype=dtype)
            values[place] = odd
            assert not math.isfinite(largest_magnitude(values))
            values[0] = math.inf
            assert math.isnan(largest_magnitude(values)) == (math.isnan(odd) and place > 0)
    rows = torch.linspace(-3, 2, 9000).view(3, -1)
    for values in (rows, rows.t(), rows[:, ::2], rows.flip(0).clone()[1:], rows.requires_grad_()):
        assert largest_magnitude(values) == values.abs().max()
    assert largest_magnitude(torch.empty(0, dtype=dtype)) == 0.0


@pytest.mark.parametrize("implementation", ["torch", None])
def test_int8_encodes_as_computed_by_hand(implementation: None) -> None:
    codec = Int8(4, implementation=implementation)
    payload = codec.encode(torch.tensor([254.0, -254.0, 3.0, -1.0, 0.0, 0.0]))
    assert payload[:8].view(torch.float32).tolist() == [2.0, 0.0]
    assert payload[8:].view(torch.int8).tolist() == [127, -127, 2, 0, 0, 0]  # 1.5 -> 2 and -0.5 -> 0: half to even
    least = 127 * TINY  # a smaller scale would be subnormal
    values = torch.tensor([least, 0.0, 0.0, 0.0, least * (1 - 2.0**-22), 0.0])
    assert codec.decode(codec.encode(values), 6).tolist() == [least, 0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("implementation", ["torch", None])
def test_fp4_encodes_as_computed_by_hand(implementation: None) -> None:
    codec = FP4(8, implementation=implementation)
    values = torch.tensor([4.0, -2.9, 3.1, 0.047, 0.046, -1e-9, 0.0])
    payload = codec.encode(values)
    codes = [7, 8 | 6, 7, 1, 0, 8, 0]
    assert payload[0] == 127 + 2
    assert payload[1:].tolist() == [low | high << 4 for low, high in zip(codes[:4], [*codes[4:], 0], strict=True)]
    assert codec.decode(payload, 7).tolist() == [4.0, -2.0, 4.0, 0.0625, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("implementation", ["torch", None])
def test_sign_encodes_as_computed_by_hand(implementation: None) -> None:
    codec = Sign(16, implementation=implementation)
    values = torch.tensor([1.0, -2.0, 0.0, -0.0, 5.0, -4.0, 1.0, 1.0, -4.0])  # strips of two
    payload = codec.encode(values)
    assert payload[:2].view(torch.bfloat16).item() == 2.0
    assert payload[2:].tolist() == [0b00010000, 0b00000111]
    assert codec.decode(payload, 9).tolist() == [2.0, -2.0, 2.0, -2.0, 2.0, -2.0, 2.0, 2.0, -2.0]


def assert_same_bits_either_way(first: Codec, second: Codec, values: Tensor, weight: float) -> None:
    numel = len(values)
    payload = first.encode(values)
    assert torch.equal(payload, second.encode(values))
    assert same_bits(first.decode(payload, numel), second.decode(payload, numel))
    sums = [spread_values(numel, seed=2), spread_values(numel, seed=2)]
    first.accumulate(payload, sums[0], weight)
    second.accumulate(payload, sums[1], weight)
    assert torch.equal(sums[0].isnan(), sums[1].isnan())
    assert same_bits(sums[0].nan_to_num(nan=0.5), sums[1].nan_to_num(nan=0.5))


@pytest.mark.parametrize("block_size", [2, 6, 8, 256, 65536])
def test_implementations_agree_bit_for_bit(block_size: int) -> None:
    kinds = (Int8, FP4, *[Sign] * (block_size % 8 == 0))
    for kind, numel in product(kinds, (0, 1, 2, 7, 255, 256, 257, 70_001, (1 << 18) + 1)):
        pair = kind(block_size, implementation="torch"), kind(block_size)
        assert_same_bits_either_way(*pair, spread_values(numel), weight=0.3)
        assert_same_bits_either_way(Float32(implementation="torch"), Float32(), spread_values(numel), weight=0.3)


@given(values=vectors, weight=finite_floats)
def test_implementations_agree_bit_for_bit_on_any_values(values: Tensor, weight: float) -> None:
    assert_same_bits_either_way(Float32(implementation="torch"), Float32(), values, weight)
    for kind in (Int8, FP4, Sign):
        assert_same_bits_either_way(kind(BLOCK, implementation="torch"), kind(BLOCK), values, weight)


def test_native_kernels_are_never_replaced_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    native = sys.modules["diloco.algorithm.codec.native"]
    monkeypatch.setattr(native, "_load_library", native._load_library.__wrapped__)  # as if nothing had been loaded yet
    monkeypatch.setattr(importlib.machinery, "EXTENSION_SUFFIXES", [".none"])
    assert make_codec("fp4").implementation == Int8(implementation="torch").implementation == "torch"
    words = r"has no compiled _kernels: there was no C compiler .* Use implementation='torch'"
    with pytest.raises(ConfigurationError, match=words):
        Int8(implementation="native")
    with pytest.raises(ConfigurationError, match="implementation must be 'torch' or 'native', got 'cuda'"):
        Int8(implementation="cuda")  # type: ignore[arg-type]  # on purpose


class Unbuilt(FP4):
    name = "unbuilt"


def test_a_blockwise_codec_without_a_kernel_computes_with_torch() -> None:
    codec, values = Unbuilt(BLOCK), spread_values(SIZES[-1])
    assert codec.implementation == "torch"
    assert same_bits(codec.encode(values), FP4(BLOCK).encode(values))
    check_codec(lambda: Unbuilt(BLOCK), sizes=[1, 3 * BLOCK + 1])
    with pytest.raises(ConfigurationError, match="unbuilt: the native implementation is not available"):
        Unbuilt(BLOCK, implementation="native")


TILE = 4096
TILE_PIECE = next(pieces(1 << 30, torch.device("cpu"), TILE))[1]
TILE_SIZES = [0, 1, 2, 3, 5, 8, 9, 63, 64, 65, 257, TILE - 1, TILE, TILE + 1, 3 * TILE + 70, TILE_PIECE + TILE + 5]


def reference(values: Tensor) -> Tensor:
    """Compute the documented result value by value in float64."""
    tiles = [reference_tile(tile) for tile in values.split(TILE) if len(tile)]
    return torch.tensor([value for tile in tiles for value in tile], dtype=torch.float64)


def reference_tile(tile: Tensor) -> list[float]:
    values = tile.tolist()
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))[: math.ceil(len(values) / 64)]
    sizes = [abs(values[i]) for i in order]
    mean = math.fsum(size / len(sizes) for size in sizes)
    decoded = [0.0] * len(values)
    for i in order:
        if max(sizes) >= 2.0**-100:
            alike = [size for size in sizes if (size > mean) == (abs(values[i]) > mean)]
            decoded[i] = math.copysign(math.fsum(size / len(alike) for size in alike), values[i])
    return decoded


@pytest.mark.parametrize("name", COARSE)
@pytest.mark.parametrize("numel", TILE_SIZES)
def test_it_decodes_to_what_its_docstring_says(name: str, numel: int) -> None:
    codec, values = COARSE[name](), torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    expected = reference(values)
    decoded = codec.decode(codec.encode(values), numel).double()
    # in float32 a value at the border between two codes may get either of them
    close = (decoded - expected).abs() <= 2.0**-7 * expected.abs() + 1e-12
    assert int((~close).sum()) <= numel // 1000
    assert ((decoded == 0) == (expected == 0)).all()


@pytest.mark.parametrize("name", COARSE)
@given(values=vectors)
def test_any_finite_values_stay_finite_and_keep_their_sign(name: str, values: Tensor) -> None:
    codec = COARSE[name]()
    payload = codec.encode(values)
    codec.validate(payload, len(values))
    decoded = codec.decode(payload, len(values))
    assert (decoded * values.sign() >= 0).all()
    assert largest_magnitude(decoded) <= 2.0 * largest_magnitude(values)  # false for NaN


@settings(max_examples=60)
@given(data=st.data())
def test_implementations_agree_bit_for_bit_of_topk2(data: st.DataObject) -> None:
    numel = data.draw(st.sampled_from(TILE_SIZES[:-1]) | st.integers(0, 3 * TILE))
    kind = data.draw(st.sampled_from(["spread", "equal", "few"]))
    values = spread_values(numel, seed=numel)
    if kind == "equal":
        values = values.sign()
    elif kind == "few":
        values = values.where(torch.arange(numel) % 97 == 0, torch.zeros(()))
    weight = data.draw(finite_floats.filter(lambda x: abs(x) < 1e30))
    assert_same_bits_either_way(TopK2(implementation="torch"), TopK2(), values, weight)


def scale(value: float, dtype: torch.dtype = torch.float32) -> tuple[int, ...]:
    return tuple(torch.tensor([value], dtype=dtype).view(torch.uint8).tolist())


NO_ENCODER_WRITES: tuple[tuple[Codec, int, int, tuple[int, ...], str], ...] = (
    *(
        (Int8(2), 4, 4, scale(x), "has the scale .* in block 1")
        for x in (math.nan, math.inf, -1.0, 1e-40, LARGEST / 127)
    ),
    *((FP4(2), 4, 1, (exponent,), f"has the scale {exponent} in block 1") for exponent in (0, 6, 255)),
    *(
        (Sign(8), 10, 2, scale(x, torch.bfloat16), "has the scale .* in block 1")
        for x in (math.nan, math.inf, -1.0, 1e-39)
    ),
    *((TopK2(), numel, 0, (0xC0, 0x7F), "in tile 0") for numel in (TILE, 300)),  # NaN
    (TopK2(), 300, 0, (0x80, 0x7F), "in tile 0"),  # infinity
    (TopK2(), 300, 0, (0x80, 0xBF), "in tile 0"),  # -1
    (TopK2(), 300, 2, (0x00, 0x00), "in tile 0"),  # high below low
    (TopK2(), 300, 4, (0xFF, 0xFF, 0xFF), "in tile 0"),  # positions out of order
    (TopK2(), 300, 4, (0x00, 0x00, 0x00), "in tile 0"),  # equal positions
    (TopK2(), 65, 6, (0xFF,), "in tile 0"),  # beyond a short tile: two kept, 3 bytes of positions and 1 of codes
    (TopK2(), 65, 7, (0xF0,), "in tile 0"),  # unused bits
)


@pytest.mark.parametrize(("codec", "numel", "at", "values", "words"), NO_ENCODER_WRITES)
def test_payloads_that_no_encoder_writes_are_refused(
    codec: Codec, numel: int, at: int, values: tuple[int, ...], words: str
) -> None:
    payload = codec.encode(torch.ones(numel))
    payload[at : at + len(values)] = torch.tensor(values, dtype=torch.uint8)
    with pytest.raises(CodecError, match=words):
        codec.validate(payload, numel)


@given(payload=st.binary(min_size=10, max_size=10))
def test_no_payload_of_the_right_size_does_harm(payload: bytes) -> None:
    codec, numel = TopK2(), 130
    assert codec.payload_bytes(numel) == 10
    bytes_ = torch.tensor(list(payload), dtype=torch.uint8)
    out = torch.zeros(numel + 1)
    with suppress(RuntimeError):  # of torch, without a compiled kernel
        codec.accumulate(bytes_, out[:numel])  # must not write outside of `out`, even without validation
    assert out[numel] == 0
    try:
        codec.validate(bytes_, numel)
    except CodecError:
        return
    assert codec.decode(bytes_, numel).isfinite().all()


@pytest.mark.parametrize("name", ["float16", "bfloat16", "int8", "fp4", "sign", "topk2"])
@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_one_round_by_the_equation(name: str, decay: float) -> None:
    codec, generator = make_codec(name), torch.Generator().manual_seed(0)
    values, residual = torch.randn(100, generator=generator), torch.randn(100, generator=generator)
    before = values.clone(), residual.clone()
    corrected = torch.add(values, residual, alpha=decay)
    payload, after = encode_with_feedback(codec, values, residual, decay)
    assert torch.equal(payload, codec.encode(corrected))
    assert torch.equal(after, corrected - codec.decode(payload, 100))
    assert torch.equal(values, before[0]), "they are left alone"
    assert torch.equal(residual, before[1]), "the caller decides which residual stays"
    waiting, tiny = torch.zeros(2), torch.tensor([100.0, 1e-3])  # the second is too small for fp4
    for _ in range(50):
        _, waiting = encode_with_feedback(make_codec("fp4", block_size=2), tiny, waiting, 0.5)
    assert float(waiting[1]) == pytest.approx(2e-3), "what waits decays"


ALL = BOUNDED | COARSE


@pytest.mark.parametrize("name", sorted({*OURS, *ALL}))
def test_every_codec_of_the_package_keeps_the_contract(name: str) -> None:
    assert name in ALL, f"add {name} to the table in tests/algorithm/codecs.py"
    block = ALL[name]().block_size
    check_codec(ALL[name], sizes=[*SIZES, block - 1, block, block + 1, 3 * block + 70])


def halved(values: Tensor) -> Tensor:
    return values.clamp(-65504, 65504).half().view(torch.uint8)


class Halves(Codec):
    """A codec that keeps the contract. Each codec in `BROKEN` breaks it in one place."""

    name = "halves"

    def payload_bytes(self, numel: int) -> int:
        return 2 * numel

    def _encode(self, values: Tensor, payload: Tensor) -> None:
        payload.copy_(halved(values))

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        out.copy_(payload.clone().view(torch.float16))


BROKEN: dict[str, dict[str, Any]] = {
    "two instances encode": {
        "__init__": lambda s: setattr(s, "offset", float(torch.rand(()))),
        "_encode": lambda s, v, p: p.copy_(halved(v + s.offset)),
    },
    "encoding them again gives different": {"_encode": lambda s, v, p: p.copy_(halved(v + torch.rand(()) - 0.5))},
    "encode changed them": {"_encode": lambda s, v, p: p.copy_(halved(v.add_(1).clamp_(-60000, 60000)))},
    "the payload shares their": {"payload_bytes": lambda s, n: 4 * n, "encode": lambda s, v: v.view(torch.uint8)},
    "leaves values unwritten": {"_decode": lambda s, p, o: o[1:].copy_(p.clone().view(torch.float16)[1:])},
    "with two roundings": {"_accumulate": lambda s, p, o, w: o.add_(s.decode(p, o.numel()).double() * w)},
    "at an odd address": {"_decode": lambda s, p, o: o.copy_((p.data_ptr() % 2) + p.clone().view(torch.float16))},
    "differs from the payload of these values": {"_cut": lambda s, p, n, start, stop: p[: 2 * (stop - start)]},
    "contains NaN or infinity": {"_encode": lambda s, v, p: p.copy_(v.half().view(torch.uint8))},
    "accepts bytes that decode to NaN": {"_find_fault": lambda s, p, n: None},
    "may only raise CodecError": {"_find_fault": lambda s, p, n: [None][Codec._find_fault(s, p, n) is not None]},
    "validate accepts a payload that is too short": {"_check_payload": lambda s, p, n: None},
    "decode writes to an `out`": {"_check_out": lambda s, p, n, o: None},
    "its name is not a string": {"name": 3},
    "block_size is 0": {"block_size": 0},
    "which replicas can't compare": {"parameters": lambda s: {"x": torch.zeros(1)}},
}


@pytest.mark.parametrize("words", BROKEN)
def test_what_is_not_kept_is_told(words: str) -> None:
    check_codec(Halves)
    with pytest.raises(ContractError, match=words):
        check_codec(type("Broken", (Halves,), BROKEN[words]))
