"""The scheduler of the uplink that all payload links of a rank share: one pacing rate, and turns."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from diloco.transport.connections.path import Pace

if TYPE_CHECKING:
    from diloco.transport.connections.reliable_link import ReliableLink

__all__ = ["SendScheduler"]


class SendScheduler:
    """Paces all links of a rank together and decides which of the waiting links sends next.

    The link with the most bytes left to send goes first. All links then finish at about the same time, and no path is
    saturated at first and idle later.

    Args:
        loop: The event loop in whose thread everything runs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.pace = Pace()  # of all links together
        self._waiting: dict[ReliableLink, None] = {}
        self._next: ReliableLink | None = None  # the link whose turn it is
        self._timer: asyncio.TimerHandle | None = None

    def may_send(self, link: ReliableLink) -> bool:
        """Return whether ``link`` may send a part now. If not, the link is woken when its turn comes."""
        if self.pace.wait_s(self.loop.time()) <= 0 and (link is self._next or not self._waiting):
            return True
        self._waiting[link] = None
        if self._timer is None and self._next is None:
            self._wait()
        return False

    def _wait(self) -> None:
        self._timer = self.loop.call_later(self.pace.wait_s(self.loop.time()), self._serve_waiting)

    def _serve_waiting(self) -> None:
        self._timer = None
        try:
            while self._waiting and self.pace.wait_s(self.loop.time()) <= 0:
                self._next = max(self._waiting, key=lambda link: link.waiting_bytes)
                del self._waiting[self._next]
                self._next.wake()
        finally:  # an error in one link must not stop the others
            self._next = None
            if self._waiting:
                self._wait()
