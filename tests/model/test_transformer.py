"""The native decoder: its initial values, and every way of running it. Its logits: see `test_architectures`."""

import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from diloco.errors import ConfigurationError
from diloco.model import (
    DecoderSettings,
    Transformer,
    attend,
    block_mask,
    boolean_mask,
    build_model,
    cross_entropy_with_z_loss,
    document_numbers,
)
from diloco.transport import ReplicaGroup
from tests.model.decoders import SMALL, build_uneven, every_variant, random_tokens

END = 9


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


def test_initial_scales() -> None:
    model = build_model(replace(SMALL, layers=8, width=192, ffn_width=400, heads=4, vocab_size=300), seed=0)
    for name, expected in {
        "model.embed_tokens.weight": 192**-0.5,
        "lm_head.weight": 0.02,
        "model.layers.3.self_attn.q_proj.weight": 192**-0.5,
        "model.layers.3.self_attn.o_proj.weight": 192**-0.5 / 4,
        "model.layers.3.mlp.up_proj.weight": 192**-0.5,
        "model.layers.3.mlp.down_proj.weight": 400**-0.5 / 4,
    }.items():
        assert model.get_parameter(name).std().item() == pytest.approx(expected, rel=0.03), name


@every_variant
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_stays_near_float32(settings: DecoderSettings, dtype: torch.dtype) -> None:
    model, tokens, targets = build_model(settings, seed=0), random_tokens(2, 16), random_tokens(2, 16, seed=1)
    exact = model.loss(tokens, targets)
    with warnings.catch_warnings(), torch.autocast("cpu", dtype=dtype):
        warnings.simplefilter("error")
        assert model(tokens).dtype == dtype
        parts = model.loss(tokens, targets)
    assert parts.loss.dtype == parts.cross_entropy.dtype == torch.float32
    assert parts.cross_entropy.item() == pytest.approx(exact.cross_entropy.item(), abs=0.02)
    torch.autograd.backward(parts.loss)
    assert all(
        p.grad is not None and p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters()
    )


@every_variant
def test_a_cache_gives_the_logits_of_the_full_forward(settings: DecoderSettings) -> None:
    model, tokens = build_uneven(settings), random_tokens(3, 16)
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
def test_sizes_that_cannot_work(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        replace(SMALL, **change)


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Allow FlexAttention's backward pass on the CPU, which torch refuses because it is slow; silence its warning."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *heads: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def model() -> Transformer:
    return build_model(DecoderSettings(layers=2, width=16, heads=2, ffn_width=32, vocab_size=11, qk_norm=True), seed=0)


def test_a_document_has_the_logits_that_it_has_alone() -> None:
    # rotary positions are relative, so the beginning of a document does not matter
    documents = [[1, 2, 3, END], [4, END], [5, 6, 7]]
    packed = torch.tensor([[token for document in documents for token in document]])
    with torch.no_grad():
        together = model()(packed, documents=document_numbers(packed, END))[0]
        alone = torch.cat([model()(torch.tensor([document]))[0] for document in documents])
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


def test_a_weightless_model_is_built_without_torchs_compiler() -> None:
    """The compiler takes 70 MB in every process that imports it, and every run builds such a model first."""
    code = (
        "import dataclasses, sys; from diloco.model import build_model, get_preset\n"
        "settings = dataclasses.replace(get_preset('tiny').model, vocab_size=257)\n"
        "build_model(settings, seed=0, device='meta'); sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
