"""Peak operations of devices, and the batches of evaluation and copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from diloco.data import ByteTokenizer
from diloco.devices import flops_utilization, known_peak_flops_per_s, to_device
from diloco.model import ModelSettings, build_model, document_numbers
from diloco.trained import evaluate as evaluation

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("Tesla V100-SXM2-16GB", 125),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A1000", None),
        ("NVIDIA RTX A4000", None),
        ("Intel(R) Xeon(R) CPU L4096", None),
    ],
)
def test_a_device_is_known_by_its_whole_name(name: str, tera: float | None) -> None:
    assert known_peak_flops_per_s(name, "bfloat16") == (None if tera is None else tera * 1e12)


def test_float32_has_its_own_peaks() -> None:
    peaks = [known_peak_flops_per_s("NVIDIA A100", "float32", how) for how in ("highest", "high", "medium")]
    assert peaks == [19.5e12, 156e12, 156e12]


def test_without_a_peak_or_time_there_is_no_utilization() -> None:
    assert flops_utilization(1e10, 1.0, None) is None
    assert flops_utilization(1e10, 0.0, 1e12) is None
    assert flops_utilization(4e10, 0.5, 1e12) == pytest.approx(0.08)


def test_on_the_cpu_nothing_is_copied() -> None:
    values = torch.arange(6).view(2, 3)
    assert to_device(values, CPU) is values


def test_evaluation_holds_no_more_logits_than_it_may_and_sees_documents_as_training_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build_model(ModelSettings(layers=1, width=8, ffn_width=8, heads=2, vocab_size=257), seed=0)
    tokens = np.random.default_rng(0).integers(250, 257, size=8 * 12 + 1, dtype=np.uint16)

    def loss(**given: bool) -> float:
        return evaluation.evaluate(model, ByteTokenizer(), tokens, sequence_length=12, batch_size=8, **given).loss

    sizes: list[int] = []
    model.register_forward_pre_hook(lambda module, given: sizes.append(len(given[0])))
    whole = loss()
    assert sizes == [8]
    monkeypatch.setattr(evaluation, "LOGITS_BYTES", 3 * 12 * 257 * 4)
    assert loss() == pytest.approx(whole, rel=1e-6)
    assert sizes[1:] == [3, 3, 2]
    monkeypatch.setattr(evaluation, "LOGITS_BYTES", 1)
    assert loss() == pytest.approx(whole, rel=1e-6)
    inputs, targets = (torch.from_numpy(tokens.astype(np.int64))[begin:][:96].view(8, 12) for begin in (0, 1))
    with torch.no_grad():
        logits = model(inputs, documents=document_numbers(inputs, 256))
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert loss(document_masks=True) == pytest.approx(float(expected), rel=1e-6)
    assert loss(document_masks=True) != whole
