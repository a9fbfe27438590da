"""The choice of a device, peak operations of devices, and evaluation that sees documents as training does."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from diloco.data import ByteTokenizer, PackedTokens
from diloco.devices import choose_device, gpu_of_process, use_device
from diloco.errors import ConfigurationError
from diloco.model import DecoderSettings, build_model, document_numbers
from diloco.trained import evaluate


def test_a_gpu_of_apple_comes_after_cuda_and_before_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="'mps' is not available"):
        choose_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("auto") == choose_device("mps") == torch.device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == torch.device("cuda")


@pytest.mark.parametrize(("device", "count"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), ("cuda:8", 8)])
def test_one_that_is_absent_is_refused(device: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is requested but not available is an error; the CPU is never used instead."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ConfigurationError, match=f"'{device}' is not available: torch sees {count} CUDA devices"):
        choose_device(device)


def test_processes_share_gpus_over_tcp_and_nccl_refuses_a_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [gpu_of_process(index, shared=True) for index in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert gpu_of_process(1, shared=False) == "cuda:1"
    with pytest.raises(ConfigurationError, match=r"Process 3 .* torch sees 2. Start 2 with torchrun"):
        gpu_of_process(2, shared=False)


@pytest.mark.parametrize(("device", "current"), [("cpu", []), ("cuda", []), ("cuda:0", [0]), ("cuda:7", [7])])
def test_the_gpu_in_use_is_torchs_current_one(device: str, current: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    made_current: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made_current.append(device.index))
    assert use_device(device) == torch.device(device)
    assert made_current == current


def test_evaluation_sees_documents_as_training_does() -> None:
    model = build_model(DecoderSettings(layers=1, width=8, ffn_width=8, heads=2, vocab_size=257), seed=0)
    tokens = np.random.default_rng(0).integers(250, 257, size=8 * 12 + 1, dtype=np.uint16)

    def loss(**given: Any) -> float:
        return evaluate(model, ByteTokenizer(), PackedTokens([tokens]), sequence_length=12, batch_size=8, **given).loss

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
