"""SIGINT and SIGTERM: the first asks the run to save and stop after the step, a second ends the process at once.

A batch system sends SIGTERM to every process, and ``torchrun`` passes it on to those that have it already: a SIGTERM
that follows a SIGTERM at once is the same request.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["StopAsked", "StopRequest"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ECHO_S = 5.0


class StopAsked(Exception):
    """Somebody asks to stop while the run waits for what may take long."""


class StopRequest:
    """While entered, ``signal`` is None until somebody asks to stop, then the signal's name.

    Outside the main thread, where Python takes no signals, nothing is installed.

    Args:
        asked: called once, in the moment somebody asks.

    >>> with StopRequest() as stop:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     stop.signal
    'SIGTERM'
    """

    def __init__(self, asked: Callable[[], None] = lambda: None) -> None:
        self.signal: str | None = None
        self._asked = asked
        self._interrupts = False
        self._asked_s = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def ask(self, why: str) -> None:
        """Stop as if a signal named ``why`` had come, if none has."""
        self.signal = self.signal or why

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Inside, a request to stop raises `StopAsked`, also one that came before. For waits that change nothing."""
        self._interrupts = True
        try:
            self._raise_if_asked()
            yield
        finally:
            self._interrupts = False

    def _raise_if_asked(self) -> None:
        if self.signal is not None:
            raise StopAsked

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._asked_s = signal.Signals(number).name, time.monotonic()
            self._asked()
            if self._interrupts:
                raise StopAsked
            return
        if number == signal.SIGTERM and self.signal == "SIGTERM" and time.monotonic() - self._asked_s < _ECHO_S:
            return
        # A live display hides the cursor; nothing else runs after this line.
        os.write(
            sys.__stderr__.fileno() if sys.__stderr__ else 2, b"\x1b[?25hstopped at once; nothing more was saved\n"
        )
        os._exit(130)
