"""Small decoders of every variant, and tokens for them."""

from dataclasses import replace

import pytest
import torch

from diloco.model import DecoderSettings, Transformer, build_model

SMALL = DecoderSettings(layers=2, width=24, ffn_width=40, heads=6, vocab_size=31, max_sequence_length=16)
VARIANTS = {
    "llama": SMALL,
    "one head": replace(SMALL, heads=1),
    "grouped": replace(SMALL, kv_heads=2),
    "one kv head": replace(SMALL, kv_heads=1),
    "chinchilla": replace(SMALL, ffn="gelu", qk_norm=True, tie_embeddings=True, z_loss=1e-2),
    "grouped qk-norm, long wavelengths": replace(SMALL, kv_heads=3, qk_norm=True, rope_theta=500.0),
}
every_variant = pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS.keys())


def random_tokens(*shape: int, seed: int = 0, vocab: int = 31) -> torch.Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def build_uneven(settings: DecoderSettings, seed: int = 1) -> Transformer:
    """Return a decoder with norm weights that differ from 1, and embeddings large enough for every term to matter."""
    model, generator = build_model(settings, seed=seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
        model.model.embed_tokens.weight.normal_(0, 1, generator=generator)
    return model


def build_lively(settings: DecoderSettings, seed: int = 0) -> Transformer:
    """Return a decoder whose logits are far enough apart that greedy choices vary and do not depend on round-off."""
    model = build_model(settings, seed=seed)
    assert model.lm_head is not None
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model
