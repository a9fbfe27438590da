"""Every trainable parameter is in exactly one fragment (invariant 4), and layers are found by names."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from diloco.algorithm import FragmentLayout, bind, check_coverage, flatten, group_layers, partition, unflatten_
from diloco.errors import FragmentError
from tests.gpus import Cuda, on_gpu


class Decoder(nn.Module):
    def __init__(self, num_layers: int, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(num_layers))
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


@pytest.mark.parametrize("strategy", ["strided", "sequential", "balanced"])
@pytest.mark.parametrize("tied", [False, True])
def test_exactly_once_for_every_number_of_fragments(strategy: Any, tied: bool) -> None:
    """For all small numbers of layers and fragments; balanced ones differ by no more than the largest tensor."""
    for num_layers in range(1, 8):
        model = Decoder(num_layers, tied=tied)
        whole = {name: parameter.numel() for name, parameter in model.named_parameters()}
        for num_fragments in range(1, num_layers + 2):
            fragments = partition(model, num_fragments=num_fragments, strategy=strategy)
            sizes = [fragment.numel for fragment in fragments]
            assert len(fragments) == num_fragments
            assert sorted(name for fragment in fragments for name in fragment.names) == sorted(whole)
            assert sum(sizes) == sum(whole.values())
            assert strategy != "balanced" or max(sizes) - min(sizes) <= max(whole.values())
        with pytest.raises(FragmentError, match="Use "):
            partition(model, num_fragments=40, strategy=strategy)


@pytest.mark.parametrize(
    ("strategy", "layers_of_fragments"),
    [("strided", [{0, 3, 6}, {1, 4}, {2, 5}]), ("sequential", [{0, 1, 2}, {3, 4}, {5, 6}])],
)
def test_fragments_are_every_nth_layer_or_neighbours_and_the_rest_travels_apart(
    strategy: Any, layers_of_fragments: list[set[int]]
) -> None:
    fragments = partition(Decoder(7), num_fragments=4, strategy=strategy)
    assert fragments[0].names == ("embedding.weight", "head.weight")
    assert [{int(name.split(".")[1]) for name in each.names} for each in fragments[1:]] == layers_of_fragments


def test_without_parameters_outside_the_layers_the_first_fragment_holds_layers() -> None:
    layers = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    assert [each.names for each in partition(layers, num_fragments=2)] == [("0.weight", "2.weight"), ("1.weight",)]


def test_frozen_parameters_are_in_none() -> None:
    model = Decoder(2)
    model.embedding.weight.requires_grad_(False)
    names = [name for fragment in partition(model, num_fragments=2) for name in fragment.names]
    assert "embedding.weight" not in names
    assert "head.weight" in names
    with pytest.raises(FragmentError, match="no trainable parameters"):
        partition(nn.ReLU())


@pytest.mark.parametrize(
    ("fragments", "words"),
    [
        ([{"weight": (3, 2)}], "No fragment holds bias"),
        ([{"weight": (3, 2), "bias": (3,)}, {"bias": (3,)}], "'bias' is in fragments 0 and 1"),
        ([{"weight": (2, 2)}], r"names 'weight' of shape \(2, 2\)"),
        ([{"weight": (3, 2), "bias": (3,)}, {}], "no fragment may be empty"),
    ],
)
def test_a_parameter_left_out_twice_or_unknown_is_named(fragments: list[dict[str, Any]], words: str) -> None:
    layouts = [FragmentLayout(n, tuple(shapes), tuple(shapes.values())) for n, shapes in enumerate(fragments)]
    with pytest.raises(FragmentError, match=words):
        check_coverage(nn.Linear(2, 3), layouts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flatten_and_unflatten_are_inverse_and_reach_every_value(dtype: torch.dtype) -> None:
    model = Decoder(3).to(dtype)
    for fragment in partition(model, num_fragments=3):
        values = torch.arange(fragment.numel, dtype=torch.float32) % 64
        parameters = bind(model, fragment)
        unflatten_(values, parameters)
        assert torch.equal(flatten(parameters, torch.empty(fragment.numel)), values)
        assert torch.equal(torch.cat([p.detach().flatten() for p in parameters]).float(), values)


@pytest.mark.parametrize("indices", [[1], [0], [2, 1], [3, 3]])
def test_the_host_waits_for_copies_on_the_stream_of_the_gpu_that_they_come_from(
    indices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current device is GPU 0, of which torch returns the stream without an argument."""
    cuda = Cuda().install(monkeypatch)
    values = flatten([on_gpu(torch.ones(2), index) for index in indices], torch.empty(2 * len(indices)))
    assert values.tolist() == [1.0] * len(values)
    assert set(cuda.log) == {("waits", torch.device("cuda", index)) for index in indices}


def layers(prefix: str, count: int, **parts: int) -> dict[str, int]:
    names = {part.replace("__", "."): size for part, size in parts.items()}
    return {f"{prefix}.{n}.{part}": size for n in range(count) for part, size in names.items()}


EXPERTS = {f"experts__{number}__w": 500 for number in range(8)}

# the parameters outside the layers, the layers, and the number of layers
MODELS: dict[str, tuple[dict[str, int], dict[str, int], int]] = {
    "GPT-2": ({"wte.weight": 5000, "ln_f.weight": 8}, layers("transformer.h", 11, ln_1=60, attn__c_attn=60), 11),
    "experts in layers": ({"embedding.weight": 10}, layers("layers", 3, router=1, **EXPERTS), 3),
    "a large head": ({"head.0.weight": 5, "head.1.weight": 500}, layers("blocks", 4, mix__weight=5, mix__bias=5), 4),
    "parts in sequence": ({"0.weight": 500, "2.weight": 400}, layers("1.layers", 4, w=5), 4),
    "one layer": ({"embedding": 10}, layers("layers", 1, norm=1, **EXPERTS), 1),
    "unlike layers": ({}, layers("layers", 2, attn=3) | {"layers.0.ffn": 20} | layers("layers.1.experts", 4, w=20), 2),
    "two stacks": (layers("encoder.layers", 6, w=10) | {"shared": 50}, layers("decoder.layers", 4, w=30), 4),
    "no numbers": ({"first.weight": 3, "layer2.weight": 4}, {}, 0),
}


@pytest.mark.parametrize("model", MODELS)
def test_layers_are_found_in_the_order_of_their_numbers(model: str) -> None:
    """The embedding may be larger than all layers, numbers may have two digits, and layers may have numbered parts."""
    outside, inside, count = MODELS[model]
    rest, found = group_layers(outside | inside)
    assert rest == list(outside)
    assert len(found) == count
    assert sorted(name for layer in found for name in layer) == sorted(inside)
    for number, layer in enumerate(found):
        assert all(re.search(rf"(layers|h|blocks)\.{number}\.", name) for name in layer)


NAMES = st.lists(st.sampled_from(["a", "b", "layers", "0", "1", "2", "17"]), min_size=1, max_size=4).map(".".join)


@given(st.dictionaries(NAMES, st.integers(1, 100), max_size=15))
def test_every_name_is_in_exactly_one_place(sizes: dict[str, int]) -> None:
    """Property: this holds for any names, and no layer is empty."""
    rest, found = group_layers(sizes)
    assert sorted([*rest, *(name for layer in found for name in layer)]) == sorted(sizes)
    assert all(found)
    assert bool(found) == any(part.isdigit() for name in sizes for part in name.split("."))
