"""A payload cut between blocks: its stretches are what would have been encoded alone, and add up to the whole."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.algorithm.codec import Codec, codec_names, make_codec
from diloco.algorithm.exchange import shard_bounds
from diloco.errors import CodecError
from tests.algorithm.codecs import BLOCK, COARSE, CODECS, PIECE, same_bits, spread_values, vectors


def refused(codec: Codec, payload: Tensor, numel: int) -> bool:
    try:
        codec.validate(payload, numel)
    except CodecError:
        return True
    return False


@st.composite
def stretches(draw: st.DrawFn, block_size: int, numel: int) -> list[tuple[int, int]]:
    """Stretches that follow each other and together are all values; some may be empty."""
    blocks = -(-numel // block_size)
    inner = draw(st.lists(st.integers(0, numel // block_size), max_size=4).map(sorted))
    cuts = [block * block_size for block in [0, *inner]] + [blocks and numel]
    return list(pairwise(cuts))


@pytest.mark.parametrize("name", codec_names())
def test_every_registered_codec_is_tried_in_every_implementation(name: str) -> None:
    assert name in CODECS | COARSE


def test_block_size_is_what_the_codec_says_it_is() -> None:
    sizes = {name: make().block_size for name, make in CODECS.items()}
    assert {name for name, size in sizes.items() if size == 1} == {"float32", "float16", "bfloat16"}
    assert {size for size in sizes.values() if size != 1} == {BLOCK}
    assert make_codec("fp4", block_size=64).block_size == 64


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=80, deadline=None)
@given(values=vectors, data=st.data())
def test_a_cut_is_the_payload_of_its_stretch(name: str, values: Tensor, data: st.DataObject) -> None:
    codec, numel = CODECS[name](), len(values)
    payload = codec.encode(values)
    for start, stop in data.draw(stretches(codec.block_size, numel)):
        part = codec.cut(payload, numel, start, stop)
        codec.validate(part, stop - start)
        assert part.is_contiguous()
        assert torch.equal(part, codec.encode(values[start:stop]))


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=80, deadline=None)
@given(values=vectors, weight=st.floats(2**-6, 64, width=32), data=st.data())
def test_stretches_accumulate_to_the_bits_of_the_whole(
    name: str, values: Tensor, weight: float, data: st.DataObject
) -> None:
    codec, numel = CODECS[name](), len(values)
    payload = codec.encode(values.clamp(-1e30, 1e30))
    whole, by_stretch = spread_values(numel, seed=1), spread_values(numel, seed=1)
    codec.accumulate(payload, whole, weight)
    for start, stop in data.draw(stretches(codec.block_size, numel)):
        codec.accumulate(codec.cut(payload, numel, start, stop), by_stretch[start:stop], weight)
    assert same_bits(whole, by_stretch)


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_whatever_bytes_arrive_the_stretch_with_the_fault_is_refused(name: str, data: st.DataObject) -> None:
    codec, numel = CODECS[name](), data.draw(st.integers(0, 2 * BLOCK + 3))
    size = codec.payload_bytes(numel)
    payload = torch.tensor(list(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    parts = [(codec.cut(payload, numel, a, b), b - a) for a, b in data.draw(stretches(codec.block_size, numel))]
    assert refused(codec, payload, numel) == any(refused(codec, part, length) for part, length in parts)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_shards_of_a_payload_of_several_pieces(name: str, num_replicas: int) -> None:
    codec, numel = CODECS[name](), 2 * PIECE + BLOCK + 3
    values = spread_values(numel)
    payload = codec.encode(values)
    decoded = torch.empty(numel)
    for start, stop in shard_bounds(numel, num_replicas, codec.block_size):
        part = codec.cut(payload, numel, start, stop)
        assert torch.equal(part, codec.encode(values[start:stop]))
        codec.decode(part, stop - start, decoded[start:stop])
    assert same_bits(decoded, codec.decode(payload, numel))


@pytest.mark.parametrize("name", CODECS)
def test_no_values_are_no_bytes(name: str) -> None:
    codec, values = CODECS[name](), spread_values(2 * BLOCK)
    payload = codec.encode(values)
    for start in (0, BLOCK, 2 * BLOCK):
        empty = codec.cut(payload, 2 * BLOCK, start, start)
        assert empty.shape == (codec.payload_bytes(0),) == (0,)
        codec.validate(empty, 0)
        codec.accumulate(empty, values[start:start])
    assert same_bits(values, spread_values(2 * BLOCK))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bounds", [(-BLOCK, BLOCK), (BLOCK, 0), (0, 4 * BLOCK), (4 * BLOCK, 4 * BLOCK)])
def test_cuts_outside_the_payload_are_refused(name: str, bounds: tuple[int, int]) -> None:
    codec, numel = CODECS[name](), 2 * BLOCK + 3
    with pytest.raises(CodecError, match=rf"{codec.name} cannot cut values .* out of {numel}; .* Nothing was cut"):
        codec.cut(codec.encode(spread_values(numel)), numel, *bounds)


@pytest.mark.parametrize("name", [name for name, make in CODECS.items() if make().block_size > 1])
@pytest.mark.parametrize("bounds", [(2, BLOCK), (0, BLOCK - 1), (BLOCK, 2 * BLOCK + 2), (2 * BLOCK + 3, 2 * BLOCK + 3)])
def test_cuts_through_a_block_are_refused(name: str, bounds: tuple[int, int]) -> None:
    codec, numel = CODECS[name](), 2 * BLOCK + 3
    with pytest.raises(CodecError, match=rf"multiples of its block size, {BLOCK}, .* or {numel} as the end"):
        codec.cut(codec.encode(spread_values(numel)), numel, *bounds)


@pytest.mark.parametrize("name", CODECS)
def test_a_payload_of_another_length_is_not_cut(name: str) -> None:
    codec = CODECS[name]()
    with pytest.raises(CodecError, match="It was refused"):
        codec.cut(codec.encode(spread_values(BLOCK))[:-1], BLOCK, 0, BLOCK)
