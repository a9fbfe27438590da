"""Payloads of all rounds on their way to the links, no faster than an emulated link is."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from torch import Tensor

from diloco.errors import TransportError
from diloco.transport.peers.data_link import DataLink, Work
from diloco.transport.shaping import Pacer

__all__ = ["SendQueue"]

_Waiting = tuple[float, int, Callable[[], Work], "Future[Work]"]


class SendQueue:
    """Hands messages to the links: at once, or, where they are paced, in the order in which they were given.

    Args:
        pacer: emulates a slow link, for which a thread waits; None: nothing waits.
    """

    def __init__(self, pacer: Pacer | None = None) -> None:
        self._pacer = pacer
        self._queue: list[_Waiting] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="diloco-send", daemon=True)
        if pacer is not None:
            self._thread.start()

    def send(self, link: DataLink, values: Tensor, stream: int, tag: int) -> Work:
        """As `DataLink.send`, when the link has had time for what was sent before; errors are raised by who waits."""
        send, sent = partial(link.send, values, stream, tag), _Sent()
        if self._pacer is None:
            _hand_over(send, sent.future)
        else:
            with self._changed:
                due_s = self._pacer.arrival_s(time.monotonic(), values.nbytes)
                waiting: _Waiting = (due_s, next(self._numbers), send, sent.future)
                heapq.heappush(self._queue, waiting)
                self._changed.notify()
        return sent

    def close(self, timeout_s: float) -> None:
        """Hand over nothing more, once what is being handed over is, for which this waits so long."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._pacer is not None:
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
            _hand_over(send, future)
            del send, future  # or they would be kept until the next message

    def _wait_s(self) -> float | None:
        return max(0.0, self._queue[0][0] - time.monotonic()) if self._queue else None


class _Sent:
    """A message that is on its way once the queue has handed it over."""

    def __init__(self) -> None:
        self.future: Future[Work] = Future()

    def wait(self) -> None:
        self.future.result().wait()


def _hand_over(send: Callable[[], Work], future: Future[Work]) -> None:
    try:
        future.set_result(send())
    except (RuntimeError, TransportError) as error:  # the link has ended
        future.set_exception(error)
