"""CPU cores: how many a process may use, how many are its share, and how its OpenMP threads wait for each other.

This module must not import torch: OpenMP reads its environment variables when torch loads it.
"""

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from pathlib import Path

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_ROOT = Path("/")
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
    with contextlib.suppress(OSError):
        topology = root / "sys/devices/system/cpu" / f"cpu{number}" / "topology"
        return (topology / "thread_siblings_list").read_text().strip()
    return str(number)


def _quotas(root: Path) -> Iterable[int]:
    """Yield the CPU quota, in whole cores, of this process's control group and of its parents (cgroup v1 and v2)."""
    groups = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            home = groups / "cpu" if controllers else groups
            inner = home / name.lstrip("/")  # in a container this may be a path of the host that doesn't exist here
            for group in (inner, *inner.parents):
                yield from _allowed(group)
                if group == home:
                    break


def _allowed(group: Path) -> Iterable[int]:
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(quota) > 0:  # "max" and -1 mean no limit
            yield int(quota) // int(period)
