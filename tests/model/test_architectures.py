"""The native decoder and the stock models of transformers that equal it: logits and weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.errors import CheckpointError
from diloco.model import DecoderSettings, Transformer, native_weights
from tests.lazy import Lazy
from tests.model.decoders import SMALL, build_lively, random_tokens

transformers = Lazy("transformers")

CLASSES = {
    ("swiglu", False): "LlamaForCausalLM",
    ("swiglu", True): "Qwen3ForCausalLM",
    ("gelu", False): "ArceeForCausalLM",
    ("gelu", True): "ApertusForCausalLM",
}


@st.composite
def model_settings(draw: st.DrawFn) -> DecoderSettings:
    kv_heads, share = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4]))
    heads = kv_heads * share
    return DecoderSettings(
        layers=draw(st.integers(1, 3)),
        width=heads * draw(st.sampled_from([2, 4, 6, 16])),
        ffn_width=draw(st.integers(1, 40)),
        heads=heads,
        kv_heads=draw(st.sampled_from([kv_heads, *([None] if share == 1 else [])])),
        ffn=draw(st.sampled_from(["swiglu", "gelu"])),
        vocab_size=draw(st.integers(2, 60)),
        max_sequence_length=draw(st.integers(24, 64)),
        rope_theta=draw(st.sampled_from([100.0, 10_000.0, 1e6])),
        norm_epsilon=draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        qk_norm=draw(st.booleans()),
        tie_embeddings=draw(st.booleans()),
    )


def difference(native: Transformer, other: Any) -> float:
    tokens = random_tokens(2, 24, vocab=native.vocab_size)
    with torch.no_grad():
        return float((native(tokens) - other(tokens).logits).abs().max())


@given(chosen=model_settings(), seed=st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_logits_equal_those_of_the_stock_model(chosen: DecoderSettings, seed: int) -> None:
    native = build_lively(chosen, seed)
    before = torch.get_rng_state()
    other = native.to_huggingface()
    assert torch.equal(torch.get_rng_state(), before)
    assert type(other).__name__ == CLASSES[chosen.ffn, chosen.qk_norm]
    assert difference(native, other) < 1e-4
    if type(other).__name__ != "ApertusForCausalLM":  # which has other names for two norms
        assert sorted(dict(other.named_parameters())) == sorted(dict(native.named_parameters()))
    assert {p.data_ptr() for p in other.parameters()} == {p.data_ptr() for p in native.parameters()}


@given(chosen=model_settings(), shards=st.booleans())
@settings(max_examples=8, deadline=None)
def test_the_weights_of_a_saved_stock_model_are_the_native_ones(
    chosen: DecoderSettings, shards: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, native = tmp_path_factory.mktemp("stock"), build_lively(chosen)
    native.to_huggingface().save_pretrained(folder, max_shard_size=2000 if shards else "1GB")
    weights = native_weights(folder)
    assert weights.keys() == dict(native.named_parameters()).keys()
    assert all(torch.equal(weights[name], parameter) for name, parameter in native.named_parameters())
    assert difference(native, transformers.AutoModelForCausalLM.from_pretrained(folder)) < 1e-4


def test_missing_pickled_and_damaged_files_are_refused(tmp_path: Path) -> None:
    build_lively(SMALL).to_huggingface().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="is not a valid safetensors file"):
        native_weights(tmp_path)
    weights.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle"):
        native_weights(tmp_path)
    for text in ("[", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json can't be read"):
            native_weights(tmp_path)
