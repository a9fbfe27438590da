"""The native decoder: its initial values, and every way of running it. Its logits: see `test_architectures`."""

import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from diloco.errors import ConfigurationError
from diloco.model import (
    PRESETS,
    attend,
    block_mask,
    boolean_mask,
    build_model,
    cross_entropy_with_z_loss,
    document_numbers,
    get_preset,
)
from diloco.transport import ReplicaGroup
from tests.model.decoders import SMALL, build_lively, random_tokens

END = 9
VARIANTS = {
    "llama": SMALL,
    "one head": replace(SMALL, heads=1),
    "grouped": replace(SMALL, kv_heads=2),
    "one kv head": replace(SMALL, kv_heads=1),
    "chinchilla": replace(SMALL, ffn="gelu", qk_norm=True, tie_embeddings=True, z_loss=1e-2),
    "grouped qk-norm, long wavelengths": replace(SMALL, kv_heads=3, qk_norm=True, rope_theta=500.0),
}


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_loss_gradient_equals_that_of_plain_operations(z_loss: float) -> None:
    logits = (5 * torch.randn(6, 31, generator=torch.Generator().manual_seed(0))).requires_grad_()
    targets = random_tokens(6)
    loss, cross_entropy = cross_entropy_with_z_loss(logits, targets, z_loss)
    plain = torch.nn.functional.cross_entropy(logits, targets)
    plain_loss = plain + z_loss * logits.logsumexp(1).square().mean()
    torch.testing.assert_close((loss, cross_entropy), (plain_loss, plain))
    assert not cross_entropy.requires_grad
    (gradient,) = torch.autograd.grad(8 * loss, logits)  # scaled as by a gradient scaler
    torch.testing.assert_close(gradient, torch.autograd.grad(8 * plain_loss, logits)[0])


@pytest.mark.parametrize("name", PRESETS)
def test_the_count_of_a_preset_is_that_of_the_model(name: str) -> None:
    preset = get_preset(name)
    model = build_model(replace(preset.model, vocab_size=preset.vocab_size), seed=0, device="meta")
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert preset.parameters == model.num_parameters()
    assert preset.sequence_length <= preset.model.max_sequence_length
    assert preset.vocab_size == (preset.model.vocab_size or 257)


def test_tied_weights_are_counted_once_and_held_once() -> None:
    untied, tied = build_model(SMALL, seed=0), build_model(replace(SMALL, tie_embeddings=True), seed=0)
    assert untied.num_parameters() - tied.num_parameters() == 31 * 24
    assert "lm_head.weight" not in tied.state_dict()
    assert tied.flops_per_token() == untied.flops_per_token()


def test_flops_are_six_per_weight_and_the_attended_products() -> None:
    matrices = 2 * (4 * 24 * 24 + 3 * 24 * 40) + 31 * 24
    # forward: a query against (5 + 1) / 2 keys on average, and as many values; 2 FLOPs each; backward twice that
    attention = 3 * 2 * (2 * 2 * 24 * (5 + 1) / 2)
    assert build_model(SMALL, seed=0).flops_per_token(5) == 6 * matrices + attention
    assert build_model(SMALL, seed=0).flops_per_token() == build_model(SMALL, seed=0).flops_per_token(16)


def test_the_seed_decides_every_bit_and_the_global_generator_none() -> None:
    state = torch.random.get_rng_state()
    first, again, other = (build_model(SMALL, seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "norm" not in name)
    filled = build_model(SMALL, seed=0, device="meta")
    filled.fill(torch.device("cpu"), seed=3, group=ReplicaGroup())
    assert all(torch.equal(first[name], value) for name, value in filled.state_dict().items())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cache_gives_the_logits_of_the_full_forward(variant: str) -> None:
    model, tokens = build_lively(VARIANTS[variant]), random_tokens(3, 16)
    cache = model.new_cache()
    with torch.no_grad():
        full = model(tokens)
        # a prompt, one token, several at once, and one at a time up to the last position
        pieces = [model(piece, cache) for piece in torch.split(tokens, [5, 1, 4, 1, 1, 1, 1, 1, 1], dim=1)]
    assert cache.length == 16
    torch.testing.assert_close(torch.cat(pieces, 1), full, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigurationError, match="sequence of 17 tokens"):
        model(tokens[:, :1], cache)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 25}, "heads of width 4.16667"),
        ({"heads": 8}, "heads of width 3, but rotary positions need an even"),
        ({"kv_heads": 4}, "must divide model.arguments.heads=6"),
    ],
)
def test_sizes_of_a_decoder_that_can_not_work_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        replace(SMALL, **change)


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Allow FlexAttention's backward pass on the CPU, which torch refuses because it is slow; silence its warning."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *heads: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_a_document_has_the_logits_that_it_has_alone() -> None:
    # rotary positions are relative, so the beginning of a document does not matter
    model, documents = build_lively(replace(SMALL, qk_norm=True)), [[1, 2, 3, END], [4, END], [5, 6, 7]]
    packed = torch.tensor([[token for document in documents for token in document]])
    with torch.no_grad():
        together = model(packed, documents=document_numbers(packed, END))[0]
        alone = torch.cat([model(torch.tensor([document]))[0] for document in documents])
    torch.testing.assert_close(together, alone)


@pytest.mark.usefixtures("flex_on_cpu")
def test_flex_attention_attends_as_the_boolean_mask_says() -> None:
    """The mask for CUDA, with torch's uncompiled reference: values and gradients, grouped heads, uneven blocks."""
    tokens = torch.randint(10, (2, 150), generator=torch.Generator().manual_seed(0))
    numbers = document_numbers(tokens, END)
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 150, 8), (2, 2, 150, 8), (2, 2, 150, 8))
    heads = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    found = []
    for mask in (block_mask(numbers), boolean_mask(numbers)):
        attended = attend(heads[0], heads[1], heads[2], mask, grouped=True)
        found.append([attended.detach(), *torch.autograd.grad(attended.square().sum(), heads)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_a_weightless_model_is_built_without_torchs_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler takes 70 MB in every process that imports it, and every run builds such a model first."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    build_model(replace(get_preset("tiny").model, vocab_size=257), seed=0, device="meta")
