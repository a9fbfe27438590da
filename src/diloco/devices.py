"""Devices by name, batches on their way to them, and how fast they can be."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from diloco.errors import ConfigurationError

if TYPE_CHECKING:  # checking a name is a matter of configuration, which imports no torch
    import torch

__all__ = ["check_device", "choose_device", "flops_utilization", "known_peak_flops_per_s", "to_device"]

TERA = 1e12

PEAKS: tuple[tuple[str, float, float, float], ...] = (
    # name, half precision (bfloat16 where it has it), TF32, float32; the first that fits counts
    ("B200", 2250, 1125, 75),
    ("H200 NVL", 835, 418, 60),
    ("GH200|H200", 989, 494, 67),
    ("H100 PCIe", 756, 378, 51),
    ("H100 NVL", 835, 418, 60),
    ("H100", 989, 494, 67),
    ("H800", 989, 494, 67),
    ("A100|A800", 312, 156, 19.5),
    ("L40S", 362, 183, 91.6),
    ("L40", 181, 90.5, 90.5),
    ("L4", 121, 60, 30.3),
    ("A40", 150, 75, 37.4),
    ("A10", 125, 62.5, 31.2),
    ("V100", 125, 15.7, 15.7),
    ("T4", 65, 8.1, 8.1),
    ("RTX 4090", 165, 82.6, 82.6),
    ("RTX 3090", 71, 35.6, 35.6),
    ("MI300X", 1307, 654, 163),
)
"""Dense products, in 10^12 operations a second, from the makers' data sheets; consumer cards with float32 sums."""


def check_device(key: str, device: str) -> None:
    """Refuse what is no name of a device; ``key`` is the setting or flag that it was given as.

    Raises:
        ConfigurationError: for anything but auto, cpu, mps, cuda and cuda:N.
    """
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device):
        raise ConfigurationError(f"{key}={device!r} is no device. Use auto, cpu, mps, cuda, or cuda:N such as cuda:0.")


def choose_device(name: str) -> torch.device:
    """The device that ``name`` means; auto: cuda where there is one, else mps (Apple's) where there is one, else cpu.

    Raises:
        ConfigurationError: if this machine does not have it; the CPU never takes its place.
    """
    import torch

    apple = torch.backends.mps.is_available()
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if apple else "cpu")
    device = torch.device(name)
    if device.type == "mps" and not apple:
        raise ConfigurationError(
            "The device 'mps' is not available: torch sees no GPU of Apple's. Use cpu or auto instead."
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(
            f"The device {name!r} is not available: torch sees {torch.cuda.device_count()} CUDA devices. Use cpu or "
            "auto instead."
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


def known_peak_flops_per_s(device_name: str, precision: str, matmul_precision: str = "highest") -> float | None:
    """What a device can do at most in dense matrix products, operations per second; None where it is not known.

    Args:
        device_name: from ``torch.cuda.get_device_name``.
        precision: of the products, as ``train.precision``.
        matmul_precision: of those in float32, as ``train.matmul_precision``.

    >>> known_peak_flops_per_s("NVIDIA H200", "bfloat16"), known_peak_flops_per_s("NVIDIA L4", "float32", "high")
    (989000000000000.0, 60000000000000.0)
    >>> known_peak_flops_per_s("AMD EPYC 9654 96-Core Processor", "float32") is None
    True
    """
    for name, half, tf32, float32 in PEAKS:
        if re.search(rf"(?<![A-Za-z0-9])({name})(?![A-Za-z0-9]| Laptop)", device_name):
            if precision != "float32":
                return half * TERA
            return (float32 if matmul_precision == "highest" else tf32) * TERA
    return None


def flops_utilization(flops: float, seconds: float, peak_flops_per_s: float | None) -> float | None:
    """Model flops utilisation (MFU; PaLM, 2204.02311, appendix B); None without a known peak, or a time.

    >>> flops_utilization(5e13, 0.1, 1e15), flops_utilization(5e13, 0.1, None)
    (0.5, None)
    """
    if peak_flops_per_s is None or seconds <= 0:
        return None
    return flops / seconds / peak_flops_per_s
