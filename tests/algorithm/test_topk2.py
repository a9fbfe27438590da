"""The codec topk2, which keeps the 64 largest of each 4096 values in two bits each, against a reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.algorithm import TopK2, pieces
from diloco.errors import CodecError
from tests.algorithm.codecs import COARSE, finite_floats, same_bits, spread_values, vectors

TILE = 4096
PIECE = next(pieces(1 << 30, torch.device("cpu"), TILE))[1]
SIZES = [0, 1, 2, 3, 5, 8, 9, 63, 64, 65, 257, TILE - 1, TILE, TILE + 1, 3 * TILE + 70, PIECE + TILE + 5]
any_codec = pytest.mark.parametrize("name", COARSE)


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


@any_codec
@pytest.mark.parametrize("numel", SIZES)
def test_it_decodes_to_what_its_docstring_says(name: str, numel: int) -> None:
    codec, values = COARSE[name](), torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    before = values.clone()
    payload = codec.encode(values)
    assert same_bits(values, before)
    assert payload.shape == (codec.payload_bytes(numel),)
    codec.validate(payload, numel)
    expected = reference(values)
    decoded = codec.decode(payload, numel).double()
    # in float32 a value at the border between two codes may get either of them
    close = (decoded - expected).abs() <= 2.0**-7 * expected.abs() + 1e-12
    assert int((~close).sum()) <= numel // 1000
    assert ((decoded == 0) == (expected == 0)).all()


@any_codec
@settings(max_examples=100, deadline=None)
@given(values=vectors)
def test_any_finite_values_stay_finite_and_keep_their_sign(name: str, values: Tensor) -> None:
    codec = COARSE[name]()
    payload = codec.encode(values)
    codec.validate(payload, len(values))
    decoded = codec.decode(payload, len(values))
    assert decoded.isfinite().all()
    assert (decoded * values.sign() >= 0).all()
    assert float(decoded.abs().max() if len(values) else 0.0) <= 2.0 * float(values.abs().max() if len(values) else 0.0)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_implementations_agree_bit_for_bit(data: st.DataObject) -> None:
    first, second = TopK2(implementation="torch"), TopK2()
    numel = data.draw(st.sampled_from(SIZES[:-1]) | st.integers(0, 3 * TILE))
    kind = data.draw(st.sampled_from(["spread", "equal", "few"]))
    values = spread_values(numel, seed=numel)
    if kind == "equal":
        values = values.sign()
    elif kind == "few":
        values = values.where(torch.arange(numel) % 97 == 0, torch.zeros(()))
    weight = data.draw(finite_floats.filter(lambda x: abs(x) < 1e30))
    payload = first.encode(values)
    assert torch.equal(payload, second.encode(values))
    assert same_bits(first.decode(payload, numel), second.decode(payload, numel))
    sums = [torch.ones(numel), torch.ones(numel)]
    first.accumulate(payload, sums[0], weight)
    second.accumulate(payload, sums[1], weight)
    assert same_bits(*sums)


def tampered(payload: Tensor, at: int, *values: int) -> Tensor:
    payload = payload.clone()
    payload[at : at + len(values)] = torch.tensor(values, dtype=torch.uint8)
    return payload


@pytest.mark.parametrize(
    ("at", "values"),
    [
        (0, (0xC0, 0x7F)),  # NaN
        (0, (0x80, 0x7F)),  # infinity
        (0, (0x80, 0xBF)),  # -1
        (2, (0x00, 0x00)),  # high below low
        (4, (0xFF, 0xFF, 0xFF)),  # positions out of order
        (4, (0x00, 0x00, 0x00)),  # equal positions
    ],
)
@pytest.mark.parametrize("numel", [TILE, 300])
def test_sparse_payloads_that_no_encoder_writes_are_refused(at: int, values: tuple[int, ...], numel: int) -> None:
    codec = TopK2()
    good = codec.encode(torch.randn(numel, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(CodecError, match="out of order or out of range in tile 0"):
        codec.validate(tampered(good, at, *values), numel)


def test_positions_beyond_a_short_tile_and_unused_bits_are_refused() -> None:
    codec = TopK2()
    good = codec.encode(torch.ones(65))  # two kept: 3 bytes of positions, 1 of codes
    for bad in (tampered(good, 6, 0xFF), tampered(good, 7, 0xF0)):
        with pytest.raises(CodecError, match="in tile 0"):
            codec.validate(bad, 65)


@settings(max_examples=100, deadline=None)
@given(payload=st.binary(min_size=10, max_size=10))
def test_no_payload_of_the_right_size_does_harm(payload: bytes) -> None:
    codec, numel = TopK2(), 130
    assert codec.payload_bytes(numel) == 10
    bytes_ = torch.tensor(list(payload), dtype=torch.uint8)
    out = torch.zeros(numel + 1)
    codec.accumulate(bytes_, out[:numel])  # must not write outside of `out`, even without validation
    assert out[numel] == 0
    try:
        codec.validate(bytes_, numel)
    except CodecError:
        return
    assert codec.decode(bytes_, numel).isfinite().all()
