"""Devices: choosing one by name, copies to and from it, its peak throughput, and the number of torch's threads."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from diloco.cores import share, threads_are_chosen
from diloco.errors import ConfigurationError

if TYPE_CHECKING:  # `check_device` is part of the configuration, which must not import torch
    import torch

TERA = 1e12

PEAKS: tuple[tuple[str, float, float, float], ...] = (
    # name pattern, half precision (bfloat16 if supported), TF32, float32; the first matching row counts
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
"""Peak rates of dense matrix products in 10^12 operations per second, from the manufacturers' data sheets. Those of
consumer cards are the rates with float32 accumulation."""


def check_device(key: str, device: str) -> None:
    """Check that ``device`` is a device name; ``key`` is the setting or flag that it was given as.

    Raises:
        ConfigurationError: if it is not auto, cpu, mps, cuda or cuda:N.
    """
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device):
        raise ConfigurationError(
            f"{key}={device!r} is not a device. Use auto, cpu, mps, cuda, or cuda:N such as cuda:0."
        )


def choose_device(name: str) -> torch.device:
    """Return the device called ``name``. auto means cuda if available, else mps (Apple's GPUs) if available, else cpu.

    Raises:
        ConfigurationError: if this machine does not have the device. There is no silent fallback to the CPU.
    """
    import torch

    apple = torch.backends.mps.is_available()
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if apple else "cpu")
    device = torch.device(name)
    if device.type == "mps" and not apple:
        raise ConfigurationError("The device 'mps' is not available: torch sees no Apple GPU. Use cpu or auto instead.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(
            f"The device {name!r} is not available: torch sees {torch.cuda.device_count()} CUDA devices. Use cpu or "
            "auto instead."
        )
    return device


def gpu_of_process(index: int, *, shared: bool) -> str:
    """Return the GPU, ``cuda:N``, of the process with this index on its machine: in turn if GPUs are ``shared``.

    Raises:
        ConfigurationError: if there is none left that is not shared, as NCCL refuses a second process on the same GPU.
    """
    import torch

    count = torch.cuda.device_count()
    if index >= count and not shared:
        raise ConfigurationError(
            f"Process {index + 1} on this machine needs a GPU of its own for NCCL, but torch sees {count}. Start "
            f"{count} with torchrun --nproc-per-node {count}, use --transport tcp without --replica-size, which lets "
            "replicas share a GPU, or --device cpu."
        )
    return f"cuda:{index % count}"


def use_device(name: str) -> torch.device:
    """Return the device called ``name`` as `choose_device` does, and make it the current one of torch if it is a GPU.

    Libraries load quantised weights to the current GPU, and NCCL and pinned memory use it.
    """
    import torch

    device = choose_device(name)
    if device.type == "cuda" and device.index is not None:  # without an index it is the current one
        torch.cuda.set_device(device)
    return device


def choose_threads(processes: int = 1) -> None:
    """Use at most this process's share of the cores, unless the user has chosen a number (OMP_NUM_THREADS).

    Args:
        processes: the number of processes that compute on this machine at the same time, including this one.
    """
    import torch

    # MKL chooses the kernel of a function at its first call. If two threads make that call at once, one of them may get
    # another kernel, with other last bits, so one thread makes it here.
    for function in (torch.exp, torch.log, torch.cos, torch.sin, torch.tanh, torch.erf):
        for dtype in (torch.float32, torch.float64):
            function(torch.ones(1, dtype=dtype, device="cpu"))

    if not threads_are_chosen(os.environ) and torch.get_num_threads() > share(processes):
        torch.set_num_threads(share(processes))


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``values`` on ``device``. The copy to a GPU is asynchronous: the host does not wait for it.

    It goes through pinned memory, because the host would block on a copy from pageable memory. It is queued after the
    previous step, before all later work, and takes 20 microseconds per megabyte on PCIe 5.
    """
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.contiguous().pin_memory().to(device, non_blocking=True)


def to_host(values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` in host memory, which is pinned if they are on a GPU. The host waits for the current stream."""
    import torch

    if not values.is_cuda:
        return values.cpu()
    host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    host.copy_(values, non_blocking=True)
    torch.cuda.current_stream(values.device).synchronize()
    return host


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a GPU for what threads do beside the training.

    It is one for all of them, because torch keeps the memory that was freed on a stream for that stream.
    """
    import torch

    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's stub


def beside_training(device: torch.device) -> AbstractContextManager[Any]:
    """Use `side_stream` inside a ``with`` block, in the current thread; on a CPU there is nothing to do."""
    import torch

    return torch.cuda.stream(side_stream(device)) if device.type == "cuda" else nullcontext()


def known_peak_flops_per_s(device_name: str, precision: str, matmul_precision: str = "highest") -> float | None:
    """Return the peak rate of a device for dense matrix products, in operations per second, or None if it is unknown.

    Args:
        device_name: the name from ``torch.cuda.get_device_name``.
        precision: the precision of the products, as in ``train.precision``.
        matmul_precision: torch's precision of float32 products (``torch.get_float32_matmul_precision``).

    >>> known_peak_flops_per_s("NVIDIA H200", "bfloat16"), known_peak_flops_per_s("NVIDIA L4", "float32", "high")
    (989000000000000.0, 60000000000000.0)
    >>> [known_peak_flops_per_s(f"NVIDIA {name}", "bfloat16") for name in ("A1000", "GeForce RTX 4090 Laptop GPU")]
    [None, None]
    """
    for name, half, tf32, float32 in PEAKS:
        if re.search(rf"(?<![A-Za-z0-9])({name})(?![A-Za-z0-9]| Laptop)", device_name):
            if precision != "float32":
                return half * TERA
            return (float32 if matmul_precision == "highest" else tf32) * TERA
    return None


def flops_utilization(flops: float, seconds: float, peak_flops_per_s: float | None) -> float | None:
    """Return the model FLOPs utilisation (MFU; PaLM, arXiv:2204.02311, appendix B).

    The result is None if the peak is unknown or ``seconds`` is not positive.

    >>> flops_utilization(5e13, 0.1, 1e15), flops_utilization(5e13, 0.1, None)
    (0.5, None)
    """
    if peak_flops_per_s is None or seconds <= 0:
        return None
    return flops / seconds / peak_flops_per_s


def release_memory() -> None:
    """Return memory that was freed to the system; glibc keeps it, in pieces that later allocations do not fit."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)
