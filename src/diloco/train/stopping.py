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

__all__ = ["StopAsked", "StopRequest", "is_echo"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ECHO_S = 5.0  # a launcher passes a signal on within this time
HANDLED_S = 1.0  # a second signal's handler has this long to end the process by itself


class StopAsked(Exception):
    """Somebody asked to stop during a long wait."""


class StopRequest:
    """While entered, ``signal`` is None until somebody asks to stop, and then the signal's name.

    Outside the main thread, where Python takes no signals, nothing is installed.

    Args:
        asked: called once, at the moment somebody asks.

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
        self._pipe: tuple[int, int] | None = None
        self._wakeup_before = -1

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._pipe = os.pipe()
            if sys.platform != "win32":  # which needs no such pipe, and before Python 3.12 can't make one
                os.set_blocking(self._pipe[1], False)
            self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=self._pipe[:1], name="diloco-signals", daemon=True).start()
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._pipe is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(self._pipe[1])  # the watch ends with it
            self._pipe = None

    def ask(self, why: str) -> None:
        """Stop as if a signal named ``why`` had come, if none has."""
        self.signal = self.signal or why

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Inside, a request to stop raises `StopAsked`, even one that came before. For waits that change nothing."""
        self._interrupts = True
        try:
            if self.signal is not None:
                raise StopAsked
            yield
        finally:
            self._interrupts = False

    def _watch(self, signals: int) -> None:
        """In a thread: Python handles signals in the main thread, and not while that waits inside a C library."""
        first, first_s = "", 0.0
        with os.fdopen(signals, "rb", buffering=0) as pipe:
            while number := int.from_bytes(pipe.read(1)):
                if number in SIGNALS and not first:
                    first, first_s = signal.Signals(number).name, time.monotonic()
                elif number in SIGNALS and not is_echo(number, first, time.monotonic() - first_s):
                    time.sleep(HANDLED_S)  # in which the handler ends the process, if it can
                    if self._pipe is not None:
                        _end()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._asked_s = signal.Signals(number).name, time.monotonic()
            self._asked()
            if self._interrupts:
                raise StopAsked
            return
        if not is_echo(number, self.signal, time.monotonic() - self._asked_s):
            _end()


def is_echo(number: int, first: str, later_s: float) -> bool:
    """Whether a signal that came so much later than the ``first`` is the same request."""
    return number == signal.SIGTERM and first == "SIGTERM" and later_s < ECHO_S


def _end() -> None:
    # A live display hides the cursor; nothing else runs after this line.
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"\x1b[?25hstopped at once; nothing more was saved\n")
    os._exit(130)
