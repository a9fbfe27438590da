"""What surrounds the machine of a rank: it is called by one at a time, and its effects are carried out."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ParamSpec

from diloco.errors import TransportError
from diloco.protocol import Effects, MessageError, Timer
from diloco.transport.connections.connection_manager import ConnectionManager

P = ParamSpec("P")

Acts = list[tuple[Callable[..., object], Iterable[tuple[Any, ...]]]]
"""Functions, each with the arguments of its calls."""


class Shell:
    """Runs the machine in the control thread and under a lock; other threads read its state under the same lock.

    Args:
        acts: returns what carries out effects, but for timers.
    """

    def __init__(self, connections: ConnectionManager, acts: Callable[[Effects], Acts]) -> None:
        self.machine = connections.machine
        self.changed = threading.Condition()  # its lock guards the machine; notified after each call
        self.left = ""  # that this rank has closed its transport; "": it has not
        self._connections = connections
        self._acts = acts
        self._timers: dict[Timer, asyncio.TimerHandle] = {}

    # For any thread.

    def post(self, act: Callable[P, None], *arguments: P.args, **more: P.kwargs) -> None:
        self._connections.post(partial(self.handle, act, *arguments, **more))

    def call(self, timeout_s: float | None, act: Callable[P, None], *arguments: P.args, **more: P.kwargs) -> None:
        """Call the machine, and wait until the effects are carried out.

        Raises:
            TransportError: The connections are closed, or an internal error has ended them.
            TimeoutError: It takes longer than ``timeout_s``.
        """

        async def handle() -> None:
            self.handle(act, *arguments, **more)
            if self._connections.fault:
                raise TransportError(self._connections.fault)

        self._connections.call(handle(), timeout_s)

    def wait_for(self, predicate: Callable[[], object], timeout_s: float) -> None:
        """Wait until ``predicate`` holds, at most ``timeout_s``. It is evaluated after each call."""
        connections, most_s = self._connections, min(timeout_s, threading.TIMEOUT_MAX)
        with self.changed:
            self.changed.wait_for(lambda: self.left or connections.fault or predicate(), most_s)
            if connections.fault or self.left:
                raise TransportError(connections.fault or f"{self.left}. It stops waiting.")

    def fail(self, error: BaseException | None) -> None:
        self._connections.post(self._connections.fail, error)

    def leave(self, why: str) -> None:
        """Let all who wait learn that this rank has closed its transport."""
        with self.changed:
            self.left = why
            self.changed.notify_all()

    # In the control thread.

    def handle(self, act: Callable[P, None], *arguments: P.args, **more: P.kwargs) -> None:
        """Call the machine, and carry out all effects, whatever happens to one of them.

        Raises:
            MessageError: A malformed message was received. Any other error ends this transport.
        """
        if self._connections.fault:
            self._connections.on_fault()  # for a round that has begun since
            return
        try:
            with self.changed:
                effects = self.machine.handle(time.monotonic(), act, *arguments, **more)
                self.changed.notify_all()
        except Exception as error:
            if act == self.machine.receive and isinstance(error, MessageError):
                raise
            self._connections.fail(error)
            return
        errors = []
        for carry_out, many in [*self._acts(effects), (self._set_timer, effects.timers.items())]:
            for each in many:
                try:
                    carry_out(*each)
                except Exception as error:
                    errors.append(error)
        if errors:
            self._connections.fail(errors[0])

    def _set_timer(self, timer: Timer, delay_s: float | None) -> None:
        if handle := self._timers.pop(timer, None):
            handle.cancel()
        if delay_s is not None:
            self._timers[timer] = self._connections.loop.call_later(delay_s, self._fire, timer)

    def _fire(self, timer: Timer) -> None:
        self._timers.pop(timer, None)
        self.handle(self.machine.fire, timer)
