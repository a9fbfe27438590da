"""Work in threads of its own, which the end of the process does not wait for, unless it is told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar
from weakref import WeakSet

from diloco.errors import TransportError

__all__ = ["Mailbox", "Threads", "in_thread"]

T = TypeVar("T")

_MOST_VALUES = 1 << 16
_MOST_BYTES = 1 << 16


def in_thread(function: Callable[[], T], name: str) -> Future[T]:
    """What ``function`` gives or raises.

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
    """Threads that end by themselves, soon after what they wait for has ended.

    They are to be joined before the process ends: one that is inside PyTorch then would abort it.

    >>> threads, heard = Threads(), []
    >>> threads.start(heard.append, "a word", name="listener")
    >>> threads.join(10.0)
    True
    >>> heard
    ['a word']
    """

    def __init__(self) -> None:
        self._running: WeakSet[threading.Thread] = WeakSet()

    def start(self, target: Callable[..., object], *arguments: Any, name: str) -> None:
        """Call ``target`` in another thread."""
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        self._running.add(thread)
        thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait until all have ended, together no longer than this; whether they have."""
        until_s = time.monotonic() + timeout_s
        for thread in list(self._running):
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._running)


class Mailbox:
    """Short values by key, put there by control messages and waited for in other threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._closed = ""

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            if len(self._values) >= _MOST_VALUES or len(key) + len(value) > _MOST_BYTES:
                raise ValueError(f"a mailbox takes {_MOST_VALUES} values of {_MOST_BYTES} bytes")
            self._values[key] = value
            self._changed.notify_all()

    def take(self, key: str, timeout_s: float) -> bytes:
        """The value of ``key``, waiting for it; it stays.

        Raises:
            TransportError: if it does not come in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: key in self._values or self._closed, timeout_s)
            if key not in self._values:
                raise TransportError(f"{key} did not come within {timeout_s:g} s. {self._closed}")
            return self._values[key]

    def forget(self, prefix: str) -> None:
        """Drop what begins with ``prefix``."""
        with self._changed:
            self._values = {key: value for key, value in self._values.items() if not key.startswith(prefix)}

    def close(self, reason: str) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._closed = reason
            self._changed.notify_all()
