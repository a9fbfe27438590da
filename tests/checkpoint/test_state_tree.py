"""Nested state survives JSON and safetensors exactly; values that would not survive are refused with their path."""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from diloco.checkpoint import open_checkpoint, save_checkpoint
from diloco.errors import CheckpointError
from diloco.state_tree import DTYPE_NAMES, flatten, unflatten
from tests.same import same


def through_files(tree: Any, folder: Path) -> Any:
    """Save the tree in a new folder and return it as loaded from there."""
    with TemporaryDirectory(dir=folder) as name:
        save_checkpoint(Path(name), 0, {"tree": tree}, about={}, keep=1)
        return open_checkpoint(Path(name)).load("tree")


def of_bytes(dtype: torch.dtype, shape: list[int], seed: int, transposed: bool) -> torch.Tensor:
    """Draw any bit pattern of any dtype, including NaN payloads and subnormals; bool has only two."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        tensor = torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
    else:
        size = torch.empty((), dtype=dtype).element_size()
        content = torch.randint(0, 256, (math.prod(shape) * size,), generator=generator, dtype=torch.uint8)
        tensor = content.view(dtype).reshape(shape)
    return tensor.mT if transposed and tensor.dim() > 1 else tensor


texts = st.text(max_size=6)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.binary(max_size=6)
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=3,
)
shapes = st.lists(st.integers(0, 3), max_size=3)
dtypes = st.sampled_from([*DTYPE_NAMES, torch.complex64, torch.complex128])
tensors = st.builds(of_bytes, dtypes, shapes, st.integers(0, 9), st.booleans())
arrays = st.builds(
    lambda code, shape, seed: np.random.default_rng(seed).integers(0, 2, shape).astype(code),
    st.sampled_from(["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8", "c16"]),
    shapes,
    st.integers(0, 9),
)
trees = st.recursive(
    scalars | tensors | arrays,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(texts, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trees)
def test_any_tree_comes_back_as_it_was(tmp_path: Path, tree: Any) -> None:
    assert same(through_files(tree, tmp_path), tree)


@pytest.mark.parametrize("dtype", [*DTYPE_NAMES, torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [[], [2, 0, 3], [3, 5]], ids=str)
def test_every_dtype_and_shape(dtype: torch.dtype, shape: list[int], tmp_path: Path) -> None:
    tensor = of_bytes(dtype, shape, seed=1, transposed=False)
    assert same(through_files({"a": tensor, "odd": torch.ones(3, dtype=torch.uint8)}, tmp_path)["a"], tensor)


def test_shared_tensors_are_saved_once_and_stay_shared(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    tree = {"embedding": weight, "output": weight.detach(), "part": weight[0], "other": weight.clone()}
    assert set(flatten(tree)[1]) == {"embedding", "part", "other"}
    back = through_files(tree, tmp_path)
    assert same(back, tree)
    back["embedding"][0, 0] = 9
    assert (back["output"][0, 0], back["part"][0], back["other"][0, 0]) == (9, 0, 0)


def test_views_of_every_kind(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    wave = torch.tensor([1 + 2j, 3 - 4j])
    tree = [
        base.T,
        base[:, 1],
        base[::2],
        wave.conj(),
        wave.conj().imag,
        wave[:1].conj().imag,
        base[1:1].T,
        base[:1, 2:3].T,
    ]
    tree += [torch.ones(()).expand(4), torch.ones(()).expand(1), torch.ones(3, dtype=torch.bool).expand(0, 3)]
    back = through_files(tree, tmp_path)
    assert same(back, tree)
    assert all(tensor.is_contiguous() for tensor in back)


def test_in_memory_every_tensor_is_aligned_as_torchs_own(tmp_path: Path) -> None:
    """In a mapped file they would start where the header ends, which depends on the lengths of the names."""
    for length in range(1, 65, 8):
        assert through_files({"n" * length: torch.ones(100)}, tmp_path)["n" * length].data_ptr() % 64 == 0


class Named(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({1, 2}, "builtins.set"),
        (Named("x"), "Named"),
        (np.float64(1.0), "numpy.float64"),
        (nn.Parameter(torch.ones(1)), r"\.detach\(\)"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
        (torch.zeros(2, dtype=torch.float8_e4m3fnuz), "torch.float8_e4m3fnuz"),
        (np.array(["a"]), "<U1"),
        ("\ud800", "Unicode"),
        ({frozenset(): 1}, "frozenset"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_kept_is_named(value: Any, what: str) -> None:
    with pytest.raises(CheckpointError, match=rf"'inner_optimizer\.state\.0\.exp_avg' in the state .*{what}.*"):
        flatten({"inner_optimizer": {"state": {0: {"exp_avg": value}}}})


def test_a_tree_without_end_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match=r"'a\.0' in the state contains itself"):
        flatten({"a": loop})
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(CheckpointError, match="too deeply"):
        flatten(deep)
    with pytest.raises(CheckpointError, match="too deeply"):
        unflatten(deep, {})


@pytest.mark.parametrize(
    "node",
    [
        {},
        {"tuple": [], "dict": {}},
        {"tensor": "absent"},
        {"array": "half"},
        {"bytes": "%%"},
        {"float": "1.5"},
        {"dict": [[1]]},
        {"dict": [[{"dict": {}}, 1]]},
    ],
    ids=str,
)
def test_malformed_skeletons_are_refused_by_their_path(node: Any) -> None:
    half = torch.ones(3, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"'a\.0' in the state .* Nothing was loaded"):
        unflatten({"dict": {"keep": {"tensor": "half"}, "a": [node]}}, {"half": half})
