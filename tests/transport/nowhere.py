"""Addresses at which nothing listens, and errors that must be raised in time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from diloco.errors import RendezvousError
from diloco.protocol import Entry, Rules
from diloco.transport import Address, Credentials, Place, TcpStreams
from tests.transport.relays import frame, plain_stranger_at
from tests.transport.wires import QUICK

PATIENCE_S = 1.0
"""The rendezvous time-out of tests in which it expires."""


@contextmanager
def nobody_at(host: str = "127.0.0.1") -> Iterator[Address]:
    """Reserve an address at which nothing listens."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as held:
        held.bind((host, 0))
        yield Address(host, int(held.getsockname()[1]))


def free_address(host: str = "127.0.0.1") -> Address:
    """Return an address that was free a moment ago."""
    with nobody_at(host) as address:
        return address


def failure(function: Callable[..., object], *arguments: Any, **named: Any) -> str:
    """Return the message of the `RendezvousError` that must be raised within the time-out."""
    started_s = time.monotonic()
    with pytest.raises(RendezvousError) as caught:
        function(*arguments, **named)
    assert time.monotonic() - started_s < PATIENCE_S + 20, "it hung"
    return str(caught.value)


def diloco_threads() -> set[threading.Thread]:
    """Return the threads of open transports in this process; one of an earlier test may still be ending."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("diloco")}


def place(rank: int, num_replicas: int, address: Address, **where: Any) -> Place:
    return Place(replica=rank, num_replicas=num_replicas, rendezvous=address, **where)


def rules(**given: Any) -> Rules:
    return Rules(**(QUICK | {"rendezvous_timeout_s": PATIENCE_S} | given))


@contextmanager
def registering(address: Address, entry: Entry) -> Iterator[None]:
    """Register a rank that listens nowhere, and ask again and again as a rank does."""
    credentials, done = Credentials(), threading.Event()
    entry = replace(entry, key=TcpStreams(credentials).me)

    def ask() -> None:
        while not done.wait(0.05):
            with suppress(OSError), credentials.opening.wrap_socket(plain_stranger_at(address)) as asking:
                asking.sendall(frame({"kind": "ask", "entry": entry}))
                assert asking.recv(1) == b"+"
                asking.recv(1 << 12)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def answering(known: object, credentials: Credentials | None = None) -> Iterator[Address]:
    """An address at which another program answers the next question, by default with a key of its own."""
    credentials = credentials or Credentials()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def lie() -> None:
            with credentials.listening.wrap_socket(listening.accept()[0], server_side=True) as asking:
                asking.sendall(b"+" + frame(known))
                asking.recv(1 << 16)

        threading.Thread(target=lie, daemon=True).start()
        yield Address(*listening.getsockname())
