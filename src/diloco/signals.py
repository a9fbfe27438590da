"""The signals that stop a process.

The first SIGINT or SIGTERM asks a run to save and stop, a second one ends the process at once. A batch system sends
SIGTERM to every process, and ``torchrun`` forwards it to processes that already have it, so a SIGTERM after another one
counts as the same request. Before a run has anything to save, the first one ends it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)

_STUCK_S = 5.0
_ENDS = threading.Lock()


class StopAsked(Exception):
    """Raised in a long wait if the user asks to stop."""


class StopRequest:
    """A context that records a request to stop: ``signal`` is None before the request, then the signal's name.

    Outside the main thread, where Python can't handle signals, it does nothing. ``asked`` is called once, in a thread
    of its own, as soon as the first signal arrives, whatever the main thread does.
    """

    def __init__(
        self, asked: Callable[[], None] = lambda: None, *, numbers: Sequence[signal.Signals] = SIGNALS
    ) -> None:
        self.signal: str | None = None
        self._asked = asked
        self._numbers = numbers
        self._raises: type[BaseException] = StopAsked
        self._interrupts = False
        self._first = 0
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
            for number in self._numbers:
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
    def interrupting(self, raises: type[BaseException] = StopAsked) -> Iterator[None]:
        """Raise `StopAsked` in the block on a request to stop, even an earlier one. The block must not change state."""
        self._interrupts, self._raises = True, raises
        try:
            if self.signal is not None:
                raise raises
            yield
        finally:
            self._interrupts = False

    def _watch(self, signals: int) -> None:
        """Watch for signals in a thread, because Python handles none while the main thread waits in a C library.

        It may also call what a handler must not, such as functions that take locks.
        """
        first = 0
        with os.fdopen(signals, "rb", buffering=0) as pipe:
            while number := int.from_bytes(pipe.read(1)):
                if number not in SIGNALS or signal.getsignal(number) != self._handle:
                    continue  # another part of the process has taken over
                if not first:
                    first = number
                    self._asked()
                elif not _is_echo(first, number) and self._pipe:
                    _end()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._first = signal.Signals(number).name, number
            if self._interrupts:
                raise self._raises
        elif not _is_echo(self._first, number):
            _end()


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block on SIGTERM, as Python does on SIGINT, until other handlers take over.

    Process 1 of a container would ignore it otherwise. If the main thread is in a library that does not return, such as
    one that reads all text, the process ends after `_STUCK_S`, well before a container is killed.
    """

    def end_if_stuck() -> None:
        time.sleep(_STUCK_S)
        if stop.signal is None:
            _end()

    stop = StopRequest(lambda: threading.Thread(target=end_if_stuck, daemon=True).start(), numbers=(signal.SIGTERM,))
    with stop, stop.interrupting(KeyboardInterrupt):
        yield


def _is_echo(first: int, number: int) -> bool:
    return first == number == signal.SIGTERM


def _end() -> None:
    _ENDS.acquire()  # never released: the handler and the watching thread may both come here
    # a live display hides the cursor, and no other code runs after this
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"\x1b[?25hstopped at once; nothing more was saved\n")
    os._exit(130)
