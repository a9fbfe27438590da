"""Handling of SIGINT and SIGTERM: the first one asks the run to save and stop, a second one ends the process at once.

A batch system sends SIGTERM to every process, and ``torchrun`` forwards it to processes that already have it. A SIGTERM
shortly after another SIGTERM therefore counts as the same request.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

__all__ = ["StopAsked", "StopRequest", "is_echo"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ECHO_S = 5.0  # a launcher forwards a signal within this time
HANDLED_S = 1.0  # the handler of a second signal has this long to end the process


class StopAsked(Exception):
    """Raised in a long wait if the user asks to stop."""


class StopRequest:
    """A context that records a request to stop: ``signal`` is None before the request, then the signal's name.

    Outside the main thread, where Python can't handle signals, it does nothing. ``asked`` is called once, in a thread
    of its own, as soon as the first signal arrives, whatever the main thread does.
    """

    def __init__(self, asked: Callable[[], None] = lambda: None) -> None:
        self.signal: str | None = None
        self._asked = asked
        self._interrupts = False
        self._first = (0, 0.0)  # the first signal and when it came
        self._before: dict[signal.Signals, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._wakeup_before = -1

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._pipe = os.pipe()
            if sys.platform != "win32":  # Windows needs no such pipe, and can't make one before Python 3.12
                os.set_blocking(self._pipe[1], False)
            self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=self._pipe[:1], name="diloco-signals", daemon=True).start()
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._pipe is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(self._pipe[1])  # this ends the watching thread
            self._pipe = None

    def ask(self, why: str) -> None:
        """Request a stop as if a signal named ``why`` had arrived, unless a stop was already requested."""
        self.signal = self.signal or why

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise `StopAsked` in the block on a request to stop, even an earlier one. The block must not change state."""
        self._interrupts = True
        try:
            if self.signal is not None:
                raise StopAsked
            yield
        finally:
            self._interrupts = False

    def _watch(self, signals: int) -> None:
        """Watch for signals in a thread, because Python handles none while the main thread waits in a C library.

        It may also call what a handler must not, such as functions that take locks.
        """
        first: tuple[int, float] | None = None
        with os.fdopen(signals, "rb", buffering=0) as pipe:
            while number := int.from_bytes(pipe.read(1)):
                if number in SIGNALS and first is None:
                    first = number, time.monotonic()
                    self._asked()
                elif number in SIGNALS and first and not is_echo(number, first, time.monotonic()):
                    time.sleep(HANDLED_S)  # meanwhile the handler ends the process, if it can run
                    if self._pipe is not None:
                        _end()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._first = signal.Signals(number).name, (number, time.monotonic())
            if self._interrupts:
                raise StopAsked
        elif not is_echo(number, self._first, time.monotonic()):
            _end()


def is_echo(number: int, first: tuple[int, float], now_s: float) -> bool:
    """Return whether a signal that arrives at ``now_s`` belongs to the same request as the ``first`` and its time."""
    return number == first[0] == signal.SIGTERM and now_s - first[1] < ECHO_S


def _end() -> None:
    # a live display hides the cursor, and no other code runs after this
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"\x1b[?25hstopped at once; nothing more was saved\n")
    os._exit(130)
