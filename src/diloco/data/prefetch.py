"""Batches made ahead of the training, in a thread: the same ones, with the same cursor."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from diloco.data.assignment import Assignment
from diloco.data.batches import Batch, Batches, Cursor

__all__ = ["Prefetcher"]

_WAIT_S = 0.01  # how long to wait for the thread's end before making room in its queue again


@dataclass(frozen=True)
class _Made:
    """A batch with the cursor and epochs after it, or the error in place of a batch."""

    batch: Batch | None
    cursor: dict[str, Any]
    epochs: Mapping[str, float]
    error: BaseException | None = None


class Prefetcher:
    """`Batches` around others, of which the next few are made in a thread while training goes on.

    The cursor is that of the last batch given, whatever was made ahead. An error in the thread is raised where its
    batch would have been given, and again at each later attempt.

    Args:
        batches: only this object uses them from now on.
        ahead: batches made ahead, at least 1.
    """

    def __init__(self, batches: Batches, ahead: int, called: str = "prefetch") -> None:
        self._batches = batches
        self._ahead = ahead
        self._called = called
        self._cursor = batches.state_dict()
        self._epochs = batches.epochs
        self._queue: queue.Queue[_Made] = queue.Queue(ahead)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None

    @property
    def epochs(self) -> Mapping[str, float]:
        return self._epochs

    @property
    def order(self) -> str:
        with self._paused():
            return self._batches.order

    def next_batch(self) -> Batch:
        """The next batch, waiting for it where it is not ready; what the thread raised, where it failed."""
        if self._failed is not None:
            raise self._failed
        if self._thread is None:
            self._thread = threading.Thread(target=self._make, name=self._called, daemon=True)
            self._thread.start()
        made = self._queue.get()
        if made.error is not None:
            self._failed = made.error
            self._end()
            raise made.error
        assert made.batch is not None
        self._cursor, self._epochs = made.cursor, made.epochs
        return made.batch

    def skip_batch(self) -> None:
        with self._paused():
            self._batches.skip_batch()

    def assign(self, assignment: Assignment) -> None:
        with self._paused():
            self._batches.assign(assignment)

    def state_dict(self) -> dict[str, Any]:
        return self._cursor

    def load_state_dict(self, state: Cursor) -> None:
        with self._paused():
            self._batches.load_state_dict(state)

    def go_on_from(self, cursor_of: Callable[[int], Cursor], before: int) -> None:
        with self._paused():
            self._batches.go_on_from(cursor_of, before)

    def join_at(self, step: int, order: str) -> None:
        with self._paused():
            self._batches.join_at(step, order)

    def close(self) -> None:
        """End the thread; what it made is lost, and the cursor stays."""
        self._end()
        self._batches.close()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Inside, the batches stand where the cursor says, and no thread uses them."""
        if self._thread is not None or self._failed is not None:
            self._end()
            self._batches.load_state_dict(self._cursor)
            self._failed = None
        try:
            yield
        finally:
            self._cursor, self._epochs = self._batches.state_dict(), self._batches.epochs

    def _make(self) -> None:
        while not self._stop.is_set():
            try:
                batch = self._batches.next_batch()
                made = _Made(batch, self._batches.state_dict(), self._batches.epochs)
            except BaseException as error:  # to be raised where the batch would have been given
                made = _Made(None, self._cursor, self._epochs, error)
            self._queue.put(made)
            if made.error is not None:
                return

    def _end(self) -> None:
        if self._thread is None:
            return
        self._stop.set()
        while self._thread.is_alive():  # it may wait for room
            with suppress(queue.Empty):
                self._queue.get_nowait()
            self._thread.join(_WAIT_S)
        self._thread = None
        self._stop.clear()
        self._queue = queue.Queue(self._ahead)
