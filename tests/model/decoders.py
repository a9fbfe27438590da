"""Small decoders whose logits are as far apart as a trained model's, and tokens for them."""

import torch

from diloco.model import DecoderSettings, Transformer, build_model

SMALL = DecoderSettings(layers=2, width=24, ffn_width=40, heads=6, vocab_size=31, max_sequence_length=16)


def random_tokens(*shape: int, seed: int = 0, vocab: int = 31) -> torch.Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def build_lively(settings: DecoderSettings, seed: int = 0) -> Transformer:
    """Return a decoder with norms that differ from 1, and logits as large and as far apart as a trained model's."""
    model, generator = build_model(settings, seed=seed), torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model
