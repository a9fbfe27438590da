"""SIGINT and SIGTERM: the first asks the run to save and stop after the step, a second ends the process at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["StopRequest"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """While entered, ``signal`` is None until somebody asks to stop, then the signal's name.

    Outside the main thread, where Python takes no signals, nothing is installed.

    >>> with StopRequest() as stop:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     stop.signal
    'SIGTERM'
    """

    def __init__(self) -> None:
        self.signal: str | None = None
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

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number).name
            return
        # A live display hides the cursor; nothing else runs after this line.
        os.write(
            sys.__stderr__.fileno() if sys.__stderr__ else 2, b"\x1b[?25hstopped at once; nothing more was saved\n"
        )
        os._exit(130)
