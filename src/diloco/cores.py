"""The processor's cores: how many a process may use, what its share is, and how its threads wait for each other.

No torch here: what OpenMP is to know has to be in the environment before torch loads it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from pathlib import Path

__all__ = ["choose_share", "choose_waiting", "share", "threads_are_chosen", "usable_cores"]

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_ROOT = Path("/")
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_SPINS = 1000
"""How often libgomp's threads look again before they sleep: some 20 to 50 us, longer than the gap between most parallel
regions, and far shorter than the time slice of another program. Its own default is 300,000 (see benchmarks/cores)."""


def choose_waiting(environment: MutableMapping[str, str]) -> None:
    """Let OpenMP's threads sleep soon where they wait, so that they don't hold a core that somebody else could use.

    To be called before torch is loaded, in a process that is ours. What the user has chosen stays.

    >>> environment = {"OMP_WAIT_POLICY": "ACTIVE"}
    >>> choose_waiting(environment)
    >>> environment
    {'OMP_WAIT_POLICY': 'ACTIVE'}
    """
    if not any(name in environment for name in _WAITING):
        environment["GOMP_SPINCOUNT"] = str(_SPINS)


def choose_share(environment: MutableMapping[str, str], processes: int) -> None:
    """Give a process that is started together with others, ``processes`` in all, its share of the cores.

    What the user has chosen stays.
    """
    if not threads_are_chosen(environment):
        environment["OMP_NUM_THREADS"] = str(share(processes))


def threads_are_chosen(environment: Mapping[str, str]) -> bool:
    """Whether the environment says how many threads there are to be."""
    return any(environment.get(name) for name in _THREADS)


def share(processes: int) -> int:
    """The most threads for each of so many processes that compute at the same time on this machine; at least 1.

    One that is alone may use both hardware threads of a core, where OpenMP chooses so; several get whole cores.
    """
    if processes == 1:
        return max(1, min([len(_processors()), *_quotas(_ROOT)]))
    return max(1, usable_cores() // processes)


def usable_cores(root: Path = _ROOT) -> int:
    """Cores that this process may use, at least 1: those that it may be scheduled on, two hardware threads of one core
    counted once, and no more than the processor time that its control group is allowed.

    Args:
        root: of the file system in which the kernel describes the machine.
    """
    cores = len({_siblings(root, number) for number in _processors()})
    return max(1, min([cores, *_quotas(root)]))


def _processors() -> Collection[int]:
    """Numbers of the hardware threads that this process may be scheduled on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _siblings(root: Path, number: int) -> str:
    """The hardware threads of the core of one of them; its own number where the kernel doesn't say."""
    with contextlib.suppress(OSError):
        topology = root / "sys/devices/system/cpu" / f"cpu{number}" / "topology"
        return (topology / "thread_siblings_list").read_text().strip()
    return str(number)


def _quotas(root: Path) -> Iterable[int]:
    """Whole cores that the control group of this process and those around it allow, of either version."""
    groups = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            home = groups / "cpu" if controllers else groups
            inner = home / name.lstrip("/")  # in a container this may be a path of the host, which isn't there
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
        if int(quota) > 0:  # "max" and -1 are no limit
            yield int(quota) // int(period)
