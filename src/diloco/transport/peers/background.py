"""Background threads, and a mailbox of the values that they wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, TypeVar
from weakref import WeakSet

from diloco.errors import TransportError

__all__ = ["Mailbox", "Threads", "in_thread"]

T = TypeVar("T")

_MOST_BYTES = 1 << 18
_VALUE_BYTES = 200  # bookkeeping of a value, in addition to its key and content


def in_thread(function: Callable[[], T], name: str) -> Future[T]:
    """Call ``function`` in a daemon thread. The future gets its result or its error.

    >>> in_thread(lambda: 1 + 1, "sum").result()
    2
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class Threads:
    """Background threads that end by themselves, soon after what they wait for has ended.

    They must be joined before the process ends: a thread that is then inside PyTorch would abort the process.

    Args:
        on_error: Called, in the thread, with an error that ends it.

    >>> heard = []
    >>> threads = Threads(heard.append)
    >>> threads.start(int, "a word", name="parser")
    >>> threads.join(10.0)
    True
    >>> heard
    [ValueError("invalid literal for int() with base 10: 'a word'")]
    """

    def __init__(self, on_error: Callable[[BaseException], object]) -> None:
        self._on_error = on_error
        self._running: WeakSet[threading.Thread] = WeakSet()

    def start(self, target: Callable[..., object], *arguments: Any, name: str) -> None:
        """Call ``target`` in another thread."""

        def run() -> None:
            try:
                target(*arguments)
            except BaseException as error:
                self._on_error(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._running.add(thread)
        thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for all threads, at most ``timeout_s`` in total. Return whether all have ended."""
        until_s = time.monotonic() + timeout_s
        for thread in list(self._running):
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._running)


class Mailbox:
    """Short values by key, which control messages deliver and other threads wait for.

    Each sender may keep 256 KiB here. Its oldest values beyond that, which belong to past views, are dropped.

    >>> mailbox = Mailbox()
    >>> for number in range(5):
    ...     mailbox.put(f"key {number}", bytes(60_000), sender=3)
    >>> [key for key in range(5) if mailbox.has(f"key {key}")]
    [1, 2, 3, 4]
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._senders: dict[str, int | None] = {}
        self._closed = ""

    def put(self, key: str, value: bytes, sender: int | None = None) -> None:
        """Store a value from the rank ``sender``; None: from this rank itself, which has no limit."""
        with self._changed:
            self._values.pop(key, None)
            self._senders.pop(key, None)
            self._values[key], self._senders[key] = value, sender
            theirs = [] if sender is None else [each for each, one in self._senders.items() if one == sender]
            excess_bytes = sum(_VALUE_BYTES + len(each) + len(self._values[each]) for each in theirs) - _MOST_BYTES
            for oldest in theirs:
                if excess_bytes > 0:
                    excess_bytes -= _VALUE_BYTES + len(oldest) + len(self._values[oldest])
                    del self._values[oldest], self._senders[oldest]
            self._changed.notify_all()

    def has(self, key: str) -> bool:
        """Return whether there is a value of ``key``."""
        return key in self._values

    def take(self, key: str, timeout_s: float) -> bytes:
        """Wait for the value of ``key`` and return it. The value stays.

        Raises:
            TransportError: It does not arrive within ``timeout_s``, or the mailbox is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: key in self._values or self._closed, timeout_s)
            if key not in self._values:
                raise TransportError(f"{key} did not arrive within {timeout_s:g} s. {self._closed}")
            return self._values[key]

    def forget(self, prefix: str) -> None:
        """Drop the values whose keys begin with ``prefix``."""
        with self._changed:
            self._keep({key for key in self._values if not key.startswith(prefix)})

    def forget_sender(self, sender: int) -> None:
        """Drop the values from a rank that is lost."""
        with self._changed:
            self._keep({key for key, one in self._senders.items() if one != sender})

    def _keep(self, keys: Collection[str]) -> None:
        self._values = {key: value for key, value in self._values.items() if key in keys}
        self._senders = {key: sender for key, sender in self._senders.items() if key in keys}

    def close(self, reason: str) -> None:
        """End all waiting with an error that contains ``reason``."""
        with self._changed:
            self._closed = reason
            self._changed.notify_all()
