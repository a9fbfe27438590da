"""Every trainable parameter is in exactly one fragment (invariant 4), and layers are found by names."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from diloco.algorithm import (
    FragmentLayout,
    Strategy,
    bind,
    check_coverage,
    flatten,
    group_layers,
    match_patterns,
    partition,
    unflatten_,
)
from diloco.errors import FragmentError
from tests.gpus import Cuda, on_gpu


class Decoder(nn.Module):
    def __init__(self, num_layers: int, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(num_layers)
        )
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def layer_numbers(fragment: FragmentLayout) -> set[int]:
    return {int(name.split(".")[1]) for name in fragment.names if name.startswith("layers")}


@pytest.mark.parametrize("strategy", ["strided", "sequential", "balanced"])
@pytest.mark.parametrize("tied", [False, True])
def test_exactly_once_for_every_number_of_fragments(strategy: Strategy, tied: bool) -> None:
    """Test the property for all small numbers of layers and fragments."""
    for num_layers in range(1, 8):
        model = Decoder(num_layers, tied=tied)
        for num_fragments in range(1, num_layers + 2):
            fragments = partition(model, num_fragments=num_fragments, strategy=strategy)
            names = [name for fragment in fragments for name in fragment.names]
            assert len(fragments) == num_fragments
            assert sorted(names) == sorted(name for name, _ in model.named_parameters())
            assert sum(fragment.numel for fragment in fragments) == sum(p.numel() for p in model.parameters())


def test_strided_takes_every_nth_layer_and_the_rest_travels_apart() -> None:
    fragments = partition(Decoder(7), num_fragments=4)
    assert fragments[0].names == ("embedding.weight", "head.weight")
    assert [layer_numbers(fragment) for fragment in fragments[1:]] == [{0, 3, 6}, {1, 4}, {2, 5}]


def test_a_model_of_nothing_but_layers_has_only_fragments_of_layers() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    fragments = partition(model, num_fragments=2)
    assert [fragment.names for fragment in fragments] == [("0.weight", "2.weight"), ("1.weight",)]


def test_balanced_is_as_even_as_the_largest_tensor_allows() -> None:
    model = Decoder(5)
    largest = max(p.numel() for p in model.parameters())
    sizes = [fragment.numel for fragment in partition(model, num_fragments=4, strategy="balanced")]
    assert max(sizes) - min(sizes) <= largest


def test_tied_weights_are_counted_once_under_either_name() -> None:
    model = Decoder(1, tied=True)
    fragments = partition(model, strategy="patterns", patterns=[["head.weight"], ["layers.*"]])
    assert fragments[0].names == ("embedding.weight",)


def test_frozen_parameters_are_in_none() -> None:
    model = Decoder(2)
    model.embedding.weight.requires_grad_(False)
    names = [name for fragment in partition(model, num_fragments=2) for name in fragment.names]
    assert "embedding.weight" not in names
    assert "head.weight" in names


def test_two_parameters_on_one_memory_are_refused() -> None:
    model = Decoder(1)
    model.head.weight = nn.Parameter(model.embedding.weight.detach())
    with pytest.raises(FragmentError, match=r"'embedding.weight' and 'head.weight'"):
        partition(model)


@pytest.mark.parametrize("strategy", ["strided", "sequential", "balanced"])
def test_more_fragments_than_there_are_parts_is_refused(strategy: Strategy) -> None:
    with pytest.raises(FragmentError, match="Use "):
        partition(Decoder(2), num_fragments=40, strategy=strategy)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(FragmentError, match="no trainable parameters"):
        partition(nn.ReLU())


def fragment_of(model: nn.Module, index: int, *names: str) -> FragmentLayout:
    parameters = dict(model.named_parameters())
    return FragmentLayout(index, names, tuple(tuple(parameters[name].shape) for name in names))


def test_a_parameter_left_out_twice_or_unknown_is_named() -> None:
    model = nn.Linear(2, 3)
    with pytest.raises(FragmentError, match="No fragment holds bias"):
        check_coverage(model, [fragment_of(model, 0, "weight")])
    with pytest.raises(FragmentError, match="'bias' is in fragments 0 and 1"):
        check_coverage(model, [fragment_of(model, 0, "weight", "bias"), fragment_of(model, 1, "bias")])
    with pytest.raises(FragmentError, match=r"names 'weight' of shape \(2, 2\)"):
        check_coverage(model, [FragmentLayout(0, ("weight",), ((2, 2),))])
    with pytest.raises(FragmentError, match="no fragment may be empty"):
        check_coverage(model, [fragment_of(model, 0, "weight", "bias"), FragmentLayout(1, (), ())])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flatten_and_unflatten_are_inverse_and_reach_every_value(dtype: torch.dtype) -> None:
    model = Decoder(3).to(dtype)
    for fragment in partition(model, num_fragments=3):
        values = torch.arange(fragment.numel, dtype=torch.float32) % 64
        parameters = bind(model, fragment)
        unflatten_(values, parameters)
        assert torch.equal(flatten(parameters, torch.empty(fragment.numel)), values)
    flat = list(itertools.chain.from_iterable(p.flatten().tolist() for p in model.parameters()))
    assert max(flat) == 63


@pytest.mark.parametrize("indices", [[1], [0], [2, 1], [3, 3]])
def test_the_host_waits_for_copies_on_the_stream_of_the_gpu_that_they_come_from(
    indices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current device is GPU 0, of which torch returns the stream without an argument."""
    cuda = Cuda().install(monkeypatch)
    values = flatten([on_gpu(torch.ones(2), index) for index in indices], torch.empty(2 * len(indices)))
    assert values.tolist() == [1.0] * len(values)
    assert set(cuda.log) == {("waits", torch.device("cuda", index)) for index in indices}


def test_copies_between_gpus_or_on_the_host_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda().install(monkeypatch)
    flatten([torch.ones(2)], torch.empty(2))
    flatten([on_gpu(torch.ones(2), 1)], on_gpu(torch.empty(2), 1))
    flatten([torch.ones(2)], on_gpu(torch.empty(2), 1))
    assert cuda.log == []


LLAMA = {
    "model.embed_tokens.weight": 1000,
    **{f"model.layers.{n}.{part}.weight": 100 for n in range(12) for part in ("self_attn.q_proj", "mlp.up_proj")},
    "model.norm.weight": 8,
    "lm_head.weight": 1000,
}
GPT2 = {
    "transformer.wte.weight": 5000,
    "transformer.wpe.weight": 900,
    **{
        f"transformer.h.{n}.{part}": 60 for n in range(11) for part in ("ln_1.weight", "attn.c_attn.weight", "mlp.bias")
    },
    "transformer.ln_f.weight": 8,
}
EXPERTS = {
    "embedding.weight": 10,
    **{f"layers.{n}.experts.{e}.w": 500 for n in range(3) for e in range(8)},
    **{f"layers.{n}.router": 1 for n in range(3)},
}
LARGE_HEAD = {
    "embedding.weight": 500,
    **{f"blocks.{n}.{part}": 5 for n in range(4) for part in ("mix.weight", "mix.bias")},
    "head.0.weight": 5,
    "head.1.weight": 500,
}
IN_SEQUENCE = {
    "0.weight": 500,
    **{f"1.layers.{n}.w": 5 for n in range(4)},
    "2.weight": 400,
}
ONE_LAYER_OF_EXPERTS = {"embedding": 10, **{f"layers.0.experts.{n}.w": 5 for n in range(4)}, "layers.0.norm": 1}
DENSE_THEN_EXPERTS = {
    **{f"layers.{n}.attention.w": 3 for n in range(2)},
    "layers.0.ffn.w": 20,
    **{f"layers.1.experts.{n}.w": 20 for n in range(4)},
}
TWO_STACKS = {
    **{f"encoder.layers.{n}.w": 10 for n in range(6)},
    **{f"decoder.layers.{n}.w": 30 for n in range(4)},
    "shared": 50,
}


def numbers(layers: list[list[str]], position: int) -> list[set[int]]:
    return [{int(name.split(".")[position]) for name in layer} for layer in layers]


@pytest.mark.parametrize(
    ("sizes", "position", "count", "outside"),
    [
        (LLAMA, 2, 12, ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]),
        (GPT2, 2, 11, ["transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight"]),
        (EXPERTS, 1, 3, ["embedding.weight"]),
        (LARGE_HEAD, 1, 4, ["embedding.weight", "head.0.weight", "head.1.weight"]),
        (IN_SEQUENCE, 2, 4, ["0.weight", "2.weight"]),
        (ONE_LAYER_OF_EXPERTS, 1, 1, ["embedding"]),
        (DENSE_THEN_EXPERTS, 1, 2, []),
        (TWO_STACKS, 2, 4, [*(f"encoder.layers.{n}.w" for n in range(6)), "shared"]),
    ],
    ids=[
        "Llama",
        "GPT-2",
        "experts in layers",
        "a large head",
        "parts in sequence",
        "one layer",
        "unlike layers",
        "the larger of two stacks",
    ],
)
def test_layers_are_found_in_the_order_of_their_numbers(
    sizes: dict[str, int], position: int, count: int, outside: list[str]
) -> None:
    """The embedding may be larger than all layers, numbers may have two digits, and layers may have numbered parts."""
    rest, layers = group_layers(sizes)
    assert rest == outside
    assert numbers(layers, position) == [{number} for number in range(count)]


def test_a_model_without_numbers_has_no_layers() -> None:
    assert group_layers({"first.weight": 3, "layer2.weight": 4}) == (["first.weight", "layer2.weight"], [])


NAMES = st.lists(st.sampled_from(["a", "b", "layers", "0", "1", "2", "17"]), min_size=1, max_size=4).map(".".join)


@given(st.dictionaries(NAMES, st.integers(1, 100), max_size=15))
def test_every_name_is_in_exactly_one_place(sizes: dict[str, int]) -> None:
    """Property: this holds for any names, and no layer is empty."""
    rest, layers = group_layers(sizes)
    assert sorted([*rest, *(name for layer in layers for name in layer)]) == sorted(sizes)
    assert all(layers)
    assert bool(layers) == any(part.isdigit() for name in sizes for part in name.split("."))


ALIASES = {"embedding.weight": ["embedding.weight", "head.weight"], "layers.0.w": ["layers.0.w"], "W": ["W"]}


class TestPatterns:
    def test_a_pattern_may_use_any_name_of_a_tied_weight(self) -> None:
        groups = match_patterns(ALIASES, [["layers.[0-3].*", "W"], ["head.*"]])
        assert groups == [["layers.0.w", "W"], ["embedding.weight"]]

    @pytest.mark.parametrize(
        ("patterns", "words"),
        [
            ([["embedding.*"], ["head.*", "layers.*", "W"]], r"'embedding.weight' matches the patterns of .* \[0, 1\]"),
            ([["*.weight"], ["layers.*"]], "'W' matches no pattern of any fragment"),
            ([["*.weight"], ["layers.*", "w"]], "'W' matches no pattern"),  # capitals count
            ([["*"], ["layer.*"]], r"The pattern 'layer\.\*' of fragment 1 matches no trainable parameter"),
            ([], "matches no pattern"),
        ],
    )
    def test_what_is_ambiguous_or_idle_is_refused_by_name(self, patterns: list[list[str]], words: str) -> None:
        with pytest.raises(FragmentError, match=words):
            match_patterns(ALIASES, patterns)
