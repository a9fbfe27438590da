"""The control thread of a rank: an event loop to which other threads hand work.

It ends with everything in it: tasks, and connections that were opened in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar
from weakref import WeakSet

from diloco.errors import TransportError
from diloco.transport.connections.streams import Stream, within

__all__ = ["ControlThread"]

T = TypeVar("T")

CLOSING_S = 8.0  # whatever has not ended by then ends with the process: a network that no longer answers, a busy thread
CANCELLING_S = 1.0
_ROUNDS_OF_ENDING = 5


class ControlThread:
    """A thread with an event loop, which has begun when the constructor returns."""

    def __init__(self, rank: int) -> None:
        self.rank = rank  # of this process
        self._closing = False
        self._transports: WeakSet[asyncio.WriteTransport] = WeakSet()  # of connections that anything still holds
        self.loop = asyncio.new_event_loop()  # the event loop
        self.loop.set_exception_handler(self._note_failure)
        self._thread = threading.Thread(target=self._run, name=f"diloco-control-{rank}", daemon=True)
        self._thread.start()

    # From any thread.

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run ``coroutine`` in this thread and wait for it.

        Raises:
            TransportError: this thread has ended, or ends meanwhile.
            TimeoutError: it took longer than ``timeout_s``, and was cancelled.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        except RuntimeError as error:
            coroutine.close()
            raise TransportError(f"the connections of rank {self.rank} are closed; nothing was done.") from error
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise
        except CancelledError as error:
            raise TransportError(f"the connections of rank {self.rank} were closed before it was done.") from error

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call ``function`` in this thread soon, unless it has ended."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """End all that runs in this thread, and the thread, within seconds, whatever the network does."""
        if self.loop.is_closed():
            return
        if not self._closing:
            self._closing = True
            asyncio.run_coroutine_threadsafe(self._end_and_stop(), self.loop)
        self._thread.join(2 * CLOSING_S)
        if self._thread.is_alive():  # busy: it ends when it no longer is
            return
        self.loop.run_until_complete(self._end_tasks())  # tasks of calls that came at the last moment
        self.loop.close()

    # In this thread.

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``coroutine``; an error that ends it is logged at once, though nobody waits for it."""
        task = self.loop.create_task(coroutine)
        task.add_done_callback(self._note_end)
        return task

    def keep(self, stream: Stream) -> Stream:
        """From now on `abort_connections` ends this connection, too."""
        self._transports.add(stream[1].transport)
        return stream

    def abort_connections(self) -> None:
        """End all connections that were opened here, even if they still have something to send."""
        for transport in list(self._transports):
            with contextlib.suppress(AttributeError):  # Python 3.11.2, of a TLS connection that has ended
                transport.abort()

    async def end(self) -> None:
        """End all tasks but the current one."""
        await self._end_tasks()

    async def release(self) -> None:
        """Called at the end, each time that tasks were cancelled, which may still have begun something until then."""

    async def _end_and_stop(self) -> None:
        try:
            await within(CLOSING_S, self.end())
        except TimeoutError:
            logging.getLogger(__name__).debug("not all of what is to end has ended in %g s", CLOSING_S)
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

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._note_failure(self.loop, {"message": "it ended", "exception": error})

    def _note_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log the failure of a task that nobody awaits, such as a library's, in one line; at the end, not at all."""
        error = context.get("exception")
        said = context["message"] if error is None else f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        level = logging.DEBUG if self._closing else logging.WARNING
        logging.getLogger(__name__).log(level, "diloco: a task of the connections failed: %s", said)
        logging.getLogger(__name__).debug("where it did", exc_info=error)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
