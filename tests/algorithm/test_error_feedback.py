"""Error feedback: the equation, and what waits decays."""

from __future__ import annotations

import pytest
import torch

from diloco import make_codec
from diloco.algorithm import encode_with_feedback

NUMEL = 100


@pytest.mark.parametrize("name", ["float16", "bfloat16", "int8", "fp4", "topk2"])
@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_one_round_by_the_equation(name: str, decay: float) -> None:
    codec, generator = make_codec(name), torch.Generator().manual_seed(0)
    values, residual = torch.randn(NUMEL, generator=generator), torch.randn(NUMEL, generator=generator)
    before = values.clone(), residual.clone()
    corrected = torch.add(values, residual, alpha=decay)
    payload, after = encode_with_feedback(codec, values, residual, decay)
    assert torch.equal(payload, codec.encode(corrected))
    assert torch.equal(after, corrected - codec.decode(payload, NUMEL))
    assert torch.equal(values, before[0]), "they are left alone"
    assert torch.equal(residual, before[1]), "the caller decides which residual stays"


def test_what_waits_decays() -> None:
    codec = make_codec("fp4", block_size=2)
    values, residual = torch.tensor([100.0, 1e-3]), torch.zeros(2)
    for _ in range(50):
        _, residual = encode_with_feedback(codec, values, residual, 0.5)
    assert float(residual[1]) == pytest.approx(2e-3)
