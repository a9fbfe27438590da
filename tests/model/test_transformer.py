"""The native decoder: its properties, counts, initialisation, and learning."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from diloco.model import DecoderSettings, build_model, cross_entropy_with_z_loss
from tests.model.decoders import SMALL, build_uneven, every_variant, random_tokens

# --- properties -------------------------------------------------------------------------------------------------------


@every_variant
def test_a_later_token_changes_no_earlier_logits(settings: DecoderSettings) -> None:
    model, tokens = build_uneven(settings), random_tokens(1, 16)
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 31
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :9], after[0, :9])
    assert (before[0, 9:] != after[0, 9:]).any(dim=1).all()  # and every later token sees it


def test_attention_depends_on_distances_only() -> None:
    """Rotary positions: tokens at positions 7 to 10 give the same logits as at 0 to 3."""
    model = build_uneven(replace(SMALL, layers=1))
    decoder, tokens = model.model, random_tokens(1, 4)
    cosine, sine = decoder.rotary_cosine, decoder.rotary_sine
    at_0 = model(tokens)
    decoder.rotary_cosine, decoder.rotary_sine = cosine[7:], sine[7:]
    torch.testing.assert_close(model(tokens), at_0, rtol=1e-4, atol=1e-4)
    decoder.rotary_cosine, decoder.rotary_sine = cosine[::2], sine[::2]  # twice as far apart
    assert (model(tokens) - at_0).abs().max() > 0.01


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_loss_gradient_equals_that_of_plain_operations(z_loss: float) -> None:
    logits = (5 * torch.randn(6, 31, generator=torch.Generator().manual_seed(0))).requires_grad_()
    targets = random_tokens(6)
    loss, cross_entropy = cross_entropy_with_z_loss(logits, targets, z_loss)
    plain = torch.nn.functional.cross_entropy(logits, targets)
    plain_loss = plain + z_loss * logits.logsumexp(1).square().mean()
    torch.testing.assert_close((loss, cross_entropy), (plain_loss, plain))
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


# --- initialisation ---------------------------------------------------------------------------------------------------


def test_the_seed_decides_every_bit_and_the_global_generator_none() -> None:
    state = torch.random.get_rng_state()
    first, again, other = (build_model(SMALL, seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "norm" not in name)


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
