"""What all payload links of a rank leave through: one pace, and turns."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from diloco.transport.connections.path import Pace

if TYPE_CHECKING:
    from diloco.transport.connections.reliable_link import ReliableLink

__all__ = ["Outlet"]


class Outlet:
    """Lets links send at the pace of their way out. Where they have to wait, the one with most left to send is next, so
    all are served side by side and done at about one time: no way to another host is full first and empty later.

    Args:
        loop: whose thread does everything.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.pace = Pace()  # of all links together
        self._waiting: dict[ReliableLink, None] = {}
        self._next: ReliableLink | None = None  # whose turn it is
        self._timer: asyncio.TimerHandle | None = None

    def may_send(self, link: ReliableLink) -> bool:
        """Whether a part of this link may leave now; if not, the link is woken in its turn."""
        if self.pace.wait_s(self.loop.time()) <= 0 and (link is self._next or not self._waiting):
            return True
        self._waiting[link] = None
        if self._timer is None and self._next is None:
            self._wait()
        return False

    def _wait(self) -> None:
        self._timer = self.loop.call_later(self.pace.wait_s(self.loop.time()), self._go_on)

    def _go_on(self) -> None:
        self._timer = None
        try:
            while self._waiting and self.pace.wait_s(self.loop.time()) <= 0:
                self._next = max(self._waiting, key=lambda link: link.waiting_bytes)
                del self._waiting[self._next]
                self._next.wake()
        finally:  # whatever becomes of one link, the others go on
            self._next = None
            if self._waiting:
                self._wait()
