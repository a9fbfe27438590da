"""Peak operations of devices, and evaluation that sees documents as training does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from diloco.data import ByteTokenizer
from diloco.devices import flops_utilization, known_peak_flops_per_s
from diloco.model import DecoderSettings, build_model, document_numbers
from diloco.trained import evaluate


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA A10", 125),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A1000", None),
    ],
)
def test_a_device_is_known_by_its_whole_name(name: str, tera: float | None) -> None:
    assert known_peak_flops_per_s(name, "bfloat16") == (None if tera is None else tera * 1e12)


def test_without_a_peak_or_time_there_is_no_utilization() -> None:
    assert flops_utilization(1e10, 1.0, None) is None
    assert flops_utilization(1e10, 0.0, 1e12) is None
    assert flops_utilization(4e10, 0.5, 1e12) == pytest.approx(0.08)


def test_evaluation_sees_documents_as_training_does() -> None:
    model = build_model(DecoderSettings(layers=1, width=8, ffn_width=8, heads=2, vocab_size=257), seed=0)
    tokens = np.random.default_rng(0).integers(250, 257, size=8 * 12 + 1, dtype=np.uint16)

    def loss(**given: Any) -> float:
        return evaluate(model, ByteTokenizer(), tokens, sequence_length=12, batch_size=8, **given).loss

    inputs, targets = (torch.from_numpy(tokens.astype(np.int64))[begin:][:96].view(8, 12) for begin in (0, 1))
    with torch.no_grad():
        logits = model(inputs, documents=document_numbers(inputs, 256))
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert loss(document_masks=True) == pytest.approx(float(expected), rel=1e-6)
    assert loss(document_masks=True) != loss()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model(inputs)
    expected = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    assert loss(precision="bfloat16") == pytest.approx(float(expected), rel=1e-6)
    assert loss() == pytest.approx(float(expected), rel=1e-3)
