"""The control thread of a rank: an event loop, which hands events to the machine and carries out their effects.

Closing it ends its tasks and the connections that were opened in it. So does an internal error in a task or a callback:
whoever waits for it learns the reason at once, and other processes see that this one is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import selectors
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import CancelledError
from typing import Any, TypeVar
from weakref import WeakSet

from diloco.errors import TransportError
from diloco.protocol import Effects, Event, LoggedMachine, Machine, MessageError, Received, Rules, Timer, TimerFired
from diloco.transport.connections.sockets import raw_transport
from diloco.transport.connections.streams import Stream, within
from diloco.waiting import elapsed_s

T = TypeVar("T")

Acts = list[tuple[Callable[..., object], Iterable[tuple[Any, ...]]]]
"""Functions, each with the arguments of its calls."""

_LOG = logging.getLogger(__name__)

CLOSING_S = 8.0  # tasks that hang for longer, on a dead network or a busy thread, end with the process
CANCELLING_S = 1.0
_ROUNDS_OF_ENDING = 5


class _Selector(selectors.DefaultSelector):
    """Looks again after each wait, as the process may have been stopped at its end, and more has arrived since.

    A timer that runs before that was read may write to a connection that the other end has closed. asyncio then
    discards what had arrived over it, such as why, and the other process is taken for crashed.
    """

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout != 0:
            super().select(timeout)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    """Notices that the machine was suspended, as others that it does not hear any more may have gone on meanwhile."""

    def time(self) -> float:
        return elapsed_s()


class ControlThread:
    """A daemon thread with an event loop, running when the constructor returns.

    The machine takes in events under a lock; other threads read its state under the same lock.

    Args:
        acts: what carries out effects, but for timers.
        on_fault: called in this thread after `fault` is set, and after each later event.
    """

    def __init__(
        self,
        rules: Rules,
        acts: Callable[[Effects], Acts] = lambda effects: [],
        on_fault: Callable[[], object] = lambda: None,
    ) -> None:
        self.rules, self.rank = rules, rules.rank  # of this process
        self.machine = Machine(rules)
        if _LOG.isEnabledFor(logging.DEBUG):
            self.machine = LoggedMachine(rules, lambda words, each: _LOG.debug("%s", words, extra={"fields": each}))
        self.changed = threading.Condition()  # its lock guards the machine; notified after each event
        self.left = ""  # why this rank has closed its transport; "": it has not
        self.fault = ""  # the internal error that has ended all connections; "": none
        self._acts, self._on_fault = acts, on_fault
        self._closing = False
        self._calling = threading.Lock()  # held while a call is put to the loop, which closes with none left
        self._timers: dict[Timer, asyncio.TimerHandle] = {}
        self._ending: asyncio.Task[None] | None = None
        self.transports: WeakSet[asyncio.WriteTransport] = WeakSet()  # of connections that are still referenced
        self.loop = _Loop(_Selector())
        self.loop.set_exception_handler(self._log_failure)
        self._thread = threading.Thread(target=self._run, name=f"diloco-control-{self.rank}", daemon=True)
        self._thread.start()

    # From any thread.

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run ``coroutine`` in this thread and wait for its result.

        Raises:
            TransportError: This thread has ended, or ends in the meantime, possibly because of an internal error.
            TimeoutError: The coroutine took longer than ``timeout_s`` and was cancelled.
        """
        if self.fault:
            coroutine.close()
            raise TransportError(self.fault)
        try:
            with self._calling:
                future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        except RuntimeError as error:
            coroutine.close()
            raise TransportError(f"the connections of rank {self.rank} are closed. Nothing was done.") from error
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise
        except CancelledError as error:
            why = self.fault or f"the connections of rank {self.rank} were closed in the meantime."
            raise TransportError(why) from error

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call ``function`` soon in this thread, once what has arrived until now was read; see `_Selector`.

        Nothing happens if the thread has ended.
        """
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.loop.call_soon, function, *arguments)

    def post_event(self, event: Event) -> None:
        """Let the machine take in an event soon."""
        self.post(self.handle, event)

    def call_event(self, event: Event, timeout_s: float | None = None) -> None:
        """Let the machine take in an event, and wait until its effects are carried out. Errors are those of `call`."""

        async def handle() -> None:
            self.handle(event)
            if self.fault:
                raise TransportError(self.fault)

        self.call(handle(), timeout_s)

    def note(self, event: Event) -> None:
        """Let the machine take in an event at once; it has no effects."""
        with self.changed:
            self.machine.handle(self.loop.time(), event)

    def wait_for(self, predicate: Callable[[], object], timeout_s: float) -> None:
        """Wait until ``predicate`` holds, at most ``timeout_s``. It is evaluated after each event."""
        with self.changed:
            self.changed.wait_for(lambda: self.left or self.fault or predicate(), min(timeout_s, threading.TIMEOUT_MAX))
            if self.fault or self.left:
                raise TransportError(self.fault or f"{self.left}. It stops waiting.")

    def close(self) -> None:
        """End everything that runs in this thread, and the thread, within seconds, whatever the network does."""
        if self.loop.is_closed():
            return
        if not self._closing:
            self._closing = True
            asyncio.run_coroutine_threadsafe(self._end_and_stop(), self.loop)
        self._thread.join(2 * CLOSING_S)
        if self._thread.is_alive():  # busy; it ends once it is idle
            return
        with self._calling:
            self.loop.run_until_complete(self._end_tasks())  # tasks of calls that arrived at the last moment
            self.loop.close()

    # In this thread.

    def handle(self, event: Event) -> Effects:
        """Let the machine take in an event, and carry out all effects, whatever happens to one of them.

        Return them, as whoever sends heartbeats carries out what follows from these.

        Raises:
            MessageError: A malformed message was received. Any other error ends this thread's connections.
        """
        if self.fault:
            self._on_fault()  # for a round that has begun since
            return Effects()
        try:
            with self.changed:
                effects = self.machine.handle(self.loop.time(), event)
                self.changed.notify_all()
        except Exception as error:
            if isinstance(event, Received) and isinstance(error, MessageError):
                raise
            self.fail(error)
            return Effects()
        errors = []
        for carry_out, many in [*self._acts(effects), (self._set_timer, effects.timers.items())]:
            for each in many:
                try:
                    carry_out(*each)
                except Exception as error:
                    errors.append(error)
        if errors:
            self.fail(errors[0])
        return effects

    def _set_timer(self, timer: Timer, delay_s: float | None) -> None:
        if handle := self._timers.pop(timer, None):
            handle.cancel()
        if delay_s is not None:
            self._timers[timer] = self.loop.call_later(delay_s, self._fire, timer)

    def _fire(self, timer: Timer) -> None:
        self._timers.pop(timer, None)
        self.handle(TimerFired(timer))

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``coroutine`` as a task. An error that ends it is an internal one; see `fail`."""
        task = self.loop.create_task(coroutine)
        task.add_done_callback(self._check)
        return task

    def fail(self, error: BaseException) -> None:
        """End all connections and tasks because of an internal error, so that nobody waits for this process."""
        if self.fault or self._closing:
            return
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        who = "this process" if self.rank < 0 else f"rank {self.rank}"
        self.fault = f"{who} has ended all connections after an internal error ({what}). Please report it."
        _LOG.error("%s", self.fault, exc_info=error)
        self._failing = self.loop.create_task(self.end())
        self._on_fault()

    def keep(self, stream: Stream) -> Stream:
        self.transports.add(raw_transport(stream[1]))
        return stream

    async def end(self) -> None:
        """End all connections, and all tasks but the current one."""
        self._ending = self._ending or self.loop.create_task(self.end_connections())
        await asyncio.wait([self._ending])
        await self._end_tasks()

    async def end_connections(self) -> None:
        """End all connections, including those that still arrive."""

    async def release(self) -> None:
        """Clean up at the end, after each round of cancelled tasks, which may have started something until then."""

    async def _end_and_stop(self) -> None:
        try:
            await within(CLOSING_S, self.end())
        except TimeoutError:
            _LOG.debug("some tasks of the control thread did not end within %g s", CLOSING_S)
        finally:
            self.loop.stop()

    async def _end_tasks(self) -> None:
        await asyncio.sleep(0)
        for _ in range(_ROUNDS_OF_ENDING):
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=CANCELLING_S)
            await self.release()

    def _check(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def _log_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log the failure of a library's task or callback in one line; while closing, as debug. See `fail` for ours."""
        error, callback = context.get("exception"), getattr(context.get("handle"), "_callback", None)
        if error is not None and str(getattr(callback, "__module__", "")).partition(".")[0] == "diloco":
            self.fail(error)
            return
        text = context["message"] if error is None else f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        ended = isinstance(error, (ssl.SSLError, ConnectionError))  # a connection, whose owner has been told
        level = logging.DEBUG if self._closing or ended else logging.WARNING
        _LOG.log(level, "a task of the connections failed: %s", text)
        _LOG.debug("its traceback", exc_info=error)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
