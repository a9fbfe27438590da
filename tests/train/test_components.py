"""Components are constructed from settings, and each setting reaches the right place."""

from __future__ import annotations

import itertools
from typing import Literal

import pytest
import torch

from diloco.algorithm import (
    Adam,
    Nesterov,
    Sgd,
    SyncSettings,
    at,
)
from diloco.devices import choose_device, use_device
from diloco.errors import ConfigurationError
from diloco.train import outer_components


class TestDevice:
    def test_a_gpu_of_apple_comes_after_cuda_and_before_the_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ConfigurationError, match="'mps' is not available"):
            choose_device("mps")
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
        assert choose_device("auto") == choose_device("mps") == torch.device("mps")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert choose_device("auto") == torch.device("cuda")

    @pytest.mark.parametrize(("device", "count"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), ("cuda:8", 8)])
    def test_one_that_is_absent_is_refused(self, device: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """A device that is requested but not available is an error; the CPU is never used instead."""
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        with pytest.raises(ConfigurationError, match=f"'{device}' is not available: torch sees {count} CUDA devices"):
            choose_device(device)

    @pytest.mark.parametrize(("device", "current"), [("cpu", []), ("cuda", []), ("cuda:0", [0]), ("cuda:7", [7])])
    def test_the_gpu_in_use_is_torchs_current_one(
        self, device: str, current: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made_current: list[int] = []
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: made_current.append(device.index))
        assert use_device(device) == torch.device(device)
        assert made_current == current


class TestOuterOptimizer:
    @pytest.mark.parametrize("kind", ["linear", "cosine"])
    @pytest.mark.parametrize("name", ["sgd", "nesterov", "adam"])
    def test_the_learning_rate_falls_over_the_outer_steps_of_the_run(
        self, name: Literal["sgd", "nesterov", "adam"], kind: Literal["linear", "cosine"]
    ) -> None:
        """Over ten rounds of a fragment, the rate starts at the peak and is half-way to its end value at five."""
        arguments = {"outer": {"schedule": kind, "final_ratio": 0.25}}
        settings = SyncSettings(outer=name, outer_learning_rate=0.8, arguments=arguments)
        outer = outer_components(settings, 10)["outer_optimizer"]
        assert isinstance(outer, Sgd | Nesterov | Adam)
        rates = [at(outer.learning_rate, step) for step in range(13)]
        assert rates[0] == 0.8
        assert rates[5] == pytest.approx(0.5)
        assert rates[10:] == pytest.approx([0.2] * 3)
        assert all(later <= earlier for earlier, later in itertools.pairwise(rates))
