"""The choice of a device and of threads, and evaluation that sees documents as training does."""

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from diloco.data import ByteTokenizer, PackedTokens
from diloco.devices import choose_device, choose_threads, empty, gpu_of_process, share, use_device
from diloco.errors import ConfigurationError
from diloco.model import DecoderSettings, build_model, document_numbers
from diloco.trained import evaluate


def test_a_gpu_comes_before_the_cpu_and_one_that_is_absent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is never used instead. GPUs are shared over TCP, but NCCL refuses a second rank on one."""
    with pytest.raises(ConfigurationError, match="'mps' is not available"):
        choose_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("auto") == choose_device("mps") == torch.device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [gpu_of_process(index, shared=True) for index in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert gpu_of_process(1, shared=False) == "cuda:1"
    with pytest.raises(ConfigurationError, match=r"Process 3 .* torch sees 2. Start 2 with torchrun"):
        gpu_of_process(2, shared=False)
    with pytest.raises(ConfigurationError, match="'cuda:2' is not available: torch sees 2 CUDA devices"):
        choose_device("cuda:2")


@pytest.mark.parametrize(("numel", "dtype"), [(0, torch.uint8), (1, torch.float32), (8_388_607, torch.float32)])
def test_large_memory_is_released_with_its_last_view(numel: int, dtype: torch.dtype) -> None:
    """The last one is of 32 MiB less 4 bytes, and is followed by one that is in huge pages."""
    for size in (numel, numel + 1):
        values = empty(size, dtype)
        assert (values.shape, values.dtype, values.is_contiguous()) == ((size,), dtype, True)
        assert values.fill_(1).sum() == size
    view = values[-1:]
    del values
    assert view.item() == 1
    before = resident_bytes()
    held = empty((1 << 28) // dtype.itemsize + 1, dtype).fill_(1)
    assert resident_bytes() > before + held.nbytes // 2
    del held
    assert resident_bytes() < before + (1 << 22)


def test_the_memory_of_the_last_rounds_is_used_again_once_no_tensor_uses_it() -> None:
    numel = 3 << 23  # 24 MiB of float32 more than what the C library keeps
    first, second = empty(numel, torch.float32).fill_(1), empty(numel, torch.float32).fill_(2)
    places = {first.data_ptr(), second.data_ptr()}
    view = first[-1:]
    del first
    assert empty(numel, torch.float32).data_ptr() not in places
    assert view.item() == 1
    del view, second
    third, fourth = (empty(numel, torch.float32) for _ in range(2))
    assert {third.data_ptr(), fourth.data_ptr()} == places


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize(("device", "current"), [("cpu", []), ("cuda", []), ("cuda:7", [7])])
def test_the_gpu_in_use_is_torchs_current_one(device: str, current: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    made_current: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made_current.append(device.index))
    assert use_device(device) == torch.device(device)
    assert made_current == current


def test_evaluation_sees_documents_and_precision_as_training_does() -> None:
    model = build_model(DecoderSettings(layers=1, width=8, ffn_width=8, heads=2, vocab_size=257), seed=0)
    tokens = np.random.default_rng(0).integers(250, 257, size=8 * 12 + 1, dtype=np.uint16)
    inputs, targets = (torch.from_numpy(tokens.astype(np.int64))[begin:][:96].view(8, 12) for begin in (0, 1))
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"document_masks": True}, document_numbers(inputs, 256)),
        ({"precision": "bfloat16"}, None),
    ]
    for options, documents in cases:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled="precision" in options):
            logits = model(inputs, documents=documents)
        expected = float(F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()))
        packed, shape = PackedTokens([tokens]), {"sequence_length": 12, "batch_size": 8}
        assert evaluate(model, ByteTokenizer(), packed, **shape, **options).loss == pytest.approx(expected, rel=1e-6)
        assert evaluate(model, ByteTokenizer(), packed, **shape).loss != expected


def test_a_process_takes_its_share_of_threads_unless_the_user_chose_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    choose_threads(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    choose_threads(4)
    assert chosen == [share(2)]
