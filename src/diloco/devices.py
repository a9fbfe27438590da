"""Devices by name, and batches on their way to them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from diloco.errors import ConfigurationError

if TYPE_CHECKING:  # checking a name is a matter of configuration, which imports no torch
    import torch

__all__ = ["check_device", "choose_device", "to_device"]


def check_device(key: str, device: str) -> None:
    """Refuse what is no name of a device; ``key`` is the setting or flag that it was given as.

    Raises:
        ConfigurationError: for anything but auto, cpu, cuda and cuda:N.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise ConfigurationError(
            f"{key}={device!r} is no device. Use auto, cpu, cuda, or cuda:N such as cuda:0. Nothing was started."
        )


def choose_device(name: str) -> torch.device:
    """The device that ``name`` means; auto: cuda where there is one.

    Raises:
        ConfigurationError: if this machine does not have it; the CPU never takes its place.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(
            f"The device {name!r} is not available: torch sees {torch.cuda.device_count()} CUDA devices. Use cpu or "
            "auto instead. Nothing was started."
        )
    return device


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``values`` on ``device``, by a copy that is only queued: the host does not wait, and later work sees the result.

    The copy goes through pinned memory, because the host would wait for a copy from any other. It queues behind the
    step before it and takes 20 microseconds per megabyte on PCIe 5.
    """
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.contiguous().pin_memory().to(device, non_blocking=True)
