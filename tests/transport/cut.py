"""A network partition, emulated inside one process: no data passes between it and the others, and no connection ends.

As with TCP, data written and connections closed during the partition take effect in the same order when it heals.
Incoming data and ends of connections are noticed then, too. So neither side sees an end or a reset during the cut.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from diloco.transport import ConnectionManager, ReliableLink
from diloco.transport.connections import connection_manager, control_connection

__all__ = ["Cut"]


class Cut:
    """The network links of this process. Make only one per process, as it replaces methods of classes permanently."""

    def __init__(self) -> None:
        self._whole = threading.Event()
        self._whole.set()
        self._whole_in_loop = asyncio.Event()  # the same event for the control thread
        self._whole_in_loop.set()
        self._lock = threading.Lock()
        self._put_off: list[Callable[[], object]] = []
        for owner, method in (
            (asyncio.StreamWriter, "write"),
            (asyncio.StreamWriter, "close"),
            (ReliableLink, "send"),
            (ReliableLink, "close"),
        ):
            setattr(owner, method, self._putting_off(getattr(owner, method)))
        self._hold_back_payloads()
        self._hold_back_control()

    def cut(self) -> None:
        """Cut the network. Any thread may call this."""
        with self._lock:
            self._whole.clear()
            self._whole_in_loop.clear()

    def heal(self, connections: ConnectionManager) -> None:
        """Heal the network and perform the postponed actions. Any thread but the control thread may call this."""
        connections.call(self._heal())

    async def _heal(self) -> None:
        with self._lock:
            put_off, self._put_off = self._put_off, []
            self._whole.set()
        for act in put_off:
            act()
        self._whole_in_loop.set()

    def _putting_off(self, method: Callable[..., None]) -> Callable[..., None]:
        def put_off(*arguments: Any) -> None:
            with self._lock:
                if not self._whole.is_set():
                    self._put_off.append(lambda: method(*arguments))
                    return
            method(*arguments)

        return put_off

    def _hold_back_payloads(self) -> None:
        receive = ReliableLink.receive

        def held_receive(link: ReliableLink, tag: int, room: memoryview, come: Future[None]) -> None:
            work: Future[None] = Future()
            work.add_done_callback(self._putting_off(partial(_tell, come)))
            receive(link, tag, room, work)

        ReliableLink.receive = held_receive  # type: ignore[method-assign]

    def _hold_back_control(self) -> None:
        open_connection = asyncio.open_connection

        def held(read: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
            async def held_read(*arguments: Any) -> Any:
                try:
                    return await read(*arguments)
                finally:
                    await self._whole_in_loop.wait()

            return held_read

        async def held_open(*arguments: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            await self._whole_in_loop.wait()
            return await open_connection(*arguments)

        for module, name in (
            (connection_manager, "read_frame"),
            (control_connection, "read_head"),
            (control_connection, "read_body"),
        ):
            setattr(module, name, held(getattr(module, name)))
        asyncio.open_connection = held_open  # type: ignore[assignment]


def _tell(come: Future[None], work: Future[None]) -> None:
    """Pass on the outcome of a delivery that was hidden during the cut."""
    if error := work.exception():
        come.set_exception(error)
    else:
        come.set_result(None)
