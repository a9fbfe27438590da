"""What a rank has in place of sockets and threads: connections of `tests.membership.network`, and things to do next."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn
from unittest import mock

from diloco.membership.lateness import Lateness
from diloco.transport.address import Address
from diloco.transport.peers import transport
from diloco.transport.peers.data_link import LinkRequest
from diloco.transport.peers.view_links import ViewLinks
from tests.membership.network import Network

__all__ = ["Board", "Threads", "no_link", "without_threads"]

SOON_S = 1.0
"""What is to happen within this time waits for nothing but the rank itself."""


class Board:
    """A connection manager whose connections are the network's."""

    def __init__(self, network: Network, rank: int, todo: deque[Callable[[], object]]) -> None:
        self.address = Address("simulated", rank)
        self.services: dict[str, Any] = {}
        self.loop = SimpleNamespace(call_later=self._call_later)
        self.spoken: Counter[int] = Counter()  # nobody sends beats of its own accord
        self.timers: list[tuple[float, Callable[[], object]]] = []
        self._network, self._rank, self._todo = network, rank, todo

    @property
    def connected(self) -> frozenset[int]:
        return frozenset(rank for rank in self._network.ranks if self.connection(rank) is not None)

    def words(self, rank: int) -> int:
        return self.spoken[rank]

    def connection(self, rank: int) -> object | None:
        return self._network.connection(self._rank, rank)

    def send(self, rank: int, message: Mapping[str, Any], blob: bytes = b"") -> None:
        self._network.send(self._rank, rank, json.dumps(message))

    def hang_up(self, rank: int) -> None:
        self._network.hang_up(self._rank, rank)

    def address_of(self, rank: int) -> Address:
        return Address("simulated", rank)

    def _call_later(self, delay_s: float, function: Callable[..., object], *arguments: Any) -> SimpleNamespace:
        timer = (delay_s, lambda: function(*arguments))
        if delay_s > SOON_S:
            self.timers.append(timer)
        else:
            self.post(function, *arguments)
        return SimpleNamespace(cancel=lambda: timer in self.timers and self.timers.remove(timer))

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        self._todo.append(lambda: function(*arguments))

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        try:
            coroutine.send(None)
        except StopIteration:
            return
        raise AssertionError("something waits in the control thread")


def no_link(request: LinkRequest) -> NoReturn:
    raise AssertionError("links are the network's")


class Threads:
    """Threads that connect payload links, which works where control connections stand, or that exchange payloads."""

    exchanging: ClassVar[deque[Any]] = deque()

    def start(self, target: Any, *arguments: Any, name: str) -> None:
        owner = target.__self__
        if isinstance(owner, ViewLinks):
            view, links = arguments
            rules, connections = owner._rules, owner._connections
            peers = [peer for peer in view.members if peer != rules.replica]
            size, connected = rules.ranks_per_replica, connections.connected
            failed = {
                peer: "no connection"
                for peer in peers
                if not connected.issuperset(range(peer * size, (peer + 1) * size))
            }
            connections.post(owner._connected, links, {}, failed)
        else:
            self.exchanging.append((owner, *arguments))


@contextmanager
def without_threads() -> Iterator[None]:
    with (
        mock.patch.object(transport, "Threads", Threads),
        mock.patch.object(transport, "Postman"),
        mock.patch.object(Lateness, "LOOKS", 1),
    ):
        yield
