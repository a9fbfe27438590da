"""Taking over a whole state: what has come is told meanwhile, and a snapshot is of one moment."""

from __future__ import annotations

import pytest
import torch

from diloco.outer import SharedState
from tests.outer.test_recovery import outer_loop


def test_a_snapshot_waits_for_the_gpu_whose_state_it_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread takes it, and the training may use a stream of its own."""
    log: list[str] = []
    loop, place = outer_loop(0), torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append(str(device)))
    monkeypatch.setattr(loop, "device", place)
    monkeypatch.setattr(loop, "fragment_state", lambda _: {"global_params": Copied(), "outer_step": 0, "slots": {}})

    class Copied:
        def clone(self) -> torch.Tensor:
            log.append("copied")
            return torch.zeros(1)

    SharedState(loop).snapshot(0)
    assert log == ["cuda:1", "copied", "cuda:1"]
