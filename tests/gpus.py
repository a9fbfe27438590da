"""Tensors that claim to be on a GPU, and a `torch.cuda` that records which streams are used. Both work without one."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

__all__ = ["Cuda", "on_gpu"]


class _OnGpu(Tensor):
    """A CPU tensor that is said to be on ``place``, as are its views."""

    place: torch.device
    is_cuda = True

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # a property in torch
        return self.place

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        places = [each.place for each in args if isinstance(each, _OnGpu)]
        if isinstance(found, _OnGpu) and places:
            found.place = places[0]
        return found

    def record_stream(self, stream: Any) -> None:
        stream.log.append(("keeps", stream.device))


def on_gpu(values: Tensor, index: int) -> Tensor:
    """Return ``values`` as a tensor that claims to be on the GPU of this number."""
    made = values.as_subclass(_OnGpu)
    made.place = torch.device("cuda", index)
    return made


@dataclass
class Cuda:
    """Replaces the streams of `torch.cuda`, whose GPUs are full. ``log``: what was done, the device of its stream."""

    log: list[tuple[str, torch.device]] = field(default_factory=list)

    def install(self, patch: pytest.MonkeyPatch) -> Cuda:
        patch.setattr(torch.cuda, "current_stream", lambda device=None: _Stream(self.log, _place(device)))
        patch.setattr(torch.cuda, "Stream", lambda device=None: _Stream(self.log, _place(device)))
        patch.setattr(torch.cuda, "stream", lambda stream: nullcontext(self.log.append(("copies in", stream.device))))
        patch.setattr(torch.cuda, "Event", lambda: self)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 80 << 30))
        return self

    def record(self, stream: _Stream) -> None:
        self.log.append(("marks", stream.device))


@dataclass
class _Stream:
    log: list[tuple[str, torch.device]]
    device: torch.device

    def synchronize(self) -> None:
        self.log.append(("waits", self.device))

    def wait_stream(self, other: _Stream) -> None:
        self.log.append(("follows", other.device))


def _place(device: Any) -> torch.device:
    return torch.device("cuda", 0) if device is None else torch.device(device)
