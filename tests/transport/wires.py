"""Ranks connected over TCP, each with its own threads and connections, in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from diloco.protocol import Entry, Rules
from diloco.transport import (
    Address,
    ConnectionManager,
    Credentials,
    Directory,
    PeerTransport,
    Place,
    TcpDirectory,
    TcpStreams,
    connect,
    serve_probes,
)

LIMIT_S = 60.0
"""Far longer than anything here takes, even on a busy machine."""

QUICK: dict[str, Any] = {"heartbeat_s": 0.2, "silence_s": 5.0, "round_timeout_s": 20.0, "rendezvous_timeout_s": 20.0}


@contextmanager
def rendezvous(
    ranks: int, ranks_per_replica: int = 1, secret: str = "", known: dict[int, Entry] | None = None
) -> Iterator[Address]:
    """A rendezvous of so many ranks at an address that belongs to none of them; those that have come are ``known``."""
    transport = PeerTransport(
        Rules(rank=-1, ranks_per_replica=ranks_per_replica), TcpStreams(Credentials(secret=secret))
    )
    transport.connections.most_ranks = ranks
    transport.connections.entries = {} if known is None else known
    TcpDirectory(transport, (), Address("", 0), gathers=True)
    try:
        yield transport.connections.listen("127.0.0.1", range(1), "127.0.0.1")
    finally:
        transport.close()


@contextmanager
def answering_probes(host: str = "127.0.0.1") -> Iterator[Address]:
    """An address that answers the doctor's probes."""
    connections = ConnectionManager(Rules(rank=-1), TcpStreams())
    try:
        serve_probes(connections)
        yield connections.listen(host, range(1), host)
    finally:
        connections.close()


def at_once(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call all functions in threads, and return their results or the exceptions that they raised."""
    results: list[Any] = [None] * len(functions)

    def call(index: int) -> None:
        try:
            results[index] = functions[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class Wires:
    """Makes and closes the transports of ranks that rendezvous at one address."""

    def __init__(self) -> None:
        self.transports: list[PeerTransport] = []
        self._exits = ExitStack()

    def meet(
        self,
        num_replicas: int,
        *,
        ranks_per_replica: int = 1,
        secret: str = "",
        on_change: Mapping[int, Callable[..., bytes]] | None = None,
        **rules: Any,
    ) -> list[PeerTransport]:
        """Return the transports of all ranks; ``on_change``: rank -> that of `connect`."""
        address = self._exits.enter_context(rendezvous(num_replicas * ranks_per_replica, ranks_per_replica, secret))

        def one(rank: int) -> Directory:
            replica, position = divmod(rank, ranks_per_replica)
            size: dict[str, Any] = {"num_replicas": num_replicas, "ranks_per_replica": ranks_per_replica}
            place = Place(replica=replica, position=position, rendezvous=address, secret=secret, **size)
            told = (on_change or {}).get(rank)
            return connect(place, Rules(**(QUICK | rules)), on_change=told)

        found = at_once([lambda rank=rank: one(rank) for rank in range(num_replicas * ranks_per_replica)])
        for each in found:
            if isinstance(each, Exception):
                raise each
        transports = [each.transport for each in found]
        self.transports += transports
        return transports

    def close(self) -> None:
        at_once([transport.close for transport in self.transports])
        self._exits.close()


def wait_for_members(transport: PeerTransport, number: int) -> None:
    """Wait until the view has this many members."""
    transport.connections.wait_for(lambda: len(transport.view.members) == number, LIMIT_S)
    assert len(transport.view.members) == number
