"""What a process computes with: its share of the cores, a device chosen by name, copies to and from it, its peak rate.

This module must not import torch when it is loaded: OpenMP reads its environment variables when torch loads it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import re
import sys
import threading
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from diloco.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

Precision: TypeAlias = Literal["float32", "bfloat16", "float16"]
"""The types of weights in files and of products that can be asked for."""

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_ROOT = Path("/")
_HUGE_BYTES = 1 << 25  # smaller blocks the C library keeps, so that their pages are not new when they are used again
_HUGE_PAGE_BYTES, _MAX_KEPT_BYTES = 1 << 21, 1 << 28
_spare_blocks: deque[mmap.mmap] = deque(maxlen=2)  # of sizes between these, which no tensor uses any more
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_SPINS = 1000
"""The number of times that a waiting libgomp thread polls before it sleeps. This takes about 20 to 50 us: longer than
the gap between most parallel regions, and far shorter than another program's time slice. libgomp's default is 300,000
(see benchmarks/cores)."""


def set_wait_policy(environment: MutableMapping[str, str]) -> None:
    """Make waiting OpenMP threads sleep soon, so that they don't occupy a core that another program could use.

    Call this before torch is loaded, and only in a process of this package. A choice that the user has made in
    ``environment`` stays.

    >>> environment = {"OMP_WAIT_POLICY": "ACTIVE"}
    >>> set_wait_policy(environment)
    >>> environment
    {'OMP_WAIT_POLICY': 'ACTIVE'}
    """
    if not any(name in environment for name in _WAITING):
        environment["GOMP_SPINCOUNT"] = str(_SPINS)


def set_thread_share(environment: MutableMapping[str, str], processes: int) -> None:
    """Set the number of OpenMP threads to the share of one of ``processes`` processes, unless the user has set it."""
    if not threads_are_chosen(environment):
        environment["OMP_NUM_THREADS"] = str(share(processes))


def threads_are_chosen(environment: Mapping[str, str]) -> bool:
    """Return whether ``environment`` sets the number of threads."""
    return any(environment.get(name) for name in _THREADS)


def share(processes: int) -> int:
    """Return the largest number of threads for each of ``processes`` that compute at once on this machine; at least 1.

    A single process may use both hardware threads of a core if OpenMP chooses to; several processes get whole cores.
    """
    if processes == 1:
        return max(1, min([len(_processors()), *_quotas(_ROOT)]))
    return max(1, usable_cores() // processes)


def usable_cores(root: Path = _ROOT) -> int:
    """Return the number of cores that this process may use, at least 1.

    These are the physical cores in its scheduling affinity, limited by the CPU quota of its control groups.

    Args:
        root: the root of the file system that holds the kernel's ``/proc`` and ``/sys``.
    """
    cores = len({_siblings(root, number) for number in _processors()})
    return max(1, min([cores, *_quotas(root)]))


def _processors() -> Collection[int]:
    """Return the numbers of the hardware threads in this process's scheduling affinity."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _siblings(root: Path, number: int) -> str:
    """Return an identifier of the core of hardware thread ``number``: the kernel's list of the core's threads, or
    ``number`` itself if the kernel doesn't report the list."""
    with suppress(OSError):
        topology = root / "sys/devices/system/cpu" / f"cpu{number}" / "topology"
        return (topology / "thread_siblings_list").read_text().strip()
    return str(number)


def _quotas(root: Path) -> Iterable[int]:
    """Yield the CPU quota, in whole cores, of this process's control group and of its parents (cgroup v2)."""
    home = root / "sys/fs/cgroup"
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        name = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "")
        inner = home / name.lstrip("/")  # in a container this may be a path of the host that doesn't exist here
        for group in (inner, *inner.parents):
            with suppress(OSError, ValueError):  # "max" means no limit
                quota, period = (group / "cpu.max").read_text().split()
                yield int(quota) // int(period)
            if group == home:
                break


TERA = 1e12

PEAKS: tuple[tuple[str, float, float], ...] = (
    # name pattern, half precision (bfloat16 if supported), float32; the first matching row counts
    ("B200", 2250, 75),
    ("H100 NVL|H200 NVL", 835, 60),
    ("H100 PCIe", 756, 51),
    ("H100|H800|H200|GH200", 989, 67),
    ("A100|A800", 312, 19.5),
    ("L40S", 362, 91.6),
    ("L40", 181, 90.5),
    ("L4", 121, 30.3),
    ("A40", 150, 37.4),
    ("A10", 125, 31.2),
    ("V100", 125, 15.7),
    ("T4", 65, 8.1),
    ("RTX 4090", 165, 82.6),
    ("RTX 3090", 71, 35.6),
    ("MI300X", 1307, 163),
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
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if apple else "cpu")
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


def empty(numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return ``(numel,)`` uninitialised values. Large ones on a CPU are in huge pages where the system has them.

    The first use of a page takes longer than what is done with it, and a round needs new memory each time. So the last
    two blocks of up to 256 MiB are kept to be used again, unless the system needs their pages.
    """
    import numpy as np
    import torch

    num_bytes = numel * dtype.itemsize
    if num_bytes < _HUGE_BYTES or torch.device(device).type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(numel, dtype=dtype, device=device)
    size = -(-num_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    block = _spare_block(size) or _new_block(size)
    values = np.frombuffer(block, dtype=np.uint8)
    if size <= _MAX_KEPT_BYTES:
        weakref.finalize(values, _give_back, block).atexit = False  # once no tensor uses them
    return torch.from_numpy(values[:num_bytes]).view(dtype)


def _new_block(size: int) -> mmap.mmap:
    block = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _spare_block(size: int) -> mmap.mmap | None:
    for block in [block for block in tuple(_spare_blocks) if len(block) == size]:
        with suppress(ValueError):  # another thread has just taken it
            _spare_blocks.remove(block)
            return block
    return None


def _give_back(block: mmap.mmap) -> None:
    with suppress(OSError):  # the system may take its pages
        block.madvise(mmap.MADV_FREE)
    _spare_blocks.append(block)


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


_EAGER_LOCK = threading.Lock()
_eager_users, _eager = 0, ExitStack()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run what `torch.compile` has compiled as it is, in all threads until the last of them has left such a block.

    torch's stance is one for the process, and whoever leaves sets it to what it was when they came: two threads that
    overlap would leave everything uncompiled for ever.
    """
    global _eager_users
    if "torch._dynamo" not in sys.modules:  # nothing is compiled without it, and importing it takes long
        yield
        return
    import torch

    with _EAGER_LOCK:
        if not _eager_users:
            _eager.enter_context(torch.compiler.set_stance("force_eager"))
        _eager_users += 1
    try:
        yield
    finally:
        with _EAGER_LOCK:
            _eager_users -= 1
            if not _eager_users:
                _eager.close()


def known_peak_flops_per_s(device_name: str, precision: str) -> float | None:
    """Return the peak rate of a device for dense matrix products, in operations per second, or None if it is unknown.

    Args:
        device_name: the name from ``torch.cuda.get_device_name``.
        precision: the precision of the products, as in ``train.precision``.

    >>> known_peak_flops_per_s("NVIDIA H200", "bfloat16"), known_peak_flops_per_s("NVIDIA L4", "float32")
    (989000000000000.0, 30300000000000.0)
    >>> [known_peak_flops_per_s(f"NVIDIA {name}", "bfloat16") for name in ("A1000", "GeForce RTX 4090 Laptop GPU")]
    [None, None]
    """
    for name, half, float32 in PEAKS:
        if re.search(rf"(?<![A-Za-z0-9])({name})(?![A-Za-z0-9]| Laptop)", device_name):
            return (float32 if precision == "float32" else half) * TERA
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
