"""Torch operations and compiled kernels give equal bits, and what was asked for and is missing is an error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from diloco.algorithm import FP4, Codec, Int8
from diloco.errors import CodecError, ConfigurationError
from tests.algorithm.codecs import BLOCK, finite_floats, same_bits, spread_values, vectors


def pairs_of_implementations(block_size: int) -> Iterator[tuple[Codec, Codec]]:
    for codec in (Int8, FP4):
        yield codec(block_size, implementation="torch"), codec(block_size)


def fault_of(codec: Codec, payload: Tensor, numel: int) -> str | None:
    """Return why ``codec`` refuses a payload, or "" if it does not."""
    try:
        codec.validate(payload, numel)
    except CodecError as error:
        return str(error)
    return None


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


@settings(max_examples=100, deadline=None)
@given(values=vectors, weight=finite_floats)
def test_implementations_agree_bit_for_bit_on_any_values(values: Tensor, weight: float) -> None:
    assert_same_bits_either_way(values, BLOCK, weight)


WITHOUT_KERNELS = """
import importlib.machinery
importlib.machinery.EXTENSION_SUFFIXES[:] = [".none"]
from diloco import ConfigurationError
from diloco.algorithm import Int8, make_codec
assert make_codec("fp4").implementation == Int8(implementation="torch").implementation == "torch"
try:
    Int8(implementation="native")
except ConfigurationError as error:
    print(error)
"""


def test_native_kernels_are_never_replaced_silently() -> None:
    said = subprocess.run([sys.executable, "-c", WITHOUT_KERNELS], capture_output=True, text=True, check=True).stdout
    assert "has no compiled _kernels: there was no C compiler" in said
    assert "Use implementation='torch'" in said
    with pytest.raises(ConfigurationError, match="implementation must be 'torch' or 'native', got 'cuda'"):
        Int8(implementation="cuda")  # type: ignore[arg-type]  # on purpose
