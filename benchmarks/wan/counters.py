"""Counters of the kernel. The rivals' workers import this module, so it must not import ``diloco``."""

import os
from collections.abc import Collection
from pathlib import Path

DEVICE = "wan0"
"""The network interface of every node."""


def interface_bytes(table: str | None = None, device: str = DEVICE) -> tuple[int, int]:
    """Return the bytes received and sent by an interface, headers included.

    Args:
        table: the content of /proc/net/dev; None: that of this process's network namespace.

    Raises:
        LookupError: if there is no such interface.

    >>> interface_bytes("header\\n  wan0:  12 1 0 0 0 0 0 0   34 1 0 0 0 0 0 0\\n")
    (12, 34)
    """
    if table is None:
        table = Path("/proc/net/dev").read_text(encoding="ascii")
    for line in table.splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == device:
            words = counters.split()
            return int(words[0]), int(words[8])
    raise LookupError(f"There is no interface {device} here. Start the worker inside a node of the emulated network.")


def busy_s() -> float:
    """Return the CPU seconds that all cores have worked, or that the host took from them (steal), since the boot."""
    ticks = [int(word) for word in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]]
    idle, waiting = ticks[3], ticks[4]
    return (sum(ticks[:8]) - idle - waiting) / os.sysconf("SC_CLK_TCK")


def sessions_s(sessions: Collection[int]) -> float:
    """Return the CPU seconds of all living processes of these sessions (named by their first processes)."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has ended
        if int(fields[3]) in sessions:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
