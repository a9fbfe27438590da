"""Batches on their way to the device."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["to_device"]


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """``values`` on ``device``, where the copy is only queued: nobody waits for it, and what is queued later sees it.

    It goes from pinned memory, since the host would have to wait for a copy from any other. It stands in the queue
    behind the step before it and takes 20 microseconds per megabyte on PCIe 5; a batch of 64 sequences of 1024 tokens
    is half a megabyte each for inputs and targets.
    """
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.contiguous().pin_memory().to(device, non_blocking=True)
