"""A network that falls apart, inside one process: nothing gets through between it and the others, and nothing ends.

What is written or closed while the way is cut happens when it is whole again, in the same order, as TCP would have it;
what comes in, the end of a connection too, is noticed then. So neither side sees an end or a reset because of the cut.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from diloco.errors import TransportError
from diloco.transport.peers import connection_manager, control_connection
from diloco.transport.peers.connection_manager import ConnectionManager
from diloco.transport.peers.reliable_link import ReliableLink

__all__ = ["Cut"]


class Cut:
    """The ways out of this process and into it. One for a process: it replaces methods of classes, for good."""

    def __init__(self) -> None:
        self._whole = threading.Event()  # for threads that wait for payloads
        self._whole.set()
        self._whole_in_loop = asyncio.Event()  # the same, for the control thread
        self._whole_in_loop.set()
        self._lock = threading.Lock()
        self._put_off: list[Callable[[], object]] = []
        for owner, method in (
            (asyncio.StreamWriter, "write"),
            (asyncio.StreamWriter, "close"),
            (ReliableLink, "close"),
        ):
            setattr(owner, method, self._putting_off(getattr(owner, method)))
        self._hold_back_payloads()
        self._hold_back_control()

    def cut(self) -> None:
        """From now on nothing gets through. For any thread."""
        with self._lock:
            self._whole.clear()
            self._whole_in_loop.clear()

    def heal(self, connections: ConnectionManager) -> None:
        """What was put off happens now; a whole way stays whole. For any thread but the control thread."""
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
        send, receive = ReliableLink.send, ReliableLink.receive

        def held_send(link: ReliableLink, values: Tensor, tag: int) -> Any:
            sent: Future[Future[None]] = Future()

            def act() -> None:
                try:
                    sent.set_result(send(link, values, tag))
                except TransportError as error:
                    sent.set_exception(error)

            self._putting_off(act)()
            return _Sent(sent)

        def held_receive(link: ReliableLink, values: Tensor, tag: int) -> Any:
            return _Held(receive(link, values, tag), self._whole)

        ReliableLink.send = held_send  # type: ignore[method-assign]
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


@dataclass(frozen=True)
class _Sent:
    """A message that leaves now, or when the way is whole again."""

    begun: Future[Future[None]]

    def result(self) -> None:
        self.begun.result().result()


class _Held:
    """A receipt of which nobody hears while the way is cut."""

    def __init__(self, work: Future[None], whole: threading.Event) -> None:
        self._work = work
        self._whole = whole

    def result(self) -> None:
        try:
            self._work.result()
        finally:
            self._whole.wait()
