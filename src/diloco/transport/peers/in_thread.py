"""One call in a thread of its own, which the end of the process does not wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["in_thread"]

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
