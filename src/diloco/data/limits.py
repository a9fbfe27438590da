"""Limits on what a program of somebody else, a chat template, takes in this process.

Jinja's sandbox, in which transformers renders templates, keeps them from files, modules and changes, and a range below
100,000. It limits neither time nor memory.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diloco.errors import ConfigurationError
from diloco.units import format_bytes

_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def limited(what: str, max_s: float, max_bytes: int) -> Iterator[None]:
    """Limit the time that the body takes in this thread and, on Linux, the memory that the process takes for it.

    A single operation that takes long, such as a power of large numbers, ends before it is noticed.

    Raises:
        ConfigurationError: ``what`` takes more.
    """
    try:
        with _ONE_AT_A_TIME, _limited_memory(max_bytes), _limited_time(max_s):
            yield
    except MemoryError as error:
        more = f"needs more than {format_bytes(max_bytes)} of memory for a conversation"
        raise ConfigurationError(f"{what} {more}. Use another.") from error
    except TimeoutError as error:
        raise ConfigurationError(f"{what} takes longer than {max_s:g} s for a conversation. Use another.") from error


@contextmanager
def _limited_time(max_s: float) -> Iterator[None]:
    """Raise `TimeoutError` in this thread when the time is over; no signal, which only the main thread could have."""
    thread, lock, is_done = threading.get_ident(), threading.Lock(), False

    def interrupt() -> None:
        with lock:
            if not is_done:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeoutError))

    timer = threading.Timer(max_s, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            is_done = True
        timer.cancel()


@contextmanager
def _limited_memory(max_bytes: int) -> Iterator[None]:
    """Limit the address space of the process to what it has and ``max_bytes`` more."""
    if sys.platform != "linux":
        yield
        return
    import resource

    before, highest = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + max_bytes
    if before != resource.RLIM_INFINITY:
        limit = min(limit, before)
    resource.setrlimit(resource.RLIMIT_AS, (limit, highest))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, highest))
