"""Payloads of all rounds on their way to the links: in the order in which they were given, and as fast as a link is."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from diloco.errors import TransportError
from diloco.transport.peers.data_link import Work
from diloco.transport.shaping import Pacer

__all__ = ["Postman"]


class Postman:
    """Hands messages to the links in the order in which they were given: fragments share the way in order.

    Args:
        pacer: emulates a slow link; None: everything is handed over at once.
    """

    def __init__(self, pacer: Pacer | None = None) -> None:
        self._pacer = pacer
        self._queue: list[tuple[float, int, Callable[[], Work], Future[Work]]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="diloco-post", daemon=True)
        self._thread.start()

    def post(self, num_bytes: int, send: Callable[[], Work]) -> Future[Work]:
        """Call ``send`` when what was posted before is on its way and the link has had time for ``num_bytes``."""
        future: Future[Work] = Future()
        with self._changed:
            due_s = self._pacer.arrival_s(time.monotonic(), num_bytes) if self._pacer else 0.0
            heapq.heappush(self._queue, (due_s, next(self._numbers), send, future))
            self._changed.notify()
        return future

    def close(self, timeout_s: float) -> None:
        """Hand over nothing more, once what is being handed over is, for which this waits so long."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        for _, _, _, future in self._queue:
            future.set_exception(TransportError("the transport was closed"))

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (wait_s := self._wait_s()) != 0.0:
                    self._changed.wait(wait_s)
                if self._closed:
                    return
                _, _, send, future = heapq.heappop(self._queue)
            try:
                future.set_result(send())
            except (RuntimeError, TransportError) as error:  # the link has ended
                future.set_exception(error)
            del send, future  # or they would be kept until the next message

    def _wait_s(self) -> float | None:
        return max(0.0, self._queue[0][0] - time.monotonic()) if self._queue else None
