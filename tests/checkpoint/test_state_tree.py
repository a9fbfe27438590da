"""Nested state survives JSON and safetensors exactly; values that would not survive are refused with their path."""

from __future__ import annotations

import json
import math
from collections import OrderedDict, defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from diloco.checkpoint import read_part, tensor_chunks, write_part
from diloco.errors import CheckpointError
from diloco.state_tree import DTYPE_NAMES, flatten, unflatten
from tests.same import raw, same


def through_files(tree: Any, folder: Path) -> Any:
    """Save the tree in a new folder and return it as loaded from there."""
    with TemporaryDirectory(dir=folder) as name:
        return read_part(Path(name), "tree", write_part(Path(name), "tree", tree), "cpu")


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
@pytest.mark.parametrize("shape", [[], [0], [2, 0, 3], [1], [3, 5]], ids=str)
def test_every_dtype_and_shape(dtype: torch.dtype, shape: list[int], tmp_path: Path) -> None:
    tensor = of_bytes(dtype, shape, seed=1, transposed=False)
    assert same(through_files({"a": tensor, "odd": torch.ones(3, dtype=torch.uint8)}, tmp_path)["a"], tensor)


@pytest.mark.parametrize(
    "value", [math.inf, -math.inf, math.nan, -0.0, 5e-324, 0.1, 2**63 - 1, 2**63, -(2**63), -(9**999)]
)
def test_numbers_at_their_limits(value: float, tmp_path: Path) -> None:
    assert same(through_files([value, {value: (value,)}], tmp_path)[0], value)


def test_state_of_an_optimizer_loads_into_another_and_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> bytes:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).square().sum().backward()
            optimizer.step()
        return b"".join(raw(parameter.detach()) for parameter in model.parameters())

    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.9))
    stepped(model, optimizer, 2)
    tree = through_files({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    other = nn.Linear(4, 2)
    other.load_state_dict(tree["model"])
    resumed = torch.optim.AdamW(other.parameters(), lr=0.7)
    resumed.load_state_dict(tree["optimizer"])
    assert stepped(other, resumed, 3) == stepped(model, optimizer, 3)
    assert tree["optimizer"]["param_groups"][0]["betas"] == (0.8, 0.9)
    assert list(tree["optimizer"]["state"]) == [0, 1]


def test_names_tell_where_a_tensor_is_and_never_collide() -> None:
    tree = {"a.b": torch.ones(1), "a": {"b": torch.ones(1), 0: torch.ones(1), "0": torch.ones(1)}}
    skeleton, found = flatten(tree)
    assert set(found) == {"a.b", "a.b~2", "a.0", "a.0~2"}
    assert same(unflatten(skeleton, found), tree)
    assert list(flatten({"__metadata__": torch.ones(1)})[1]) == ["__metadata__~2"]
    assert list(flatten(torch.ones(1))[1]) == ["value"]


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


def test_numpy_views(tmp_path: Path) -> None:
    frozen = np.arange(3)
    frozen.flags.writeable = False
    tree = [np.arange(6.0).reshape(2, 3).T, np.arange(4)[::-1], frozen, np.array(5, dtype=np.int16)]
    assert same(through_files(tree, tmp_path), tree)


def test_flatten_copies_nothing() -> None:
    big = torch.ones(1000)
    assert flatten({"a": [big]})[1]["a.0"].data_ptr() == big.data_ptr()


def test_in_the_file_every_tensor_is_aligned_to_its_element_size() -> None:
    tensors = {str(dtype): torch.zeros(3, dtype=dtype) for dtype in DTYPE_NAMES}
    size, header, *_ = [bytes(chunk) for chunk in tensor_chunks(tensors)]
    assert int.from_bytes(size, "little") == len(header)
    for name, facts in json.loads(header).items():
        assert (8 + len(header) + facts["data_offsets"][0]) % tensors[name].element_size() == 0


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
        (object(), "builtins.object"),
        (Named("x"), "Named"),
        (np.float64(1.0), "numpy.float64"),
        (defaultdict(int), "defaultdict"),
        (torch.Size([1]), "Size"),
        (nn.Parameter(torch.ones(1)), r"\.detach\(\)"),
        (torch.ones(1, requires_grad=True), r"\.detach\(\)"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
        (torch.empty(2, device="meta"), "on meta"),
        (torch.zeros(2, dtype=torch.float8_e4m3fnuz), "torch.float8_e4m3fnuz"),
        (np.array(["a"]), "<U1"),
        (np.array([None]), "object"),
        (np.arange(2, dtype=">i4"), ">i4"),
        ("\ud800", "Unicode"),
        ({"\udfff": 1}, "Unicode"),
        ({frozenset(): 1}, "frozenset"),
        ({(torch.ones(1),): 1}, "the key tensor"),
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


def test_the_same_list_twice_is_no_loop() -> None:
    twice = [1]
    assert unflatten(*flatten([twice, twice])) == [[1], [1]]


@pytest.mark.parametrize(
    "node",
    [
        {},
        {"tuple": [], "dict": {}},
        {"tuple": {}},
        {"set": []},
        {"tensor": "absent"},
        {"tensor": 3},
        {"array": "half"},
        {"complex": "half"},
        {"complex_array": "half"},
        {"bytes": "%%"},
        {"float": "1.5"},
        {"int": "eleven"},
        {"dict": [[1]]},
        {"dict": [1]},
        {"dict": [[[], 1]]},
        {"dict": [[{"dict": {}}, 1]]},
    ],
    ids=str,
)
def test_malformed_skeletons_are_refused_by_their_path(node: Any) -> None:
    half = torch.ones(3, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"'a\.0' in the state .* Nothing was loaded"):
        unflatten({"dict": {"keep": {"tensor": "half"}, "a": [node]}}, {"half": half})


def test_tensors_without_a_place_are_refused() -> None:
    with pytest.raises(CheckpointError, match="does not name the saved tensors stray"):
        unflatten([], {"stray": torch.ones(1)})
