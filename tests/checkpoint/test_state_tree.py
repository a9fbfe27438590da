"""Nested state survives JSON and safetensors exactly; values that would not survive are refused with their path."""

import math
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
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
keys = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
tensors = st.builds(
    of_bytes, st.sampled_from([*DTYPE_NAMES]), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 9), st.booleans()
)
trees = st.recursive(
    scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(texts, inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trees)
def test_any_tree_comes_back_as_it_was(tmp_path: Path, tree: Any) -> None:
    assert same(through_files(tree, tmp_path), tree)


def test_every_dtype_shape_and_view_is_the_same_after_files(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tree: list[Any] = [base.T, base[:, 1], base[::2], base[1:1].T, base[:1, 2:3].T, torch.ones(()).expand(4)]
    tree += [torch.ones(()).expand(1), torch.ones(3, dtype=torch.bool).expand(0, 3)]
    tree += [of_bytes(dtype, shape, 1, False) for dtype in DTYPE_NAMES for shape in ([], [2, 0, 3], [3, 5])]
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
        (nn.Parameter(torch.ones(1)), "requires a gradient"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
        (torch.zeros(2, dtype=torch.complex64), "torch.complex64"),
        ({frozenset(): 1}, "builtins.dict"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_kept_is_named(value: Any, what: str) -> None:
    with pytest.raises(CheckpointError, match=rf"'inner_optimizer\.state\.0\.exp_avg' in the state is a .*{what}.*"):
        flatten({"inner_optimizer": {"state": {0: {"exp_avg": value}}}})


@pytest.mark.parametrize(
    "node",
    [
        {},
        {"tuple": [], "dict": {}},
        {"tensor": "absent"},
        {"tensor": ["half"]},
        {"float": "1.5"},
        {"dict": [[1]]},
        {"dict": [[{"dict": {}}, 1]]},
        {"dict": ["ab"]},
    ],
    ids=str,
)
def test_malformed_skeletons_are_refused(node: Any) -> None:
    half = torch.ones(3, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"state is malformed: .* Nothing was loaded"):
        unflatten({"dict": {"keep": {"tensor": "half"}, "a": [node]}}, {"half": half})
