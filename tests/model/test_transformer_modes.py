"""The native decoder under autocast, with a cache and compiled, and what it refuses."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from diloco.errors import ConfigurationError
from diloco.model import DecoderSettings, KeyValueCache, build_model
from tests.model.decoders import SMALL, build_uneven, every_variant, random_tokens


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
    cache = KeyValueCache(settings)
    with torch.no_grad():
        full = model(tokens)
        # a prompt, one token, several at once, and one at a time up to the last position
        pieces = [model(piece, cache) for piece in torch.split(tokens, [5, 1, 4, 1, 1, 1, 1, 1, 1], dim=1)]
    assert cache.length == 16
    torch.testing.assert_close(torch.cat(pieces, 1), full, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigurationError, match="sequence of 17 tokens"):
        model(tokens[:, :1], cache)


def test_no_graph_breaks() -> None:
    torch._dynamo.reset()
    model = build_model(replace(SMALL, layers=1, kv_heads=2, qk_norm=True, z_loss=1e-4), seed=0)
    tokens, targets = random_tokens(2, 8), random_tokens(2, 8, seed=1)
    compiled = torch.compile(model.loss, backend="eager", fullgraph=True)
    with warnings.catch_warnings():
        # torch's tracer instantiates every autograd function it meets and warns about it
        warnings.filterwarnings("ignore", message=".*should not be instantiated", category=DeprecationWarning)
        loss = compiled(tokens, targets).loss
    torch.testing.assert_close(loss, model.loss(tokens, targets).loss)
    torch.autograd.backward(loss)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 25}, "heads of width 4.16667"),
        ({"heads": 8}, "heads of width 3, but rotary positions need an even"),
        ({"kv_heads": 4}, "must divide model.arguments.heads=6"),
        ({"rope_theta": 0.0}, r"model\.arguments\.rope_theta must be positive, got 0\.0"),
    ],
)
def test_sizes_that_cannot_work(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        replace(SMALL, **change)
