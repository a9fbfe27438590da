"""Work in threads of its own, which the end of the process does not wait for, unless it is told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar
from weakref import WeakSet

__all__ = ["Threads", "in_thread"]

T = TypeVar("T")


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
