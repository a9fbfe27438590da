"""The layers of a model, derived from its parameter names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.algorithm import group_layers, match_patterns
from diloco.errors import FragmentError

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
